"""A batch in which one environment misbehaves: innocents pass, the culprit is named."""

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from agentrl import Blame
from agentrl.chat import Chat
from agentrl.clock import Watchdog, _warn
from agentrl.config import RunSettings
from agentrl.envs import load_environment
from agentrl.errors import AgentRLError
from agentrl.rollout.settings import FailureAction
from agentrl.run.driver import open_folder
from agentrl.run.rollouts import LedgerRollouts
from tests.acceptance import environments
from tests.acceptance.environments import CHOICES, CULPRIT, DEADLINE, ENVIRONMENTS, Plain, Seen, released, reported
from tests.acceptance.servers import Engine, fleet
from tests.rollout.scripted import END, build
from tests.support.runs import RunKit
from tests.support.tiny_models import EOS_ID

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' + END


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    released.clear()
    reported.clear()
    yield
    released.set()


def _report(seconds: float, who: str, where: str) -> None:
    _warn(seconds, who, where)
    reported.set()


EVERYDAY = (
    "blocks in step",
    "hangs in step",
    "raises in reset",
    "raises in reward",
    "raises in close",
    "step returns nothing",
    "mutates the sample",
    "a sync tool that hangs",
)


def cases() -> Iterator[Any]:
    for name, seen in ENVIRONMENTS.items():
        yield pytest.param(seen, id=name, marks=[] if name in EVERYDAY else [pytest.mark.slow])


@pytest.mark.parametrize("seen", cases())
async def test_innocents_pass_and_the_culprit_is_named(
    chat: Chat, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    loop, _ = build(
        chat,
        [CALL, f"done{END}"] if seen.calls else [f"done{END}"],
        environment=seen.environment,
        env_timeout=DEADLINE,
        reward_timeout=DEADLINE,
        failure_policy=dict.fromkeys(Blame, FailureAction.KEEP_MASKED),
    )
    with Watchdog.watching(DEADLINE, _report):
        result = await loop.run(0)
    failed = {s.index: s.metadata["failure"] for group in result.groups for s in group if "failure" in s.metadata}
    guilty = failed.pop(CULPRIT, None)
    assert failed == {}, "innocents failed"
    assert [group[0].group_index for group in result.groups] == [0, 1, 2], result.stats.failures
    if not seen.either:
        assert (guilty["blame"] if guilty else None) == seen.blame
    if guilty is not None:
        missing = [part for part in seen.names if not re.search(part, guilty["message"])]
        assert missing == [], guilty["message"]
    if seen.reported:
        texts = [record.getMessage() for record in caplog.records]
        assert any(all(re.search(part, text) for part in seen.reported) for text in texts), texts


@pytest.mark.parametrize(("environment", "names"), CHOICES.values(), ids=CHOICES)
def test_an_environment_that_cannot_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, environment: type[Plain], names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(environments, "Chosen", environment, raising=False)
    with pytest.raises(AgentRLError) as caught:
        load_environment("tests.acceptance.environments:Chosen")
    assert [part for part in names if not re.search(part, str(caught.value))] == [], caught.value


class Held(Engine):
    """Ends every turn after two tokens, and never answers from its `last` request on."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.reached = last, asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.served > self.last:
            self.reached.set()
            await asyncio.sleep(30)
        prompt = orjson.loads(await request.read())["input_ids"]
        return web.json_response(self.answer([40, EOS_ID], "stop", prompt=len(prompt)))


async def test_of_a_play_that_differs_from_the_first_nothing_old_is_left(kit: RunKit) -> None:
    """The first life ends when trajectories are in their second turn. The next life plays them from the beginning."""
    s = RunSettings.from_flat(
        {
            "env": f"{environments.__file__}:ReplayDiffers",
            "hf_checkpoint": str(kit.folder / "model"),
            "prompt_data": str(kit.folder / "prompts.jsonl"),
            "label_key": "label",
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "output_dir": str(kit.folder / "replayed"),
        }
    )
    with open_folder(s) as folder:
        async with fleet(held := Held(last=6), members=1), LedgerRollouts.open(s, folder, [held.url], None) as life:
            playing = asyncio.ensure_future(life.play(0))
            reached = asyncio.ensure_future(held.reached.wait())
            await asyncio.wait([playing, reached], timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert reached.done()
            playing.cancel()
            await asyncio.wait([playing])
        async with fleet(free := Held(last=1000), members=1), LedgerRollouts.open(s, folder, [free.url], None) as life:
            groups, *_ = await life.play(0)
    said = sorted(int(n) for g in groups for sample in g for n in re.findall(r"play (\d+)", sample.response))
    assert len(said) == 6
    assert said == list(range(said[0], said[0] + 6))
    assert said[0] > 3, "seven requests are four trajectories at least, and none of them is seen again"
    assert free.served == 12
    assert [group[0].group_index for group in groups] == [0, 1, 2]
