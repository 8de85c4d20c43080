"""Training's rollouts with the real ledger and runner: the state from which a run resumes, and its limits."""

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Self

import orjson
import pytest

from agentrl.buffer.ledger import Ledger, State
from agentrl.buffer.queue import GroupQueue
from agentrl.buffer.reader import StoreReader
from agentrl.buffer.sqlite import read_meta
from agentrl.chat import Conversation
from agentrl.config import RunSettings
from agentrl.data.user_source import load_source
from agentrl.engine.embedded.request import output_limit
from agentrl.engine.transport import Headers, HttpTransport, Reply, Sink
from agentrl.errors import EnvFailure, SampleError
from agentrl.groups import group_id
from agentrl.observability.metrics import read_metrics
from agentrl.rollout.functions import GenerateFunction
from agentrl.rollout.worker import RolloutWorker
from agentrl.run.driver import open_folder
from agentrl.run.resuming import evaluations_in
from agentrl.run.rollouts import LedgerRollouts, RolloutResources, _check_of
from agentrl.runfolder import EVALUATIONS, STARTED_FROM, RunFolder
from agentrl.sample import Sample
from tests.buffer.make import finished
from tests.support.audit import audit_ledger
from tests.support.runs import RunKit
from tests.support.tiny_models import EOS_ID


class Engines(HttpTransport):
    """A transport to engines that answer at once with the token that ends a turn.

    Attributes:
        lengths: the context length that each engine reports, by host; None: the engine reports none.
        answers: number of answers.
    """

    def __init__(self, lengths: Mapping[str, int | None]) -> None:
        self.lengths, self.answers = lengths, 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        host, path = url.removeprefix("http://").split("/", 1)
        if path == "server_info":
            return Reply(200, orjson.dumps({"context_length": self.lengths[host]}))
        if path in ("model_info", "health", "health_generate"):
            return Reply(200, b"{}")
        assert path == "generate"
        self.answers += 1
        meta = {
            "finish_reason": {"type": "stop", "matched": EOS_ID},
            "output_token_logprobs": [[-0.5, 40, None], [-0.25, EOS_ID, None]],
            "weight_version": "0",
        }
        return Reply(200, orjson.dumps({"text": "x", "output_ids": [40, EOS_ID], "meta_info": meta}))


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=5)


def settings(kit: RunKit, **changes: object) -> RunSettings:
    """Return settings for three groups of two samples a batch, in a separate folder."""
    flat = {
        "env": f"{kit.folder}/env.py:AddEnv",
        "hf_checkpoint": str(kit.folder / "model"),
        "prompt_data": str(kit.folder / "prompts.jsonl"),
        "label_key": "label",
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "output_dir": str(kit.folder / uuid.uuid4().hex),
        **changes,
    }
    return RunSettings.from_flat(flat)


@asynccontextmanager
async def opened(s: RunSettings, folder: RunFolder, engines: Engines) -> AsyncIterator[LedgerRollouts]:
    urls = [f"http://{host}" for host in engines.lengths]
    async with LedgerRollouts.open(s, folder, urls, None, engines) as rollouts:
        yield rollouts


async def test_a_batch_that_an_earlier_life_began_is_only_filled_up(kit: RunKit) -> None:
    s, engines = settings(kit), Engines({"a": 2048})
    with open_folder(s) as folder:
        with Ledger(folder.ledger) as ledger:
            queue = GroupQueue(load_source(s.data, s.args), ledger)
            queue.lease(3, 0)
            queue.complete(1, finished(1))
        async with opened(s, folder, engines) as rollouts:
            batch = await rollouts.next_batch(0)
        assert batch is not None
        assert list(batch.group_ids) == [0, 1, 2]
        assert engines.answers == 4
        with Ledger(folder.ledger) as ledger:
            assert ledger.counts()[State.COMPLETED] == 3, "none is over for a later step, when it would be stale"


async def test_a_ledger_on_a_local_disk_is_copied_when_a_checkpoint_is_written(kit: RunKit, tmp_path: Path) -> None:
    s, engines = settings(kit, ledger_dir=str(tmp_path)), Engines({"a": 2048})
    with open_folder(s) as folder:
        async with opened(s, folder, engines) as rollouts:
            batch = await rollouts.next_batch(0)
            assert batch is not None
            await rollouts.trained(batch.group_ids, 0)
            assert read_meta(folder.ledger)["home"]
            assert not audit_ledger(folder.ledger).trained_by_step
            await rollouts.saving()
            assert audit_ledger(folder.ledger).trained_by_step == {0: 3}
            await rollouts.checkpointed(0)
        (local,) = tmp_path.glob("*/ledger.sqlite")
        assert int(read_meta(local)["checkpoint"]) == 0
        assert audit_ledger(local).ok


async def test_what_is_trained_and_what_was_dropped_can_be_looked_at(kit: RunKit) -> None:
    code = "def keep(args, samples, **_):\n    return samples[0].group_index % 2 == 0\n"
    (kit.folder / "keep.py").write_text(code)
    s, engines = settings(kit, dynamic_sampling_filter_path=f"{kit.folder}/keep.py:keep"), Engines({"a": 2048})
    with open_folder(s) as folder:
        async with opened(s, folder, engines) as rollouts:
            batch = await rollouts.next_batch(0)
            with StoreReader(folder.trajectories) as reader:
                rows = reader.query()
                shown = {row.group_index: reader.group(row.key) for row in rows}
        assert batch is not None
        assert {row.group_index for row in rows if not row.dropped} == set(batch.group_ids)
        assert {row.group_index for row in rows if row.dropped == "filtered"} >= {1, 3}
        with Ledger(folder.ledger) as ledger:
            assert shown[batch.group_ids[0]] == ledger.samples(batch.group_ids[0])


async def test_evaluations_are_kept_with_their_figures(kit: RunKit) -> None:
    s = settings(kit, eval_prompt_data=("dev", f"{kit.folder}/prompts.jsonl"), n_samples_per_eval_prompt=2)
    with open_folder(s, "eval") as folder:
        for number, model in enumerate(("first", "second")):
            async with RolloutResources.open(s, folder, ["http://a"], Engines({"a": 2048})) as generation:
                assert evaluations_in(folder.path) == number
                figures = await generation.evaluate(number, model)
        rows = list(read_metrics(folder.path / EVALUATIONS))
        assert [(row["step"], row["set"], row["checkpoint"]) for row in rows] == [
            (0, "dev", "first"),
            (1, "dev", "second"),
        ]
        assert {f"eval/dev/{name}": value for name, value in rows[1]["metrics"].items()} == figures
        with StoreReader(folder.trajectories) as reader:
            assert [(part.name, part.trajectories, part.last) for part in reader.kinds()] == [("dev", 20, 1)]
        assert (folder.path / STARTED_FROM).read_text() == f"{Path(str(s.train.hf_checkpoint)).resolve()}\n"


async def test_a_batch_that_an_earlier_life_filled_is_not_generated_again(kit: RunKit) -> None:
    s, engines = settings(kit), Engines({"a": 2048})
    with open_folder(s) as folder:
        async with opened(s, folder, engines) as rollouts:
            before = await rollouts.next_batch(0)
        assert engines.answers == 6
        async with opened(s, folder, engines) as rollouts:
            after = await rollouts.next_batch(0)
            await rollouts.trained((0, 1, 2), 0)
        assert before is not None
        assert after is not None
        assert after.group_ids == before.group_ids
        assert after.payload.tokens.tolist() == before.payload.tokens.tolist()
        assert engines.answers == 6


async def test_what_is_left_of_the_data_is_no_batch(kit: RunKit) -> None:
    s = settings(kit, num_epoch=1)
    with open_folder(s) as folder:
        async with opened(s, folder, Engines({"a": 2048})) as rollouts:
            batch = await rollouts.next_batch(0)
            assert batch is not None
            await rollouts.trained(batch.group_ids, 0)
            assert await rollouts.next_batch(1) is None
        with Ledger(folder.ledger) as ledger:
            ledger.recover(0)
            assert ledger.counts()[State.TRAINED] == 3


async def test_prompts_are_drawn_by_the_results_in_the_ledger_also_after_a_restart(kit: RunKit) -> None:
    """Groups of even numbers are kept; each group has a result."""
    code = "def keep(args, samples):\n    return samples[0].group_index % 2 == 0\n"
    (kit.folder / "keep_even.py").write_text(code)
    chosen = {"prompt_order": "difficulty", "dynamic_sampling_filter_path": f"{kit.folder}/keep_even.py:keep"}
    found = []
    for ends in ((4,), (2, 4)):
        s, first = settings(kit, **chosen), 0
        with open_folder(s) as folder:
            for end in ends:
                life = LedgerRollouts.open(s, folder, ["http://a"], first - 1 if first else None, Engines({"a": 2048}))
                async with life as rollouts:
                    for step in range(first, end):
                        groups, metrics, _ = await rollouts.play(step)
                        assert metrics["prompts/equal_rewards"] == 1
                        await rollouts.trained([group_id(group) for group in groups], step)
                        await rollouts.updated(step + 1)
                    await rollouts.checkpointed(end - 1)
                first = end
            with Ledger(folder.ledger) as ledger, ledger.transaction() as db:
                found.append(db.execute("SELECT group_id, prompt_index, state FROM groups").fetchall())
                results = db.execute("SELECT group_id FROM results ORDER BY group_id").fetchall()
        assert [number for (number,) in results] == list(range(len(found[-1])))
        assert metrics["prompts/seen"] == len({row for _, row, _ in found[-1]}) / 5
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("lengths", "changes", "want"),
    [
        ({"a": 512, "b": 256}, {}, 255),
        ({"a": 4096}, {}, 2047),  # the model's own
        ({"a": None}, {}, 2047),
        ({"a": 512}, {"engine_context_length": 128}, 127),
        ({"a": 512}, {"rollout_max_context_len": 300}, 300),
        ({"a": 512}, {"rollout_max_context_len": 512}, 511),
    ],
)
async def test_a_trajectory_is_as_long_as_every_engine_and_the_model_allow(
    kit: RunKit, lengths: dict[str, int | None], changes: dict[str, Any], want: int
) -> None:
    s = settings(kit, **changes)
    with open_folder(s) as folder:
        urls = [f"http://{host}" for host in lengths]
        async with RolloutResources.open(s, folder, urls, Engines(lengths)) as generation:
            assert isinstance(generation.player, RolloutWorker)
            assert generation.player.player.context.context_length == want


async def test_a_conversation_has_as_much_room_as_its_engine(kit: RunKit) -> None:
    held_out = {"eval_prompt_data": ("dev", f"{kit.folder}/prompts.jsonl"), "eval_max_context_len": 512}
    s = settings(kit, rollout_max_context_len=300, **held_out)
    with open_folder(s) as folder:
        async with RolloutResources.open(s, folder, ["http://a"], Engines({"a": 512})) as generation:
            assert isinstance(generation.player, RolloutWorker)
            (player,) = generation.player.sets
    context, messages = player.context, [{"role": "user", "content": "x"}]
    talk = Conversation(context.chat, Sample(index=0), messages, context_length=context.context_length)
    assert talk.room == output_limit(talk.length, None, 512)


ENVIRONMENTS = """
from agentrl import Environment


class Sized(Environment):
    opened: list[dict] = []

    def __init__(self, size: int = 1) -> None:
        self.size = size

    @classmethod
    async def setup(cls, args):
        cls.opened.append((args.env_args, args.rollout_batch_size))

    async def reward(self, sample):
        return self.size + (0.5 if self.evaluating else 0.0)
"""


async def test_several_environments_share_a_batch_each_with_its_arguments_and_metrics(kit: RunKit) -> None:
    (kit.folder / "sized.py").write_text(ENVIRONMENTS)
    rows = [json.dumps({"input": "a", "task": ("small", "big", "big")[i % 3]}) for i in range(6)]
    (kit.folder / "tasks.jsonl").write_text("\n".join(rows))
    path, data = f"{kit.folder}/sized.py:Sized", f"{kit.folder}/tasks.jsonl"
    several = {"env": {"small": path, "big": path}, "env_args": {"big": {"size": "3"}}, "env_key": "task"}
    s = settings(kit, **several, prompt_data=data, label_key=None, eval_prompt_data=("held_out", data))
    with open_folder(s) as folder:
        async with opened(s, folder, Engines({"a": 2048})) as rollouts:
            groups, metrics, _ = await rollouts.play(0)
            evaluated = await rollouts.evaluate(0)
            kinds = [entry.kind for entry in (rollouts.generation.plugins.environments or {}).values()]
    assert [(group[0].metadata["env"], group[0].reward) for group in groups] == [("small", 1), ("big", 3), ("big", 3)]
    assert {name: metrics[f"env/{name}"] for name in ("small/reward", "big/reward", "small/groups", "big/groups")} == {
        "small/reward": 1,
        "big/reward": 3,
        "small/groups": 1,
        "big/groups": 2,
    }
    assert (evaluated["eval/held_out/env/small/reward"], evaluated["eval/held_out/env/big/reward"]) == (1.5, 3.5)
    assert kinds[0].opened == [({}, 3), ({"size": 3}, 3)]  # type: ignore[attr-defined]


AGENT = """
class Agent:
    log = []

    async def setup(self, args):
        if args.{broken}:
            raise SystemExit("no server")
        self.log.append(f"setup {{args.n_samples_per_prompt}}")

    async def generate(self, args, sample, sampling_params):
        self.log.append("generate")
        sample.set_prompt_tokens([1])
        sample.append_model([2], [-1.0], "0")
        sample.reward = 0.0
        return sample

    async def teardown(self):
        self.log.append("teardown")
"""


@pytest.mark.parametrize("broken", ["apply_chat_template", "rollout_shuffle"])
async def test_a_generate_functions_class_is_set_up_once_and_torn_down(kit: RunKit, broken: str) -> None:
    """An evaluation set uses the same object."""
    file = kit.folder / f"agent_{broken}.py"
    file.write_text(AGENT.format(broken=broken))
    path = f"{file}:Agent"
    sets = {"eval_prompt_data": ("dev", f"{kit.folder}/prompts.jsonl"), "apply_chat_template": True}
    s = settings(kit, env=None, custom_generate_function_path=path, **sets)
    fails = broken == "apply_chat_template"
    with open_folder(s) as folder:
        refused = (
            pytest.raises(EnvFailure, match=r"Agent\.setup raised SystemExit: no server") if fails else nullcontext()
        )
        with refused:
            async with opened(s, folder, Engines({"a": 2048})) as rollouts:
                await rollouts.next_batch(0)
                await rollouts.evaluate(0)
    log = GenerateFunction.load(path).owner.log
    assert log[:1] + log[-1:] == ([] if fails else ["setup 2", "teardown"])
    assert set(log[1:-1]) == (set() if fails else {"generate"})


def test_groups_are_checked_where_they_are_trained_as_they_are(kit: RunKit) -> None:
    other = {
        "debug_rollout_only": settings(kit, debug_rollout_only=True),
        "hosted": RunSettings.from_flat({"engine": "openai", "base_url": "http://h/v1", "hosted_model": "big"}),
    }
    assert {why: _check_of(s) for why, s in other.items()} == dict.fromkeys(other)
    check, (first, second) = _check_of(settings(kit)), finished(0)
    assert check is not None
    check([first, second])
    second.rollout_log_probs = None
    with pytest.raises(SampleError, match="sample index=1 group_index=0: rollout_log_probs is missing"):
        check([first, second])
    gdpo = {"advantage_estimator": "gdpo", "gdpo_weights": {"a": 1.0}, "reward_key": "a"}
    parts = _check_of(settings(kit, **gdpo))
    assert parts is not None
    with pytest.raises(SampleError, match="is no dict with the entries a"):
        parts([first])
