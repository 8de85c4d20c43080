"""A batch in which one environment misbehaves: innocents pass, the culprit is named."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl import Blame
from agentrl.chat import Chat
from agentrl.errors import AgentRLError
from agentrl.rollout.settings import FailureAction
from tests.acceptance.environments import CHOICES, CULPRIT, DEADLINE, ENVIRONMENTS, Plain, Seen, released
from tests.rollout.scripted import END, build

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' + END


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    released.clear()
    yield
    released.set()


def cases() -> Iterator[Any]:
    for name, seen in ENVIRONMENTS.items():
        marks = [pytest.mark.xfail(reason=seen.lacking, strict=True)] if seen.lacking else []
        slow = [pytest.mark.slow] if name == "hangs in close" else []
        yield pytest.param(seen, id=name, marks=[*marks, *slow])


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


@pytest.mark.xfail(reason="no --partial-rollout, no declared choice", strict=True)
@pytest.mark.parametrize(("environment", "names"), CHOICES.values(), ids=CHOICES)
async def test_an_environment_that_cannot_be_interrupted(
    chat: Chat, environment: type[Plain], names: tuple[str, ...]
) -> None:
    with pytest.raises(AgentRLError) as caught:
        loop, _ = build(chat, [f"done{END}"], environment=environment, partial_rollout=True, max_staleness=1)
        await loop.run(0)
    assert [part for part in names if not re.search(part, str(caught.value))] == [], caught.value
