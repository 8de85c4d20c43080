"""slime's rollout functions in the rollouts of a real run: the built-in engine, the router, the ledger."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.ledger import Ledger, State
from agentrl.compat.calls import namespace
from agentrl.config import RunSettings
from agentrl.data.user_source import load_source
from agentrl.engine.local import in_process
from agentrl.errors import AgentRLError, PluginError, SettingsError
from agentrl.run import driver, offline
from agentrl.run.driver import open_folder
from agentrl.run.preflight import Plugins
from agentrl.run.rollouts import LedgerRollouts
from agentrl.runfolder import BELOW, RunFolder
from tests.support.runs import RunKit

FUNCTIONS = Path(__file__).with_name("functions.py")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=8)


def settings(kit: RunKit, hooks: dict[str, Any], **changes: object) -> RunSettings:
    """Return settings for batches of two groups of two samples; `hooks` are names of FUNCTIONS by setting."""
    paths = {k: [f"{FUNCTIONS}:{v[0]}"] if isinstance(v, list) else f"{FUNCTIONS}:{v}" for k, v in hooks.items()}
    flat: dict[str, object] = {
        "hf_checkpoint": str(kit.folder / "model"),
        "prompt_data": str(kit.folder / "prompts.jsonl"),
        "label_key": "label",
        "apply_chat_template": True,
        "custom_generate_function_path": f"{FUNCTIONS}:generate",
        "custom_rm_path": f"{FUNCTIONS}:reward",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 4,
        "output_dir": str(kit.folder / uuid.uuid4().hex),
        "compat_options": {"answer_key": "the user's", **paths},
        **changes,
    }
    return RunSettings.from_flat(flat)


@asynccontextmanager
async def opened(s: RunSettings, folder: RunFolder) -> AsyncIterator[LedgerRollouts]:
    async with (
        in_process(s.engine, str(s.train.hf_checkpoint)) as url,
        LedgerRollouts.open(s, folder, [url], None) as rollouts,
    ):
        yield rollouts


async def test_generate_and_reward_speak_to_the_engines_through_the_address_in_args(kit: RunKit) -> None:
    s = settings(kit, {})
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            groups, metrics, _ = await rollouts.play(0)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        assert isinstance(sample.prompt, list), "what the data says, not what was rendered of it"
        assert sample.metadata["slime_attributes"]["turns"] == 2
        assert [segment.origin.value for segment in sample.segments] == ["model", "env", "model"]
        assert {segment.version for segment in sample.segments} == {"default", None}
        assert sample.trained_tokens < sample.response_length
    assert metrics["rollout/reward"] == 2


async def test_a_sample_names_its_own_functions(kit: RunKit) -> None:
    s = settings(
        kit, {}, data_source_path=f"{FUNCTIONS}:Source", custom_generate_function_path=None, custom_rm_path=None
    )
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            groups, *_ = await rollouts.play(0)
        async with opened(s, folder) as rollouts:
            again, *_ = await rollouts.play(0)
    assert [sample.reward for group in groups for sample in group] == [2, 7, 2, 7]
    assert [[s.to_dict() for s in group] for group in again] == [[s.to_dict() for s in group] for group in groups]
    assert json.loads(folder.ledger.with_name(folder.ledger.name + ".source").read_text()) == 0


def test_a_source_of_slimes_kind_gives_messages_unless_it_changed_their_text(kit: RunKit) -> None:
    s = settings(kit, {})
    own = s.replace(data_source_path=f"{FUNCTIONS}:Inheriting")
    expected = load_source(s.data, s.args).get_samples(2)
    (changed, same), copied = load_source(own.data, own.args).get_samples(2)
    assert str(changed.prompt).endswith("changed")
    assert isinstance(same.prompt, list)
    assert same.prompt == expected[0][1].prompt
    assert [sample.prompt for sample in copied] == [sample.prompt for sample in expected[1]]


@pytest.mark.parametrize(("source", "load"), [("Inheriting", False), ("Inheriting", True), ("Saving", False)])
def test_a_source_continues_from_the_folder_of_checkpoints(
    kit: RunKit, source: str, load: bool, tmp_path: Path
) -> None:
    folders = {"save": str(tmp_path / "own"), **({"load": str(tmp_path / "other")} if load else {})}
    s = settings(kit, {}, data_source_path=f"{FUNCTIONS}:{source}", **folders)
    first, again, numbers = load_source(s.data, s.args), load_source(s.data, s.args), []
    first.get_samples(2)
    first.save(tmp_path / "state")
    again.load(tmp_path / "state")
    for one in (first, again):
        numbers.append(one.get_samples(1)[0][0].group_index)
    assert numbers == [2, 2]


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_args_have_the_folder_of_checkpoints(kit: RunKit, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    @asynccontextmanager
    async def start(s: RunSettings, *_: object, **__: object) -> AsyncIterator[Any]:
        seen.append(namespace(s.args).save)
        raise AgentRLError("enough")
        yield

    monkeypatch.setattr(offline, "launched", start)
    s = settings(kit, {}, num_rollout=1)
    with pytest.raises(AgentRLError, match="enough"):
        driver.train(s, start) if command == "train" else offline.rollout(s)
    below = Path(s.observability.output_dir).resolve() / BELOW[command]
    assert seen == [str(below / "checkpoints")]


async def test_hooks_are_called_at_their_moments_and_the_ledger_stays_exact(kit: RunKit, tmp_path: Path) -> None:
    hooks = {
        "rollout_sample_hook_path": ["each"],
        "rollout_sample_filter_path": "sample_filter",
        "rollout_all_samples_process_path": "all_samples",
        "custom_rollout_log_function_path": "log",
        "custom_eval_rollout_log_function_path": "eval_log",
    }
    # An evaluation set with a setting of its own has args of its own.
    own = {"name": "dev", "path": str(kit.folder / "prompts.jsonl"), "top_k": 5}
    (tmp_path / "evals.yaml").write_text(json.dumps({"datasets": [own]}))
    evals = {"eval_config": str(tmp_path / "evals.yaml")}
    s = settings(kit, hooks, dynamic_sampling_filter_path=f"{FUNCTIONS}:dynamic_filter", **evals)
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            groups, metrics, _ = await rollouts.play(0)
            evaluated = await rollouts.evaluate(0)
        with Ledger(folder.ledger) as ledger:
            counts = ledger.counts()
    assert [[sample.remove_sample for sample in group] for group in groups] == [[False, True]] * 2
    assert all(sample.metadata["hooked"] == [0, False] for group in groups for sample in group)
    assert metrics["seen"] == 3 * 2
    assert metrics["logged"] == 2 * 2
    assert (evaluated["mine"], evaluated["eval/dev/reward"]) == (2.0, 2.0)
    assert (counts[State.COMPLETED], counts[State.DROPPED]) == (2, 1)


async def test_a_rollout_function_plays_on_groups_of_the_ledger(kit: RunKit) -> None:
    s = settings(kit, {"rollout_function_path": "rollout"})
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            batch = await rollouts.next_batch(0)
            evaluated = await rollouts.evaluate(0)
        with Ledger(folder.ledger) as ledger:
            counts = ledger.counts()
        async with opened(s, folder) as rollouts:
            again = await rollouts.next_batch(0)
    assert batch is not None
    assert again is not None
    assert again.group_ids == batch.group_ids
    assert (batch.metrics["rollout/own"], evaluated["eval/own"], "table" in batch.metrics) == (3, 4, False)
    # Four are leased. One is returned with a new group, and one is released; the others are dropped.
    assert (counts[State.COMPLETED], counts[State.DROPPED], counts[State.WAITING]) == (2, 2, 1)
    assert evaluated["eval/mine/reward"] == 0.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "returned 0 groups, rollout_batch_size is 2"),
        ("fails", "ZeroDivisionError: .* at .*functions.py"),
        ("unrewarded", "must be a finite number"),
        ("twice", "rollout_function_path returned a sample twice"),
    ],
)
async def test_a_rollout_function_that_fails_loses_nothing(kit: RunKit, function: str, message: str) -> None:
    s = settings(kit, {"rollout_function_path": function})
    with open_folder(s) as folder:
        with pytest.raises(AgentRLError, match=message):
            async with opened(s, folder) as rollouts:
                await rollouts.next_batch(0)
        with Ledger(folder.ledger) as ledger:
            assert not ledger.counts().get(State.LEASED)


@pytest.mark.parametrize(
    ("setting", "function", "message"),
    [
        ("rollout_sample_filter_path", "breaks", "raised ZeroDivisionError: .* at .*functions.py"),
        ("rollout_all_samples_process_path", "breaks", "raised ZeroDivisionError"),
        ("custom_rollout_log_function_path", "breaks", "raised ZeroDivisionError"),
        ("custom_eval_rollout_log_function_path", "breaks", "raised ZeroDivisionError"),
        ("eval_function_path", "fails", "raised "),
        ("eval_function_path", "without_samples", ": no 'samples' of mine"),
    ],
)
async def test_an_error_names_the_setting_of_its_function(
    kit: RunKit, setting: str, function: str, message: str
) -> None:
    hooks = {"rollout_function_path": "rollout", setting: function}
    s = settings(kit, hooks)
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            call = rollouts.evaluate if "eval" in setting else rollouts.play
            with pytest.raises(PluginError, match=f"^{setting} ?{message}"):
                await call(0)


async def test_groups_beyond_a_batch_are_never_trained(kit: RunKit) -> None:
    s = settings(kit, {"rollout_function_path": "too_many"})
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            batches = [await rollouts.next_batch(step) for step in range(2)]
        with Ledger(folder.ledger) as ledger, ledger.transaction() as db:
            dropped = db.execute("SELECT group_id, reason FROM events WHERE to_state='dropped'").fetchall()
    assert [batch and batch.group_ids for batch in batches] == [(0, 1), (3, 4)]
    assert dropped == [(2, "more than rollout_batch_size"), (5, "more than rollout_batch_size")]


@pytest.mark.parametrize(("function", "left"), [("until_enough", 1), ("too_many", 0)])
async def test_a_rollout_function_ends_with_the_data(kit: RunKit, function: str, left: int) -> None:
    s = settings(kit, {"rollout_function_path": function}, num_epoch=1, rollout_batch_size=7)
    if not left:
        s = s.replace(rollout_batch_size=2)
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            batches = [await rollouts.next_batch(step) for step in range(4)]
        with Ledger(folder.ledger) as ledger:
            assert ledger.counts().get(State.WAITING, 0) == left
    expected = [False, True, True, True] if left else [False, False, False, True]
    assert [batch is None for batch in batches] == expected


def test_what_cannot_be_is_refused_before_the_run(kit: RunKit) -> None:
    with pytest.raises(SettingsError, match="--max-staleness 0"):
        Plugins.load(settings(kit, {"rollout_function_path": "rollout"}, max_staleness=1))
    with pytest.raises(PluginError, match="rollout_sample_filter_path .*has no 'nothing'"):
        Plugins.load(settings(kit, {"rollout_sample_filter_path": "nothing"}))
    ahead = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    with pytest.raises(SettingsError, match="--max-staleness 1"):
        Plugins.load(settings(kit, {}, compat_options={"rollout_function_path": ahead}))


async def test_slimes_generate_keeps_what_top_p_left_to_sample_from(kit: RunKit) -> None:
    path = "slime.rollout.sglang_rollout.generate"
    own = {"custom_generate_function_path": path, "custom_rm_path": f"{FUNCTIONS}:other_reward", "rollout_top_k": 3}
    s = settings(kit, {}, **own, eval_prompt_data=("dev", str(kit.folder / "prompts.jsonl")), eval_top_k=-1)
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            groups, *_ = await rollouts.play(0)
            assert (await rollouts.evaluate(0))["eval/dev/reward"] == 7
    for sample in (sample for group in groups for sample in group):
        assert len(sample.rollout_top_p_token_offsets or ()) == sample.response_length + 1
        assert len(sample.rollout_top_p_token_ids or ()) == 3 * sample.response_length


async def test_the_rest_of_an_interrupted_answer_has_the_room_that_is_left(kit: RunKit) -> None:
    s = settings(
        kit, {}, custom_generate_function_path=f"{FUNCTIONS}:interrupted", custom_rm_path=f"{FUNCTIONS}:other_reward"
    )
    with open_folder(s) as folder:
        async with opened(s, folder) as rollouts:
            groups, *_ = await rollouts.play(0)
    assert {sample.response_length for group in groups for sample in group} == {s.rollout.rollout_max_response_len}
