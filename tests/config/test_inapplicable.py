"""Settings without effect in this run are refused, or only named if they are not the user's mistake."""

import shlex

import pytest

from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.config.inapplicable import EFFECTS, inapplicable, matching, possibly_inapplicable

PROMPTS = "--prompt-data a.jsonl"


def said(line: str, purpose: str = "train") -> tuple[list[str], list[str]]:
    """Return the refused settings, and the named ones."""
    settings = RunSettings.from_cli(shlex.split(line))
    return inapplicable(settings, purpose), possibly_inapplicable(settings, purpose)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--group-rm", "--group-rm has no effect without --custom-rm-path; leave it out"),
        (
            "--sglang-mem-fraction-static 0.8 --sglang-bogus 3",
            "--sglang-mem-fraction-static, --sglang-bogus have no effect without --engine sglang; leave them out",
        ),
        ("--lr-wsd-decay-style cosine", "--lr-wsd-decay-style cosine has no effect without --lr-decay-style WSD"),
        ("--min-lr 1e-7", "--min-lr 1e-07 has no effect with --lr-decay-style constant; leave it out"),
        ("--eval-top-p 0.5", "--eval-top-p 0.5 has no effect without --eval-prompt-data"),
        ("--debug-rollout-only --load-debug-rollout-data d", "--debug-rollout-only has no effect with --load-debug"),
        ("--engine embedded --rollout-external-engine-addrs x:1", "--rollout-external-engine-addrs has no effect with"),
        ("--agent 'run {prompt}' --max-turns 3", "--max-turns 3 has no effect with --agent, whose program decides"),
        ("--num-epoch 3", "--num-epoch 3 has no effect without --prompt-data; leave it out"),
        (
            "--eval-prompt-data a b.jsonl --no-eval-before-train",
            "--eval-prompt-data has no effect with --no-eval-before-train and without --eval-interval; leave it out",
        ),
        ("--wandb-group g", "--wandb-group g has no effect without --use-wandb; leave it out"),
        ("--dump-details d --save-debug-rollout-data e", "--dump-details d has no effect with --save-debug"),
        ("--offload-train --offload-rollout", "--offload-train, --offload-rollout have no effect without --colocate"),
        ("--allow-truncated-sampling", "--allow-truncated-sampling has no effect without --rollout-top-p"),
        ("--backend local --engine-port-base 9000", "--engine-port-base 9000 has no effect with --backend local"),
    ],
)
def test_a_setting_without_effect_is_refused(line: str, sentence: str) -> None:
    found, notes = said(line)
    assert [text for text in found if text.startswith(sentence)], (found, notes)


@pytest.mark.parametrize("purpose", ["rollout", "eval"])
def test_dumps_to_train_on_are_only_named_where_nothing_trains(purpose: str) -> None:
    refused, (note,) = said("--debug-rollout-only --load-debug-rollout-data d", purpose)  # these commands set the first
    assert refused == []
    assert "--load-debug-rollout-data" in note


def test_in_slimes_form_it_is_named() -> None:
    settings = RunSettings.from_flat({"slime_defaults": True, "group_rm": True, "hf_checkpoint": ".", "env": "a:b"})
    sentence = "--group-rm has no effect without --custom-rm-path; leave it out"
    assert sentence in possibly_inapplicable(settings, "train")
    assert settings.check_complete("train") is settings


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--agent 'run {prompt}' --max-turns 3 --eval-config sets.yaml",
        "--lr-decay-style WSD --lr-wsd-decay-iters 3 --min-lr 1e-9",
        "--lr-warmup-fraction 0.1 --lr-decay-iters 10",
        "--engine sglang --sglang-mem-fraction-static 0.8",
        "--rollout-external-engine-addrs x:1 --sglang-api-key k",
        "--embedded-slots 64 --eval-interval none",
        "--dump-details d",
        f"{PROMPTS} --rm-type boxed_remote_rm --rm-url x --num-epoch 2",
        "--rollout-top-k 5 --allow-truncated-sampling --advantage-estimator ppo --critic-lr 1e-3",
        "--use-kl-loss --kl-loss-coef 0.1 --ref-load x --ref-update-interval 2",
    ],
)
def test_settings_with_an_effect_and_defaults_are_not_named(line: str) -> None:
    assert said(line) == ([], [])


@pytest.mark.parametrize(
    ("line", "purpose", "note"),
    [
        ("--lr 1e-3 --save x --rollout-workers 2", "rollout", "agentrl rollout does not read --save, --lr"),
        (
            "--lr 1e-3 --use-wandb --rollout-top-p 0.5 --rollout-workers 2 --ray-address x:1",
            "eval",
            "agentrl eval does not read --lr, --use-wandb",
        ),
        ("--lr 1e-3 --debug-rollout-only", "train", "--debug-rollout-only does not read --lr"),
        ("--env a:b --load-debug-rollout-data d", "train", "--load-debug-rollout-data does not read --env"),
        (
            "--rm-url x --rm-type math",
            "train",
            "--rm-url x has no effect without --rm-type remote_rm, unless rows or your code ask for that grader; "
            "leave it out otherwise",
        ),
        (
            f"{PROMPTS} --data-source-path a:b",
            "train",
            "--prompt-data a.jsonl has no effect with --data-source-path, unless your source reads it; leave it out otherwise",
        ),
        (
            "--env a:B --custom-generate-function-path a:c",
            "train",
            "--env a:B has no effect with --custom-generate-function-path, unless your function uses its tools; leave it out otherwise",
        ),
        (
            f"{PROMPTS} --num-epoch 1 --num-rollout 100",
            "train",
            "--num-rollout 100 and --num-epoch 1: the run ends with whichever comes first; leave one of them out",
        ),
        (
            "--use-kl-loss --kl-loss-coef 0",
            "train",
            "--use-kl-loss has no effect on the loss with --kl-loss-coef 0: the KL is only measured",
        ),
    ],
)
def test_a_setting_without_effect_that_is_no_mistake_is_only_named(line: str, purpose: str, note: str) -> None:
    assert said(line, purpose) == ([], [note])


def test_addresses_alone_decide_the_engine() -> None:
    found = RunSettings.from_cli(["--rollout-external-engine-addrs", "127.0.0.1:9999"])
    assert found.engine.engine == "external"
    assert "engine" not in found.given()
    assert found.replace(lr=1).engine.engine == "external"


def test_every_name_of_the_table_is_a_setting() -> None:
    for effect in EFFECTS:
        for name in effect.names.split():
            assert matching(name), name
    assert matching("rm_hub.* - judge_*") | matching("judge_*") == {
        n for n, f in all_fields().items() if f.section == "rm_hub"
    }
