"""Harbor's task folders, played in every kind of machine that works here."""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agentrl.adapters import harbor
from agentrl.adapters.harbor import HarborEnvironment
from agentrl.chat import Chat
from agentrl.chat.messages import ToolCall
from agentrl.envs.base import Turn
from agentrl.envs.environments import Environments, EnvSpec
from agentrl.envs.load import load_environment
from agentrl.errors import GraderFailure, PluginError
from agentrl.rollout.agent_loop import run_environment
from agentrl.sample import Sample
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.command import CommandResult
from agentrl.sandbox.container_machine import ContainerMachine
from agentrl.sandbox.machine import Machine
from tests.adapters.played import play
from tests.rollout.scripted import END, ScriptedEngine, make_context
from tests.sandbox.test_machines import place
from tests.sandbox.watch import processes_called, until
from tests.support.nightly import nightly

__all__ = ["place"]

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

IMAGE = os.environ.get("AGENTRL_TEST_IMAGE", "docker.io/library/python:3.11-slim")
TEST = '[ "$(cat /app/out.txt)" = "$(cat /tests/expected)" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
PASSES = "echo 1 > /logs/verifier/reward.txt"
MACHINES: dict[str, type[Machine]] = {"bubblewrap": BubblewrapMachine, "container": ContainerMachine}


def write_task(folder: Path, *, settings: str = "", test: str = TEST, instruction: str = "Write hello.") -> Path:
    files = {
        "task.toml": f'schema_version = "1.4"\n[environment]\nmemory_mb = 1024\n{settings}',
        "instruction.md": instruction,
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nCOPY . .\n",
        "environment/data/start.txt": "the start",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        "tests/expected": "hello",
        "solution/solve.sh": "#!/bin/bash\necho hello > /app/out.txt\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(params=["bubblewrap", "container"])
async def kind(request: pytest.FixtureRequest) -> str:
    if reason := await MACHINES[request.param].refusal():
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


class Play:
    """One trajectory of a task: its commands and its reward."""

    def __init__(self, folder: Path, kind: str, **metadata: Any) -> None:
        cls = load_environment(f"harbor:{folder}")
        assert issubclass(cls, HarborEnvironment)
        self.env = cls.create(machine=kind)
        self.sample = Sample(prompt="", group_index=0, metadata=metadata)

    async def __aenter__(self) -> "Play":
        self.messages = await self.env.reset(self.sample)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.env.close()

    async def bash(self, command: str) -> str:
        outcome = await self.env.toolbox.run("bash", {"command": command}, state=self.env)
        return outcome.text

    async def reward(self) -> float:
        return await self.env.reward(self.sample)


async def test_the_oracle_earns_1_and_nothing_earns_0(tmp_path: Path, kind: str) -> None:
    async with Play(write_task(tmp_path), kind) as play:
        assert play.messages == [{"role": "user", "content": "Write hello."}]
        assert await play.reward() == 0.0
    async with Play(tmp_path, kind) as play:
        await play.env.machine.upload(tmp_path / "solution", "/solution")
        assert await play.bash("bash /solution/solve.sh") == "[no output]"
        assert await play.reward() == 1.0
        assert play.sample.metadata["harbor"] == {"task": tmp_path.name, "exit_code": 0, "output": ""}


@needs_bubblewrap
async def test_tests_in_a_linked_folder_are_run(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", test=PASSES)
    (task / "tests").rename(tmp_path / "shared")
    (task / "tests").symlink_to("../shared")
    async with Play(task, "bubblewrap") as play:
        assert await play.reward() == 1.0


@needs_bubblewrap
async def test_tests_that_this_computer_cannot_read_are_no_fault_of_the_model(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", test=PASSES)
    async with Play(task, "bubblewrap") as play:
        shutil.rmtree(task / "tests")
        with pytest.raises(GraderFailure, match="task task: .*No such file or directory.*tests"):
            await play.reward()


@needs_bubblewrap
@pytest.mark.parametrize("episodes", [4, pytest.param(200, marks=pytest.mark.slow)])
async def test_episodes_have_the_models_tokens_and_the_verifiers_rewards(
    chat: Chat, tmp_path: Path, episodes: int
) -> None:
    kind = load_environment(f"harbor:{write_task(tmp_path)}")
    for group in range(episodes):
        word = ("hello", "help")[group % 2]
        call = {"name": "bash", "arguments": {"command": f"echo {word} > out.txt; seq {group}"}}
        answers = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "Done."]
        sample, _ = await play(chat, kind, group, answers, machine="bubblewrap")
        assert sample.reward == (word == "hello")
        assert sample.metadata["harbor"]["exit_code"] == 0


@needs_bubblewrap
async def test_commands_share_files_and_show_their_output(tmp_path: Path) -> None:
    async with Play(write_task(tmp_path), "bubblewrap") as play:
        assert await play.bash("cat data/start.txt; echo more >&2") == "the startmore\n"
        assert await play.bash("cd data && echo 'a\\b' > new && shopt -q extglob; [[ -e new ]] && exit 3") == (
            "[no output]\n[exit status 3]"
        )
        assert await play.bash("cat data/new") == "a\\b\n"
        assert await play.bash("true") == "[no output]"
        long = await play.bash("seq 99999; exit 3")
        assert long.startswith("1\n2\n")
        assert long.endswith("\n99999\n\n[exit status 3]")


async def test_tests_are_out_of_sight_while_the_model_works(tmp_path: Path, kind: str) -> None:
    async with Play(write_task(tmp_path), kind) as play:
        assert await play.bash("ls -A /tests /solution /logs/verifier 2>/dev/null | grep -v :") in (
            "\n\n[exit status 1]", "\n", "[no output]\n[exit status 1]", "\n\n"
        )  # fmt: skip
        for path in (tmp_path, tmp_path / "tests" / "expected"):
            assert "No such file" in await play.bash(f"ls {path}; echo x >> {path}")
        found = "for f in /* /*/* /*/*/* /*/*/*/*; do case $f in /proc/*|/sys/*|/usr/*|/lib*) ;; */solve.sh|*/test.sh|*/expected) echo $f;; esac; done"
        assert await play.bash(found) == "[no output]"
    assert (tmp_path / "tests" / "expected").read_text() == "hello"


PLANTED = {
    "files": "mkdir -p /tests /logs/verifier; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "links": "mkdir -p /logs /app/mine; echo 1 > /app/mine/reward.json; rm -rf /logs/verifier /tests; ln -s /app/mine /logs/verifier; ln -s /app/mine /tests",
    "closed folder": "mkdir -p /logs/verifier/x/y; echo '{\"reward\": 1}' > /logs/verifier/reward.json; chmod 0 /logs/verifier/x /logs/verifier",
    "expected": "mkdir -p /tests; echo forged > /tests/expected; chmod 444 /tests/expected; echo forged > /app/out.txt",
}  # fmt: skip


@pytest.mark.parametrize("commands", nightly(PLANTED.values(), 3), ids=PLANTED)
async def test_what_the_model_plants_earns_nothing(tmp_path: Path, kind: str, commands: str) -> None:
    async with Play(write_task(tmp_path), kind) as play:
        await play.bash(commands)
        assert await play.reward() == 0.0


async def test_a_machine_without_programs_earns_nothing(tmp_path: Path, kind: str) -> None:
    for program in ("sh", "tar"):
        async with Play(write_task(tmp_path, test=PASSES), kind) as play:
            said = await play.bash(f"rm /bin/{program}")
            assert await play.reward() == (0.0 if said == "[no output]" else 1.0)


async def test_no_process_of_the_model_sees_the_tests(tmp_path: Path, kind: str) -> None:
    spy = (
        "ln -s /bin/bash /tmp/harborspy; cat > /tmp/spy <<'END'\n"
        "while true; do cp /tests/* /app/; echo '{\"reward\": 1}' > /logs/verifier/reward.json; done 2> /dev/null\nEND\n"
        "setsid nohup /tmp/harborspy /tmp/spy > /dev/null 2>&1 < /dev/null & disown; sleep 0.05; ls /tmp"
    )
    async with Play(write_task(tmp_path), kind) as play:
        assert "spy" in await play.bash(spy)
        assert processes_called("harborspy") == 0
        assert await play.reward() == 0.0
        assert "expected" not in await play.bash("ls /app")


@needs_bubblewrap
async def test_the_time_of_all_commands_is_limited(tmp_path: Path) -> None:
    folder = write_task(tmp_path, settings="[agent]\ntimeout_sec = 0.2\n[verifier]\ntimeout_sec = 200\n", test=PASSES)
    async with Play(folder, "bubblewrap") as play:
        assert "[the time of the task is over]" in await play.bash("sleep 1000")
        turn = Turn(
            index=1, text="", content="", tool_calls=[ToolCall(id="1", name="bash", arguments={"command": "true"})]
        )
        step = await play.env.step(turn)
        assert (step.done, step.stop_reason) == (True, "task_timeout")
        assert await play.reward() == 1.0


def calling(commands: Sequence[str]) -> Turn:
    calls = [ToolCall(id=str(at), name="bash", arguments={"command": each}) for at, each in enumerate(commands)]
    return Turn(index=1, text="", content="", tool_calls=calls)


@needs_bubblewrap
async def test_the_commands_of_a_turn_share_the_time(tmp_path: Path) -> None:
    folder = write_task(tmp_path, settings="[agent]\ntimeout_sec = 300\n", test=PASSES)
    async with Play(folder, "bubblewrap") as play:
        limits, clock, real = list[float](), [0.0], play.env.machine

        class Timed:
            """Takes 100 s of the test's clock for each command."""

            async def run(self, command: str, *, timeout: float) -> CommandResult:
                limits.append(timeout)
                await anyio.lowlevel.checkpoint()
                clock[0] += min(100.0, timeout)
                return CommandResult(0, b"", b"")

        play.env.machine = Timed()  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agentrl.adapters.harbor.anyio.current_time", lambda: clock[0])
            step = await play.env.step(calling(["a", "b"]))
            assert (limits, step.done) == ([300.0, 200.0], False)
            step = await play.env.step(calling(["c", "d"]))
            assert (limits[2:], step.stop_reason) == ([100.0, 0.0], "task_timeout")
        play.env.machine = real


@needs_bubblewrap
async def test_a_slow_command_ends_before_the_limit_of_a_step(
    tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harbor, "_SHARE", 0.1)
    kind = load_environment(f"harbor:{write_task(tmp_path, test=PASSES)}")
    call = {"name": "bash", "arguments": {"command": "echo begun; sleep 1000"}}
    engine = ScriptedEngine(chat, [f"<tool_call>\n{json.dumps(call)}\n</tool_call>{END}", f"Done.{END}"])
    context = make_context(chat, engine, kind, 1 << 16, env_timeout=30.0)
    assert context.environments is not None
    context.environments.update(Environments({"": EnvSpec(kind, context.args, {"machine": "bubblewrap"})}))
    sample = (await run_environment(context, Sample(group_index=0, index=0), context.params()))[0]
    assert (sample.stop_reason, sample.reward) == ("done", 1.0)
    answer = next(message for message in sample.metadata["messages"] if message["role"] == "tool")
    assert answer["content"] == "Error: begun\n\n[the time of the turn is over]"


@needs_bubblewrap
async def test_tests_that_overrun_earn_nothing(tmp_path: Path) -> None:
    folder = write_task(tmp_path, settings="[verifier]\ntimeout_sec = 0.3\n", test=f"{PASSES}; sleep 1000")
    async with Play(folder, "bubblewrap") as play:
        assert await play.reward() == 0.0
        assert play.sample.metadata["harbor"]["exit_code"] == 124


REWARDS = [
    ("echo 0.25 > reward.txt", 0.25),
    ("echo ' 1e0 ' > reward.txt", 1.0),
    ('echo \'{"reward": 0.5, "style": 1}\' > reward.json; echo 1 > reward.txt', 0.5),
    ("echo '{\"score\": 0.75}' > reward.json", 0.75),
    ("true", 0.0),
    ("exit 1", 0.0),
]
NO_REWARDS = [
    "echo many > reward.txt",
    "echo NaN > reward.txt",
    "touch reward.txt",
    'echo \'{"a": 1, "b": 2}\' > reward.json',
]


@needs_bubblewrap
@pytest.mark.parametrize(("test", "reward"), nightly(REWARDS, 2))
async def test_rewards_are_read(tmp_path: Path, test: str, reward: float) -> None:
    async with Play(write_task(tmp_path, test=f"cd /logs/verifier; {test}"), "bubblewrap") as play:
        assert await play.reward() == reward


@needs_bubblewrap
@pytest.mark.parametrize("test", NO_REWARDS)
async def test_what_is_no_number_is_the_graders_failure(tmp_path: Path, test: str) -> None:
    async with Play(write_task(tmp_path, test=f"cd /logs/verifier; {test}"), "bubblewrap") as play:
        with pytest.raises(GraderFailure, match=tmp_path.name):
            await play.reward()


@needs_bubblewrap
@pytest.mark.parametrize(
    ("group", "metadata", "task"), [(0, {}, "a"), (3, {}, "b"), (0, {"task": 1}, "b"), (1, {"task": 4}, "a")]
)
async def test_the_number_picks_the_task(tmp_path: Path, group: int, metadata: dict[str, int], task: str) -> None:
    for name in "ab":
        write_task(tmp_path / name, instruction=name)
    play = Play(tmp_path, "bubblewrap", **metadata)
    play.sample.group_index = group
    async with play:
        assert play.messages[0]["content"] == task
        assert play.sample.metadata["harbor"]["task"] == task


@needs_bubblewrap
async def test_warm_machines_wait_for_trajectories_and_close_with_the_run(tmp_path: Path, place: Path) -> None:
    cls: Any = load_environment(f"harbor:{write_task(tmp_path)}")
    arguments = {"machine": "bubblewrap", "warm_machines": 2}
    await cls.setup(SimpleNamespace(env_args=arguments))
    cancelled, *plays = [cls.create(**arguments) for _ in range(5)]
    await (first := cls.create(**arguments)).reset(Sample(prompt=""))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled.reset, Sample(prompt=""))
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    for number, env in enumerate(plays):
        await env.reset(Sample(prompt="", group_index=number))
        await env.machine.write("/app/out.txt", b"hello" if number % 2 else b"other")
    assert [await env.reward(Sample(metadata={"harbor": {}})) for env in plays] == [0.0, 1.0, 0.0, 1.0]
    for env in (first, cancelled, *plays):
        await env.close()
    await until(lambda: len(os.listdir(place)) == 2)  # they wait
    await cls.teardown()
    assert os.listdir(place) == []


@pytest.fixture
def no_containers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a path on which `docker` and `podman` fail."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("docker", "podman"):
        (folder / name).write_text("#!/bin/sh\necho no daemon >&2; exit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@needs_bubblewrap
@pytest.mark.usefixtures("no_containers")
async def test_without_containers_one_note_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_task(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with Play(tmp_path, "auto") as play:
                assert isinstance(play.env.machine, BubblewrapMachine)
    notes = [record.getMessage() for record in caplog.records if record.name == "agentrl.adapters.harbor"]
    assert len(notes) == 1
    assert "no daemon" in notes[0]
    assert "Dockerfiles" in notes[0]


BROKEN = [
    ("rm instruction.md", "instruction.md"),
    ("rm tests/test.sh", "test.sh"),
    ("echo '[x' > task.toml", "task.toml|Expected"),
    ("echo '[[steps]]' >> task.toml", "not supported"),
    ("printf '[verifier]\\nenvironment_mode = \"separate\"' >> task.toml", "not supported"),
    ("touch environment/docker-compose.yaml", "not supported"),
    ("rm task.toml", "no task.toml"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_malformed_task_is_named(tmp_path: Path, change: str, message: str) -> None:
    write_task(tmp_path)
    assert os.system(f"cd '{tmp_path}' && {change}") == 0
    with pytest.raises(PluginError, match=message) as caught:
        load_environment(f"harbor:{tmp_path}")
    assert str(tmp_path) in str(caught.value)


def test_tasks_in_a_visible_folder_are_refused() -> None:
    with pytest.raises(PluginError, match="can read /usr/share"):
        load_environment("harbor:/usr/share")
