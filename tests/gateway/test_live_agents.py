"""Unmodified agent programs in the sandbox: each trained id was sampled at that place.

They play four turns, sub-agents, one engine failure, a cut connection, and a full context.
`scripts/live_agents.sh` installs them; a test without its program is skipped.
"""

import json
import re
import shutil
from collections import Counter
from typing import Any, NamedTuple

import pytest

from agentrl.envs import CommandEnvironment
from agentrl.errors import EngineUnreachable
from agentrl.sample import Sample
from tests.gateway.acceptance_engine import hermes
from tests.gateway.live import Cut, Played, Script, live

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed"),
]
PROMPT = "Run echo three times, then say done."


class ClaudeCode(CommandEnvironment):
    command = "claude -p {prompt} --model m --dangerously-skip-permissions"
    variables = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


class Codex(CommandEnvironment):
    command = (
        "codex exec {prompt} --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m m "
        "-c model_provider=gateway -c model_providers.gateway.name=gateway "
        "-c model_providers.gateway.base_url={base_url}/v1 -c model_providers.gateway.wire_api=responses"
    )


class OpenCode(CommandEnvironment):
    command = "opencode run {prompt} -m gateway/m"
    variables = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    async def prepare(self, sample: Sample) -> None:
        reached = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "any"}
        models = {"m": {"name": "m", "tool_call": True, "limit": {"context": 100_000, "output": 4096}}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "gateway", "options": reached, "models": models}
        config = {"provider": {"gateway": provider}, "permission": {"bash": "allow"}, "small_model": "gateway/m"}
        (self.folder / "opencode.json").write_text(json.dumps(config))


class Agent(NamedTuple):
    """An agent program.

    Attributes:
        shell: the tool that runs a command, with the tool's field of the command and its other fields.
        titles: number of requests for a title, which come before the first turn.
    """

    kind: type[CommandEnvironment]
    shell: tuple[str, str, dict[str, str]]
    titles: int = 0

    def runs(self, said: str, command: str) -> str:
        """Return the model's turn that runs a command."""
        tool, field, more = self.shell
        return hermes(said, "", [(tool, {field: command, **more})])

    def echoes(self, turn: int, prompt: str) -> str:
        """Return three turns that run `echo`, and the last word."""
        if self.titles and "<tools>" not in prompt:
            return "A title"
        return "done" if turn >= 3 else self.runs(f"I look, {turn}.", f"echo {turn}")


AGENTS = {
    "claude": Agent(ClaudeCode, ("Bash", "command", {"description": "Echo."})),
    "codex": Agent(Codex, ("exec_command", "cmd", {})),
    "opencode": Agent(OpenCode, ("bash", "command", {"description": "Echo."}), titles=1),
}
each_agent = pytest.mark.parametrize("name", AGENTS)


async def played(
    kind: type[CommandEnvironment], script: Script, *, exit_code: int = 0, says: str = "done", **faults: Any
) -> Played:
    """Play an agent in the sandbox."""
    program = kind.command.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    agent, sample = kind(), Sample(prompt=PROMPT)
    try:
        async with live(script, **faults) as served:
            agent.socket = served.gateway.socket
            session = served.open()
            await agent.act(served.gateway.url(session), sample)
            assert agent.result is not None
            assert agent.result.exit_code == exit_code, agent.result
            assert says in agent.result.stdout + agent.result.stderr
            return served.close(session)
    finally:
        await agent.close()


def roles(found: Played) -> list[str]:
    return [sample.metadata["gateway"]["role"] for sample in found.samples]


def reasons(name: str, **more: int) -> Counter[str]:
    """Return the reasons of four consecutive turns, and those of the titles."""
    titles = AGENTS[name].titles
    return Counter({"first": 1, "extend": 3, "new_agent": titles}) + Counter(more)


# ---- four turns -----------------------------------------------------------------------------------------------


@each_agent
async def test_four_turns_are_one_conversation(name: str) -> None:
    agent = AGENTS[name]
    found = await played(agent.kind, agent.echoes)
    assert found.reasons == reasons(name)
    assert (found.turns, found.roots, roles(found)) == (4 + agent.titles, 1 + agent.titles, ["main"])


async def test_the_title_of_claude_code_is_a_side_task() -> None:
    class Titled(ClaudeCode):
        variables = {}

    def script(turn: int, prompt: str) -> str:
        asked = "Answer with JSON of this schema" in prompt
        return '{"title": "Echoes"}' if asked else AGENTS["claude"].echoes(turn, prompt)

    found = await played(Titled, script)
    assert found.reasons == {"first": 1, "new_agent": 1, "extend": 3}
    assert roles(found) == ["main"]
    assert found.counts["dropped/side"] > 0
    assert not [name for name in found.counts if name.startswith("refused/")]


# ---- sub-agents -----------------------------------------------------------------------------------------------


def delegates(name: str, turn: int, prompt: str) -> str:
    """Return two sub-agents, which run a command each, and the last word."""
    agent = AGENTS[name]
    if agent.titles and "<tools>" not in prompt:
        return "A title"
    if PROMPT not in prompt:
        return "helped" if turn >= 1 else agent.runs("I help.", "echo helped")
    tasks = [f"Echo number {number}." for number in (7, 8)]
    if name == "codex":
        spawned = re.findall(r'"agent_id":"([0-9a-f-]+)"', prompt)
        if turn == 0:
            calls = [("multi_agent_v1__spawn_agent", {"message": task}) for task in tasks]
            return hermes("I delegate.", "", calls)
        if turn == 1:
            return hermes("I wait.", "", [("multi_agent_v1__wait_agent", {"targets": spawned, "timeout_ms": 60_000})])
    elif turn == 0:
        tool, kind = ("Agent", "general-purpose") if name == "claude" else ("task", "general")
        calls = [(tool, {"description": "Echo", "prompt": task, "subagent_type": kind}) for task in tasks]
        return hermes("I delegate.", "", calls)
    return "done"


@each_agent
async def test_sub_agents_are_roots_of_their_own(name: str) -> None:
    found = await played(AGENTS[name].kind, lambda turn, prompt: delegates(name, turn, prompt))
    assert sorted(roles(found)) == ["main", "subagent", "subagent"]
    assert found.roots == 3 + AGENTS[name].titles
    assert found.reasons.keys() == {"first", "extend", "new_agent"}
    assert found.reasons["new_agent"] == 2 + AGENTS[name].titles
    for sample in found.samples:
        helped = "helped" in sample.response and PROMPT not in str(sample.metadata["messages"])
        assert helped is (sample.metadata["gateway"]["role"] == "subagent")


# ---- faults ---------------------------------------------------------------------------------------------------


@each_agent
async def test_a_request_is_retried_after_one_engine_failure(name: str) -> None:
    failed = list[int]()

    def script(turn: int, prompt: str) -> str | Exception:
        if turn == 1 and not failed:
            failed.append(turn)
            return EngineUnreachable("no engine answers")
        return AGENTS[name].echoes(turn, prompt)

    found = await played(AGENTS[name].kind, script)
    assert found.reasons == reasons(name)
    assert roles(found) == ["main"]
    assert found.counts["refused/overloaded"] == 1
    assert found.counts["trained"] == found.counts["sampled"] - found.counts.get("dropped/side", 0)


@each_agent
@pytest.mark.parametrize("seen", [True, False], ids=["seen by the gateway", "lost on the way"])
async def test_an_answer_that_is_cut_is_asked_for_again(name: str, seen: bool) -> None:
    agent, cut = AGENTS[name], Cut(AGENTS[name].titles + 1, seen)
    found = await played(agent.kind, agent.echoes, cut=cut)
    assert found.reasons == reasons(name, **{"undelivered" if seen else "retry": 1})
    assert roles(found) == ["main"] * (1 if seen else 2)
    assert (found.counts.get("dropped/undelivered", 0) > 0) is seen
    again = next(node for node in found.nodes if node["reason"] in ("undelivered", "retry"))
    (first,) = (n for n in found.nodes if n["parent"] == again["parent"] and n["number"] < again["number"])
    assert first["prompt_tokens"] == again["prompt_tokens"]
    assert found.counts.get("dropped/undelivered", 0) == (first["sampled_tokens"] if seen else 0)


SUMMARY = "The echoes were run."


def fills(name: str, turn: int, prompt: str) -> str:
    """Return a long command from the second turn on, a summary on request, or the last word after a summary."""
    asked = prompt.rsplit("<|im_start|>user", 1)[-1]
    if "<tools>" not in prompt and "title" in prompt[:3000]:
        return "A title"
    if SUMMARY in prompt:
        return "done"
    if re.search("detailed summary|handoff summary|Do not mention the summary process", asked):
        return f"<summary>{SUMMARY}</summary>"
    return AGENTS[name].runs(f"I look, {turn}.", "seq 1 700" if turn else "echo 0")


async def test_claude_code_compacts_at_a_full_context() -> None:
    found = await played(ClaudeCode, lambda turn, prompt: fills("claude", turn, prompt), context_length=21_200)
    assert found.counts["refused/context"] == 1
    assert found.reasons == {"first": 1, "extend": 1, "fork": 1, "edited": 1}
    assert (set(roles(found)), found.roots) == ({"main"}, 2)
    assert [sample.stop_reason for sample in found.samples] == ["done"] * 3


async def test_opencode_compacts_at_a_full_context() -> None:
    script, said = (lambda turn, prompt: fills("opencode", turn, prompt)), "prompt is too long"
    found = await played(OpenCode, script, context_length=9500, exit_code=1, says=said)
    assert found.counts["refused/context"] == 1
    assert found.reasons == {"first": 1, "new_agent": 2, "extend": 1, "edited": 1}
    assert roles(found) == ["main", "main"]
    assert [sample.stop_reason for sample in found.samples] == ["done"] * 2


async def test_codex_stops_at_a_full_context() -> None:
    script, said = (lambda turn, prompt: fills("codex", turn, prompt)), "ran out of room in the model's context window"
    found = await played(Codex, script, context_length=10_500, exit_code=1, says=said)
    assert found.counts["refused/context"] == 1
    assert found.reasons == {"first": 1, "extend": 1}
    assert [sample.stop_reason for sample in found.samples] == ["context"]


async def test_codex_compacts_at_its_own_limit() -> None:
    class Compacts(Codex):
        command = f"{Codex.command} -c model_auto_compact_token_limit=10000"

    found = await played(Compacts, lambda turn, prompt: fills("codex", turn, prompt))
    assert found.reasons.keys() == {"first", "extend", "tools_changed", "compacted"}
    assert (set(roles(found)), found.roots) == ({"main"}, 3)
    assert [sample.stop_reason for sample in found.samples] == ["done"] * 3
