"""Agent programs in a rollout: their requests go to a real gateway over HTTP, with a scripted engine behind it."""

import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from agentrl.chat import Chat
from agentrl.envs import AgentEnvironment, CommandEnvironment, command_environment
from agentrl.errors import AgentFailure, EnvFailure, PluginError, SettingsError
from agentrl.gateway.record import SessionRecord
from agentrl.gateway.server import Gateway
from agentrl.rollout.functions import GenerateFunction
from agentrl.run.metrics import rollout_metrics
from agentrl.sample import Sample, Status
from agentrl.sandbox.command import split_command
from tests.rollout.scripted import END, OneBatch, ScriptedEngine, Store, build
from tests.sandbox.watch import named, processes_called, until
from tests.support.evaluating import evaluate

REPLIES = [f"first{END}", f"second{END}"]
SETTINGS: dict[str, Any] = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
PROGRAM = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
history = [{"role": "user", "content": sys.argv[1]}]
history += [ask(history), {"role": "user", "content": "go on"}]
open("answer.txt", "w").write(ask(history)["content"])
print("finished", sys.argv[1])
"""


async def ask(base_url: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{base_url}/v1/chat/completions", json={"model": "m", "messages": messages, **more})
        message: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
        return message


async def two_turns(base_url: str, sample: Sample) -> None:
    history = [{"role": "user", "content": str(sample.prompt)}]
    history += [await ask(base_url, history), {"role": "user", "content": "go on"}]
    await ask(base_url, history)


@asynccontextmanager
async def with_gateway(batch: OneBatch) -> AsyncIterator[OneBatch]:
    context = batch.player.context
    gateway = Gateway(context.chat, context.client, context_length=context.context_length)
    async with gateway.serving():
        batch.player.context = replace(context, gateway=gateway)
        yield batch


async def played(batch: OneBatch) -> list[Sample]:
    async with with_gateway(batch):
        return [sample for group in (await batch.run(0)).groups for sample in group]


async def test_an_agent_function_plays_and_returns_the_reward(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> float:
        await two_turns(base_url, sample)
        return 0.75

    batch, engine = build(chat, REPLIES, environment=None, generate=agent, **SETTINGS)
    samples = await played(batch)
    assert [sample.reward for sample in samples] == [0.75, 0.75]
    assert len(engine.calls) == 4
    for sample in samples:
        turns = [segment for segment in sample.segments if segment.origin == "model"]
        assert [chat.decode(sample.tokens[sample.prompt_length :][s.start : s.end]) for s in turns] == REPLIES
        assert (sample.rollout_id, sample.stop_reason, sample.status) == (sample.index, "done", Status.COMPLETED)
        assert sample.metadata["gateway"]["reasons"] == ["first", "extend"]
        assert sample.metadata["messages"][-1]["content"] == "second"


async def test_a_dict_is_a_reward_and_what_the_agent_writes_into_metadata_stays(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> dict[str, float]:
        await two_turns(base_url, sample)
        sample.metadata |= {"state": "solved", "new": 1}
        return {"acc": 1.0, "form": 0.5}

    class Rows(Store):
        def lease(self, n: int, version: int) -> list[list[Sample]]:
            groups = super().lease(n, version)
            for sample in (sample for group in groups for sample in group):
                sample.metadata["state"] = "open"
            return groups

    batch, _ = build(chat, REPLIES, environment=None, generate=agent, store=Rows(), **SETTINGS, reward_key="acc")
    for sample in await played(batch):
        assert sample.reward == {"acc": 1.0, "form": 0.5}
        assert (sample.metadata["state"], sample.metadata["new"]) == ("solved", 1)


async def test_side_tasks_are_dropped_and_sub_agents_share_the_graded_reward(chat: Chat) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def agent(base_url: str, sample: Sample) -> None:
        await ask(base_url, [{"role": "user", "content": "a title, please"}])
        await ask(base_url, [{"role": "user", "content": "the task"}], tools=[tool])
        await ask(
            base_url, [{"role": "system", "content": "help"}, {"role": "user", "content": "a part"}], tools=[tool]
        )

    graded: list[str] = []

    async def reward(args: Any, sample: Sample) -> float:
        graded.append(sample.metadata["gateway"]["role"])
        return 0.5

    batch, _ = build(chat, [f"said{END}"], environment=None, generate=agent, reward=reward, **SETTINGS)
    samples = await played(batch)
    assert [sample.metadata["gateway"]["role"] for sample in samples] == ["main", "subagent"] * 2
    assert {sample.reward for sample in samples} == {0.5}
    assert graded == ["main"] * 2
    assert samples[0].metadata["counters"]["agent/dropped/side"] == len(chat.encode(f"said{END}"))


async def test_calls_are_counted_and_those_that_the_agent_answered(chat: Chat) -> None:
    call = f'<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>{END}'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def agent(base_url: str, sample: Sample) -> float:
        history: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
        history.append(await ask(base_url, history, tools=[tool]))
        result = {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "seen"}
        await ask(base_url, [*history, result], tools=[tool])
        return 1.0

    batch, _ = build(chat, [call], environment=None, generate=agent, **SETTINGS)
    counters = [sample.metadata["counters"] for sample in await played(batch)]
    assert [(found["tool_calls"], found["tool_ok"]) for found in counters] == [(2, 1)] * 2


async def test_an_agent_without_a_request_is_a_typed_failure(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> None:
        return None

    class Rows(Store):
        def lease(self, n: int, version: int) -> list[list[Sample]]:
            groups = super().lease(n, version)
            for sample in (sample for group in groups for sample in group):
                sample.metadata["agent"] = "the row's own entry"
            return groups

    for store in (Store(), Rows()):
        policy = {"agent": "raise"}
        own: dict[str, Any] = {"environment": None, "generate": agent, "failure_policy": policy, "store": store}
        with pytest.raises(AgentFailure, match="without an answered request") as raised:
            await played(build(chat, REPLIES, **own, **SETTINGS)[0])
        assert raised.value.kind == "agent_silent"


async def test_an_agent_that_raises_is_named(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> None:
        raise ValueError("no luck")

    batch, _ = build(chat, REPLIES, environment=None, generate=agent, **SETTINGS)
    with pytest.raises(EnvFailure, match=r"no luck.*test_agents.py"):
        await played(batch)


async def test_an_agent_that_raises_at_a_full_context_keeps_what_was_written(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> None:
        history = [{"role": "user", "content": "hello"}]
        while True:
            history += [await ask(base_url, history), {"role": "user", "content": "and then? " * 200}]

    batch, _ = build(chat, [f"fine{END}"], environment=None, generate=agent, **SETTINGS)
    for sample in await played(batch):
        sample.validate()
        assert (sample.metadata["failure"]["blame"], sample.stop_reason) == ("overflow", "context")
        assert (sample.reward, sample.remove_sample) == (0.0, False)
        turns = [segment for segment in sample.segments if segment.origin == "model"]
        assert sample.trained_tokens == sum(turn.end - turn.start for turn in turns)
        assert len(turns) == 3


async def test_an_agent_is_trained_with_reward_0_if_its_grader_fails_and_the_policy_says_so(chat: Chat) -> None:
    async def reward(args: Any, sample: Sample) -> float:
        raise ValueError("no luck")

    policy = {"grader": "score"}
    own: dict[str, Any] = {"environment": None, "generate": two_turns, "reward": reward, "failure_policy": policy}
    for sample in await played(build(chat, REPLIES, **own, **SETTINGS)[0]):
        assert (sample.reward, sample.remove_sample) == (0.0, False)
        assert sample.trained_tokens == sum(len(chat.encode(reply)) for reply in REPLIES)


async def test_an_agent_asks_the_engines_of_its_context(chat: Chat) -> None:
    async def agent(base_url: str, sample: Sample) -> float:
        await two_turns(base_url, sample)
        return 1.0

    batch, training = build(chat, REPLIES, environment=None, generate=agent, **SETTINGS)
    evaluating = ScriptedEngine(chat, REPLIES)
    async with with_gateway(batch):
        batch.player.context = replace(batch.player.context, client=evaluating)
        await evaluate(batch.player, "dev", batch.store.lease(1, 0))
    assert (len(training.calls), len(evaluating.calls)) == (0, 4)


async def test_an_agent_is_told_whether_it_is_evaluated(chat: Chat) -> None:
    told: list[bool] = []

    async def agent(base_url: str, sample: Sample, evaluation: bool = False) -> float:
        told.append(evaluation)
        await two_turns(base_url, sample)
        return 1.0

    batch, _ = build(chat, REPLIES, environment=None, generate=agent, **SETTINGS)
    async with with_gateway(batch):
        await batch.run(0)
        await evaluate(batch.player, "dev", batch.store.lease(1, 0))
    assert told == [False, False, True, True]


async def test_requests_branches_and_dropped_tokens_are_metrics_of_a_run(chat: Chat) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def agent(base_url: str, sample: Sample) -> float:
        await ask(base_url, [{"role": "user", "content": "a title, please"}])
        task = [{"role": "user", "content": "the task"}]
        said = await ask(base_url, task, tools=[tool])
        for text in ["go on"] * ((sample.index or 0) % 2 + 1):
            await ask(base_url, [*task, said, {"role": "user", "content": text}], tools=[tool])
        return 1.0

    batch, _ = build(chat, [f"said{END}"], environment=None, generate=agent, **SETTINGS)
    each, prompts = len(chat.encode(f"said{END}")), batch.store.lease(1, 0)
    async with with_gateway(batch):
        rollout = await batch.run(0)
        evaluation = await evaluate(batch.player, "dev", prompts)
    metrics = rollout_metrics(rollout.groups, rollout.stats, batch.player.context.settings)
    wanted = {
        "requests": 3.5,
        "reason/first": 1,
        "reason/new_agent": 1,
        "reason/extend": 1,
        "reason/retry": 0.5,
        "sampled": 3.5 * each,
        "trained": 2.5 * each,
        "dropped/side": each,
    }
    for found in (
        {name: metrics[f"rollout/agent/{name}"] for name in wanted},
        {name: metrics[f"offered/agent/{name}"] for name in wanted},
        {name: evaluation.metrics[f"agent/{name}"] for name in wanted},
    ):
        assert found == wanted
    assert sum(count for name, count in metrics.items() if name.startswith("rollout/agent/reason/")) == 3.5


@pytest.mark.parametrize("leaves", ["a request", "no request"])
async def test_a_failed_session_keeps_its_tree_and_its_counts(chat: Chat, leaves: str) -> None:
    async def agent(base_url: str, sample: Sample) -> float:
        if sample.index == 0 or leaves == "a request":
            await two_turns(base_url, sample)
        if sample.index == 1 and leaves == "a request":
            raise ValueError("no luck")
        return 1.0

    policy = {"env": "keep_masked", "agent": "keep_masked"}
    batch, _ = build(chat, REPLIES, environment=None, generate=agent, failure_policy=policy, **SETTINGS)
    fine, failed = await played(batch)
    assert (fine.status, failed.status) == (Status.COMPLETED, Status.FAILED)
    assert fine.metadata["counters"]["agent/trained"] == sum(len(chat.encode(reply)) for reply in REPLIES)
    record = SessionRecord.model_validate(failed.metadata["gateway"]["session"])
    counters = failed.metadata["counters"]
    tokens = [len(chat.encode(reply)) for reply in REPLIES] if leaves == "a request" else []
    assert [turn.sampled_tokens for turn in record.turns] == tokens
    assert {turn.dropped for turn in record.turns} <= {"unrewarded"}
    assert [turn.text for turn in record.turns] == REPLIES[: len(tokens)]
    assert counters.get("agent/requests", 0) == len(tokens)
    assert counters.get("agent/dropped/unrewarded", 0) == sum(tokens)
    assert "agent/trained" not in counters


async def test_an_agent_environment_is_graded_by_its_own_method(chat: Chat) -> None:
    class Asks(AgentEnvironment):
        async def act(self, base_url: str, sample: Sample) -> None:
            await two_turns(base_url, sample)

        async def reward(self, sample: Sample) -> float:
            return float(sample.metadata["messages"][-1]["content"] == "second")

    batch, _ = build(chat, REPLIES, environment=Asks, **SETTINGS)
    assert [sample.reward for sample in await played(batch)] == [1.0, 1.0]


async def test_what_an_agent_environment_returns_is_no_reward(chat: Chat) -> None:
    class Exits(AgentEnvironment):
        async def act(self, base_url: str, sample: Sample) -> int:  # type: ignore[override]
            await two_turns(base_url, sample)
            return 0  # an exit code

    async def reward(args: Any, sample: Sample) -> float:
        return 0.5

    batch, _ = build(chat, REPLIES, environment=Exits, reward=reward, **SETTINGS)
    assert [sample.reward for sample in await played(batch)] == [0.5, 0.5]


class Writes(CommandEnvironment):
    command = f"{sys.executable} -c {{program}} {{prompt}}"
    sandbox = "none"

    async def reward(self, sample: Sample) -> float:
        assert self.result is not None
        told = self.result.stdout == f"finished {sample.prompt}\n"
        return float(told and (self.folder / "answer.txt").read_text() == "second")


async def test_a_command_plays_in_a_folder_of_its_own(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "command", f"{sys.executable} -c {shlex.quote(PROGRAM)} {{prompt}}")
    batch, _ = build(chat, REPLIES, environment=Writes, **SETTINGS)
    samples = await played(batch)
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert samples[0].metadata["agent"]["exit_code"] == 0


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_sandboxed_command_reaches_the_gateway_by_the_bridge(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writes, "command", f"python3 -c {shlex.quote(PROGRAM)} {{prompt}}")
    monkeypatch.setattr(Writes, "sandbox", "bubblewrap")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("python3") is None:
        pytest.skip("there is no system Python")
    batch, _ = build(chat, REPLIES, environment=Writes, **SETTINGS)
    assert [sample.reward for sample in await played(batch)] == [1.0, 1.0]


def test_a_path_that_the_sandbox_is_to_read_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "agent").mkdir()
    assert command_environment("true", "bubblewrap", ("~/agent",)).readable == (f"{tmp_path}/agent",)
    with pytest.raises(SettingsError, match=f"--agent-readable {tmp_path}/agnet: there is no such file or folder"):
        command_environment("true", "bubblewrap", ("~/agent", "~/agnet"))


async def test_a_command_that_is_not_installed_is_named(chat: Chat) -> None:
    kind = command_environment("no-such-program {prompt}", "none", ())
    batch, _ = build(chat, REPLIES, environment=kind, failure_policy={"agent": "raise"}, **SETTINGS)
    with pytest.raises(AgentFailure, match="'no-such-program' is not installed"):
        await played(batch)


@pytest.mark.parametrize("sandbox", ["none", *(["bubblewrap"] if shutil.which("bwrap") else [])])
async def test_a_prompt_too_long_for_an_argument_is_a_failure_of_its_trajectory(sandbox: str) -> None:
    env = command_environment("true {prompt}", sandbox, ())()
    with pytest.raises(AgentFailure, match=r"the prompt has 140000 characters; write it to a file in `prepare`"):
        await env.act("http://127.0.0.1:1", Sample(prompt="x" * 140_000))
    await env.close()


async def test_a_command_that_fails_at_once_says_why(chat: Chat) -> None:
    kind = command_environment(f"{sys.executable} -c 'import sys; sys.exit(\"no key\")'", "none", ())
    batch, _ = build(chat, REPLIES, environment=kind, failure_policy={"agent": "raise"}, **SETTINGS)
    with pytest.raises(AgentFailure, match="it exited with status 1: no key"):
        await played(batch)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_sandboxed_program_reads_its_whole_package_and_is_no_root(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "node_modules/.bin").mkdir(parents=True)
    (tmp_path / "node_modules/other").mkdir()
    (tmp_path / "node_modules/other/text").write_text("found")
    (tmp_path / "secret").write_text("secret")
    program = tmp_path / "node_modules/.bin/program"
    lines = ["#!/bin/sh", f"cd {tmp_path}/node_modules", "cat other/text", "id -u", "cat ../secret 2>/dev/null", "cat"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    environment = command_environment(str(program), "bubblewrap", ())()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert environment.result is not None
    assert environment.result.stdout == "found1000\n"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_program_in_the_home_folder_reads_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is named by a relative path, from this process's working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("secret").write_text("secret")
    Path("program").write_text(f"#!/bin/sh\necho started\ncat {tmp_path}/secret 2>/dev/null\n")
    Path("program").chmod(0o755)
    environment = command_environment("./program", "bubblewrap", ())()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert environment.result is not None
    assert environment.result.stdout == "started\n"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_sandboxed_command_reads_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes").write_text("found")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    environment = command_environment(f"/bin/cat {tmp_path}/link/notes", "bubblewrap", (f"{tmp_path}/link",))()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert environment.result is not None
    assert environment.result.stdout == "found"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_sandboxed_command_reads_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("found")
    environment = command_environment(f"/bin/cat {tmp_path}/notes", "bubblewrap", (".",))()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert environment.result is not None
    assert environment.result.stdout == "found"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
async def test_a_sandboxed_command_sees_certificates_and_no_keys() -> None:
    environment = command_environment("ls /etc/ssl", "bubblewrap", ())()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert environment.result is not None
    assert environment.result.exit_code == 0
    assert set(environment.result.stdout.split()) <= {"certs", "cert.pem", "openssl.cnf"}


async def test_a_folder_that_the_command_locked_is_removed() -> None:
    environment = command_environment("sh -c 'mkdir -p a/b; touch a/b/c; chmod 0 a/b a'", "none", ())()
    await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    assert not environment.folder.exists()


PLAYS = """
import anyio, sys
from agentrl.envs import command_environment
from agentrl.sample import Sample
environment = command_environment(sys.argv[1], "none", ())()
print(environment.folder, flush=True)
anyio.run(environment.act, "http://127.0.0.1:1/s/x", Sample(prompt="go"))
"""


async def test_a_command_without_a_sandbox_ends_with_the_process_that_runs_it() -> None:
    name = f"orphan{os.getpid() % 100_000}"
    program = f"{sys.executable} -c {shlex.quote(named(name))}"
    player = await anyio.open_process([sys.executable, "-c", PLAYS, program], stderr=None)
    assert player.stdout is not None
    folder = (await player.stdout.receive()).decode().strip()
    try:
        await until(lambda: processes_called(name) == 1)
    finally:
        player.kill()
        await player.aclose()
        shutil.rmtree(folder)
    await until(lambda: processes_called(name) == 0)


async def test_processes_that_a_command_leaves_running_end_with_it() -> None:
    """They also keep its output open, so the output never ends."""
    name = f"left{os.getpid() % 100_000}"
    program = f"{sys.executable} -c {shlex.quote(named(name))} & echo started"
    environment = command_environment(f"sh -c {shlex.quote(program)}", "none", ())()
    with anyio.fail_after(60):
        await environment.act("http://127.0.0.1:1/s/x", Sample(prompt="go"))
    await environment.close()
    await until(lambda: processes_called(name) == 0)


def test_a_prompt_stays_one_argument() -> None:
    hostile = "'; rm -rf /; echo \"$(id) {base_url}"
    words = split_command("run -p {prompt} --to={prompt} 'a b'", {"prompt": hostile})
    assert words == ["run", "-p", hostile, f"--to={hostile}", "a b"]
    values = {"prompt": "print(f'{folder} {base_url} {prompt}')", "base_url": "http://x", "folder": "/workspace"}
    assert split_command("run {prompt} {folder} {other}", values) == ["run", values["prompt"], "/workspace", "{other}"]
    with pytest.raises(SettingsError, match="cannot be read"):
        split_command("run 'x", {})
    with pytest.raises(SettingsError, match="empty"):
        split_command(" ", {})


def test_the_form_of_an_agent_function_is_recognised() -> None:
    async def agent(base_url: str, sample: Sample) -> None: ...

    found = GenerateFunction.of(agent, "agent")
    assert (found.agent, found.per_sample) == (True, True)


def test_functions_that_no_form_fits_are_refused() -> None:
    async def agent(base_url: str, sample: Sample, sampling_params: dict[str, Any]) -> None: ...

    async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> AsyncIterator[Sample]:
        yield sample

    with pytest.raises(PluginError, match=r"expected .* or \(base_url, sample\).*, got \(base_url, sample, sampling_p"):
        GenerateFunction.of(agent, "agent")
    with pytest.raises(PluginError, match="got the generator function generate"):
        GenerateFunction.of(generate, "generate")
