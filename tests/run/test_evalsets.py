"""Evaluation sets: their settings in a file, and that each is played by its own settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread

from agentrl.config import RunSettings
from agentrl.errors import AgentRLError
from agentrl.rollout.worker import RolloutWorker
from agentrl.run.driver import open_folder
from agentrl.run.evalsets import eval_sets, name_paths
from agentrl.run.preflight import preflight
from agentrl.run.rollouts import LedgerRollouts, RolloutResources
from tests.run.test_rollouts import Engines, settings
from tests.support.runs import RunKit
from tests.test_docs import ROOT, blocks, write_files

SLIMES = """
eval:
  defaults:
    max_response_len: 16384
    top_p: 0.7
    rm_type: deepscaler
  datasets:
    - name: aime
      path: a.jsonl
      n_samples_per_eval_prompt: 16
      label_key: null
    - name: gpqa    # with fields of its own
      path: b.jsonl@[0:1]
      rm_type: gpqa
      top_p: 0.9
      stop: ["</answer>"]
      input_key: question
      metadata_overrides: {choices: 4}
"""
ENVS = """
from agentrl import Environment


class Sized(Environment):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def reward(self, sample):
        return self.size if self.evaluating else -1.0


async def generate(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.rollout_log_probs = [41, 40], 1, [-0.5]
    return sample


def reward(args, sample):
    return 10.0 if args.custom_rm_path else 0.0
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    kit = RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=2)
    (kit.folder / "sized.py").write_text(ENVS)
    (kit.folder / "a.jsonl").write_text(json.dumps({"input": "1 + 1?", "label": "2"}))
    (kit.folder / "b.jsonl").write_text(
        json.dumps({"question": "A, B, C or D?", "label": "A", "metadata": {"rm_type": "f1"}})
    )
    return kit


@pytest.fixture(autouse=True)
def _here(kit: RunKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kit.folder)


def given(text: str, **changes: object) -> RunSettings:
    Path("evals.yaml").write_text(text)
    flat = {"hf_checkpoint": "model", "prompt_data": "prompts.jsonl", "rm_type": "math", "label_key": "label"}
    return RunSettings.from_flat({**flat, "eval_config": "evals.yaml", "eval_top_k": 7, **changes})


def test_slimes_file_loads() -> None:
    aime, gpqa = eval_sets(given(SLIMES))
    got = [
        (s.name, s.settings.rollout.eval_max_response_len, s.settings.rollout.eval_top_p, s.settings.rollout.eval_top_k)
        for s in (aime, gpqa)
    ]
    assert got == [("aime", 16384, 0.7, 7), ("gpqa", 16384, 0.9, 7)]
    assert [len(group) for group in aime.groups()] == [16]
    assert aime.settings.data.label_key == "label"
    (sample,) = gpqa.groups()[0]
    assert sample.metadata == {"rm_type": "gpqa", "choices": 4, "attempt": "eval"}
    assert gpqa.settings.rollout.rollout_stop == ("</answer>",)
    assert gpqa.settings.args.eval_prompt_data == ("gpqa", "b.jsonl@[0:1]")


def test_a_set_without_a_name_takes_its_files_whatever_the_folder_is_called() -> None:
    assert name_paths(("me@home/held.jsonl@[0:2]",)) == [("held", "me@home/held.jsonl@[0:2]")]
    with pytest.raises(AgentRLError, match=r"expects NAME PATH pairs, got a\.jsonl@\[1:\] b\.jsonl"):
        name_paths(("a.jsonl@[1:]", "b.jsonl"))


def test_a_sets_own_context_holds_its_own_answers() -> None:
    Path("c.jsonl").write_text('{"input": "1?"}\n')
    run = given(
        "datasets:\n  a: {path: c.jsonl, max_context_len: 64, max_response_len: 32}", rollout_max_response_len=99
    )
    (only,) = eval_sets(run)
    assert (only.settings.rollout.rollout_max_context_len, only.settings.rollout.eval_max_response_len) == (64, 32)
    run = given("datasets:\n  a: {path: c.jsonl, max_context_len: 64, max_response_len: 65}")
    (only,) = eval_sets(run)
    assert only.settings.rollout.eval_max_response_len == 65, "the context ends such an answer"


def test_fields_and_lengths_of_all_sets_give_way_to_a_sets_own() -> None:
    text = "datasets:\n  a: {path: c.jsonl}\n  b: {path: c.jsonl, input_key: q, max_context_len: 64, min_new_tokens: 2}"
    Path("c.jsonl").write_text('{"question": "1?", "q": "2?", "answer": "3"}\n')
    run = given(
        text, eval_input_key="question", eval_label_key="answer", eval_max_prompt_len=7, eval_max_context_len=99
    )
    first, second = eval_sets(run)
    assert [next(iter(one.data)).prompt for one in (first, second)] == ["1?", "2?"]
    assert {next(iter(one.data)).label for one in (first, second)} == {"3"}
    lengths = [
        (s.settings.rollout.rollout_max_prompt_len, s.settings.rollout.rollout_max_context_len) for s in (first, second)
    ]
    assert lengths == [(7, 99), (7, 64)]
    assert [s.settings.rollout.eval_max_context_len for s in (first, second)] == [99, None], "64 is the set's own"
    assert second.settings.rollout.eval_min_new_tokens == 2
    assert (run.data.input_key, run.rollout.rollout_max_prompt_len) == ("input", None)


def test_sets_by_name_without_the_word_eval() -> None:
    (one,) = eval_sets(given("datasets:\n  dev:\n    path: a.jsonl\n    temperature: 0"))
    assert (one.name, one.settings.rollout.eval_temperature) == ("dev", 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", r"evals.yaml: expected settings as `name: value`"),
        ("eval: [a]", "evals.yaml: expected `eval:` with `datasets:`"),
        ("eval: {datasets: 3}", "expected `eval:` with `datasets:`"),
        ("eval: {datasets: []}", "expected `eval:` with `datasets:`"),
        ("eval: {datasets: [a.jsonl]}", "expected `eval:` with `datasets:`"),
        ("eval: {dataset: [{name: a, path: a.jsonl}]}", "expected `eval:` with `datasets:`"),
        ("datasets:\n  - path: a.jsonl", "evals.yaml line 2: name must be text, got None"),
        ("datasets:\n  a:\n    path: [a]", r"evals.yaml line 3, path: path must be text, got \['a'\]"),
        ("datasets:\n  a:\n    path: x.jsonl", "evals.yaml line 2: .*x.jsonl"),
        ("datasets:\n  a:\n    path: a.jsonl\n    path: b", "line 4: datasets.a.path is given twice"),
        (
            "datasets:\n  a: {path: a.jsonl, temprature: 1}",
            "line 2, temprature: a set has no temprature; did you mean temp",
        ),
        (
            "defaults:\n  min_eval_samples: 3\ndatasets:\n  a: {path: a.jsonl}",
            "evals.yaml line 2, min_eval_samples: a set",
        ),
        (
            "datasets:\n  a:\n    path: a.jsonl\n    temperature: hot",
            "evals.yaml line 4, temperature: expected a number",
        ),
        (
            "datasets:\n  - {name: a, path: a.jsonl}\n  - {name: a, path: a.jsonl}",
            "each set needs its own name, got a, a",
        ),
        ("datasets:\n  a: {path: a.jsonl, rm_type: mth}", "evals.yaml line 2: --rm-type 'mth'.*did you mean 'math'"),
        ("datasets:\n  a: {path: a.jsonl, env: 'sized.py:Size'}", "evals.yaml line 2: --env.*did you mean 'Sized'"),
        ("datasets:\n  a: {path: b.jsonl}", "evals.yaml line 2: b.jsonl line 1: no field 'input'"),
    ],
)
def test_mistakes_name_the_line(text: str, said: str) -> None:
    with pytest.raises(AgentRLError, match=said):
        preflight(given(text).check_complete("eval"), "eval")


def test_a_file_and_sets_by_flag_are_not_both_asked_for() -> None:
    with pytest.raises(AgentRLError, match="--eval-config and --eval-prompt-data both"):
        given("datasets: {}", eval_prompt_data=("a", "a.jsonl"))


SETS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "env": {"env": "sized.py:Sized"},
    "args": {"env": "sized.py:Sized", "env_args": {"size": 5}, "n_samples_per_eval_prompt": 4},
    "named": {"env": "big"},
    "worded": {"apply_chat_template_kwargs": {"enable_thinking": False}},
    "generated": {"custom_generate_function_path": "sized.py:generate", "custom_rm_path": "sized.py:reward"},
    "graded": {"custom_generate_function_path": "sized.py:generate", "rm_type": "random"},
}


async def test_each_set_is_played_by_its_own_settings(kit: RunKit) -> None:
    text = json.dumps({"datasets": {name: {"path": "a.jsonl", **said} for name, said in SETS.items()}})
    several = {"env": {"big": "sized.py:Sized", "small": "sized.py:Sized"}, "env_args": {"big": {"size": 3}}}
    run = given(text).replace(rm_type="math")
    s = settings(kit, **{n: run.flat()[n] for n in run.given()}, **several, metadata_key="meta")
    Path("a.jsonl").write_text(json.dumps({"input": "1 + 1?", "label": "2", "env": "small"}))
    with open_folder(s) as folder:
        async with RolloutResources.open(s, folder, ["http://a"], Engines({"a": 2048})) as generation:
            found = await generation.evaluate(0)
            worker = generation.player
            assert isinstance(worker, RolloutWorker)
            players = {s.name: player for (s, _), player in zip(generation.sets, worker.sets, strict=True)}
            assert {player.limit for player in players.values()} == {worker.player.limit}
            other = [n for n, p in players.items() if p.context.chat is not worker.player.context.chat]
    assert other == ["worded"]
    rewards = {name: found[f"eval/{name}/reward"] for name in SETS}
    assert 0 <= rewards.pop("graded") <= 1
    assert rewards == {"plain": 1, "worded": 1, "env": 1, "args": 5, "named": 3, "generated": 10}
    assert found["eval/args/samples"] == 4
    assert found["eval/plain/env/small/reward"] == 1


async def test_what_the_page_on_environments_shows_is_played(
    kit: RunKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs/environments.md"
    write_files(page, tmp_path)
    (tmp_path / "tasks.jsonl").write_text(blocks(page, "jsonl")[1])
    monkeypatch.chdir(tmp_path)
    asked = {"hf_checkpoint": str(kit.folder / "model"), "eval_config": "evals.yaml", "rollout_batch_size": 3}
    s = RunSettings.from_file("several.yaml", **asked, n_samples_per_prompt=2, output_dir="run")
    await to_thread.run_sync(preflight, s.check_complete("train"), "train")
    with open_folder(s) as folder:
        async with LedgerRollouts.open(s, folder, ["http://a"], None, Engines({"a": 2048})) as rollouts:
            _, metrics, _ = await rollouts.play(0)
            found = await rollouts.evaluate(0)
    got = {name: metrics[f"env/{name}/reward"] for name in ("easy", "hard", "city")}
    assert got == {"easy": pytest.approx(-1.2), "hard": pytest.approx(-1.2), "city": 0}
    assert found["eval/large/samples"] == 8
    assert found["eval/cities/reward"] == 0
