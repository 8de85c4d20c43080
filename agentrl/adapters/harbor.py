"""`--env harbor:DIR`: tasks in Harbor's folders.

A task is a folder with task.toml, instruction.md, environment/ and tests/test.sh. DIR is one task, or a folder of tasks.

1. The model gets the tool `bash` in a machine of its own.
2. After its last turn, no process of it is left. Then tests/ is copied to /tests, and test.sh runs.
3. The reward is in /logs/verifier/reward.json or reward.txt.
"""

import json
import logging
import math
import shlex
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio

from agentrl.envs.base import Environment, Step, Turn
from agentrl.errors import EnvFailure, GraderFailure, PluginError
from agentrl.sample import Message, Sample
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.command import SYSTEM_PATHS, CommandResult
from agentrl.sandbox.container_machine import ContainerMachine
from agentrl.sandbox.limits import MachineLimits
from agentrl.sandbox.machine import Machine
from agentrl.tools import ToolError, tool

_log = logging.getLogger(__name__)
_WORKDIR = "/app"
_EMPTY = 'rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier && [ -z "$(ls -A /tests; ls -A /logs/verifier)" ]'
_SECONDS, _MEMORY_MB, _LONGEST_COMMAND = 600.0, 4096, 86_400.0
_NOTE = (
    "harbor: tasks run with the programs of this computer, read-only, and with the files of environment/ in %s. What their "
    "Dockerfiles install is missing. Containers do not work here: %s"
)


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its folder, the sections of task.toml, and the instruction."""

    folder: Path
    settings: dict[str, dict[str, Any]]
    instruction: str

    @classmethod
    def load(cls, folder: Path) -> "Task":
        """Read a task's folder. Raises PluginError: a file is missing or malformed, or a feature is not supported."""
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PluginError(f"harbor task {folder}: {error}") from error
        absent = {
            "several steps": "steps" in settings,
            "a separate verifier": settings.get("verifier", {}).get("environment_mode", "shared") != "shared",
            "docker compose": any((folder / "environment").glob("docker-compose.y*ml")),
        }
        if found := [name for name, there in absent.items() if there]:
            raise PluginError(f"harbor task {folder}: {', '.join(found)}: not supported")
        if not (folder / "tests" / "test.sh").is_file():
            raise PluginError(f"harbor task {folder}: no tests/test.sh")
        return cls(folder, settings, instruction)

    def setting(self, section: str, name: str, otherwise: float) -> float:
        """Return a number of task.toml, or `otherwise`."""
        return float(self.settings.get(section, {}).get(name) or otherwise)


class HarborEnvironment(Environment):
    """A task of Harbor. All commands of a trajectory get `agent.timeout_sec` together; then the trajectory ends."""

    max_turns = 50
    tasks: ClassVar[tuple[Task, ...]] = ()
    refusal: ClassVar[str | None] = None
    machine: Machine | None = None

    def __init__(self, machine: Literal["auto", "container", "bubblewrap"] = "auto", network: bool = False) -> None:
        """
        Args:
            machine: `container` is Docker or Podman with the task's image; `bubblewrap` has the programs of this computer;
                `auto` is `container` if it works here.
            network: the machine gets a network.
        """
        self._kind, self._network = machine, network

    async def reset(self, sample: Sample) -> list[Message]:
        """Start the machine of a task: number `metadata["task"]`, or the number of the sample's group."""
        number = sample.metadata.get("task", sample.group_index or 0)
        if not isinstance(number, int):
            raise EnvFailure(f"metadata['task']: expected the number of a task, got {number!r:.100}")
        self.task = self.tasks[number % len(self.tasks)]
        self._left = self.task.setting("agent", "timeout_sec", _SECONDS)
        self.machine = await self._start()
        sample.metadata["harbor"] = {"task": self.task.folder.name}
        return [{"role": "user", "content": self.task.instruction}]

    async def _start(self) -> Machine:
        task, cls = self.task, type(self)
        self._test_seconds = task.setting("verifier", "timeout_sec", _SECONDS)
        memory = int(task.setting("environment", "memory_mb", _MEMORY_MB))
        limits = MachineLimits(seconds=max(self._left, self._test_seconds), memory_mb=memory)
        if self._kind == "auto" and cls.refusal is None:
            cls.refusal = await ContainerMachine.refusal()
            if cls.refusal:
                _log.warning(_NOTE, _WORKDIR, cls.refusal)
        files = task.folder / "environment"
        if self._kind == "container" or (self._kind == "auto" and not cls.refusal):
            image = str(task.settings.get("environment", {}).get("docker_image") or files)
            with anyio.fail_after(task.setting("environment", "build_timeout_sec", _SECONDS)):
                return await ContainerMachine.start(image, limits=limits, network=self._network)
        machine = await BubblewrapMachine.start(limits=limits, network=self._network, workdir=_WORKDIR)
        try:
            if files.is_dir():
                await machine.upload(files, _WORKDIR)
        except BaseException:
            await machine.close()
            raise
        return machine

    @tool(timeout=_LONGEST_COMMAND)
    async def bash(self, command: str) -> str:
        """Run a command in the task's machine. Its files stay for the next command; its processes end with it.

        Args:
            command: text for bash.
        """
        result = await self.play(command)
        status = "the time of the task is over" if result.timed_out else f"exit status {result.exit_code}"
        text = f"{result.stdout.rstrip()}\n[{status}]".strip() if result.exit_code else result.stdout.rstrip()
        if result.timed_out:
            raise ToolError(text)
        return text or "[no output]"

    async def play(self, command: str) -> CommandResult:
        """Run a command as the tool `bash` does; standard error is part of the standard output."""
        assert self.machine is not None
        start = time.perf_counter()
        try:
            return await self.machine.run(f"exec bash -c {shlex.quote(command)} 2>&1", timeout=max(self._left, 0.01))
        finally:
            self._left -= time.perf_counter() - start

    async def step(self, turn: Turn) -> Step:
        """Run the turn's commands; end the trajectory if its time is over."""
        step = await super().step(turn)
        return step if step.done or self._left > 0 else step.finish(stop_reason="task_timeout")

    async def reward(self, sample: Sample) -> float:
        """Run the task's tests. The reward is 0 if they write none. Raises GraderFailure: the tests cannot be copied, or
        write something else than a number."""
        assert self.machine is not None
        if (await self.machine.run(_EMPTY)).exit_code and (await self.machine.run(_EMPTY.partition("; ")[2])).exit_code:
            return 0.0  # the model's commands left something that cannot be removed
        try:
            await self.machine.upload(self.task.folder / "tests", "/tests")
        except OSError as error:
            raise GraderFailure(f"harbor task {self.task.folder.name}: the tests cannot be copied: {error}") from error
        result = await self.machine.run("bash /tests/test.sh 2>&1", timeout=self._test_seconds)
        sample.metadata["harbor"] |= {"exit_code": result.exit_code, "output": result.stdout[-4000:]}
        for name in ("reward.json", "reward.txt") if not result.timed_out else ():
            try:
                return _number(await self.machine.read(f"/logs/verifier/{name}"))
            except OSError:
                continue
            except (ValueError, TypeError) as error:
                raise GraderFailure(f"harbor task {self.task.folder.name}: {name}: {error}") from error
        return 0.0

    async def close(self) -> None:
        """Remove the machine."""
        if self.machine is not None:
            await self.machine.close()


def _number(text: bytes) -> float:
    """Return the reward in a file: a number, or an object with `reward` or with one number alone."""
    found = json.loads(text)
    if isinstance(found, dict):
        found = found["reward"] if "reward" in found else math.nan if len(found) != 1 else next(iter(found.values()))
    if not math.isfinite(number := float(found)):
        raise ValueError(f"expected a finite number, or an object with a number `reward`, got {text[:200]!r}")
    return number


def environment(name: str) -> type[Environment]:
    """Return the environment class of a folder with one task or several. Raises PluginError: there is none, or a task cannot
    be read."""
    folder = Path(name).expanduser().resolve()
    if str(folder).startswith(tuple(f"{path}/" for path in SYSTEM_PATHS)):
        raise PluginError(f"harbor:{name}: move it; programs in a sandbox can read {folder}")
    folders = [folder] if (folder / "task.toml").is_file() else sorted(each.parent for each in folder.glob("*/task.toml"))
    if not folders:
        raise PluginError(f"harbor:{name}: no task.toml in {folder} or in a folder in it")
    tasks = tuple(Task.load(each) for each in folders)
    return type("Harbor", (HarborEnvironment,), {"tasks": tasks, "__module__": __name__, "__doc__": HarborEnvironment.__doc__})
