"""Engine groups that user code chooses by name."""

from dataclasses import replace

import pytest

from agentrl import Environment, Sample
from agentrl.chat import Chat
from agentrl.errors import EnvFailure, SettingsError
from agentrl.rollout.context import EngineGroup
from agentrl.rollout.helpers import Recorder, current, recording
from tests.rollout.scripted import END, ScriptedEngine, make_context


async def test_a_generate_function_asks_another_engine_by_its_name(chat: Chat) -> None:
    own, other = ScriptedEngine(chat, [f"mine{END}"]), ScriptedEngine(chat, [f"theirs{END}"])
    context = make_context(chat, own)
    context = replace(context, engine_groups={"opponent": EngineGroup(chat, other, context.params())})
    async with recording(Recorder(context, context.params(), Sample(group_index=0, index=0))):
        asked = [{"role": "user", "content": "Go."}]
        assert await current().engine_group("opponent").reply(asked, max_tokens=5, temperature=0.0) == "theirs"
        with pytest.raises(SettingsError, match="no engine group 'oponent'; --engine-groups names opponent"):
            current().engine_group("oponent")
    assert [ids for _, ids in other.calls] == [chat.render_ids(asked)]
    assert own.calls == []


def test_an_environment_outside_a_run_has_no_engines() -> None:
    with pytest.raises(EnvFailure, match=r"engine_group\('opponent'\): no run with --engine-groups plays this"):
        Environment.create().engine_group("opponent")
