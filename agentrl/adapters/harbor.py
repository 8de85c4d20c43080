"""`--env harbor:DIR`: tasks in Harbor's folders.

A task is a folder with task.toml, instruction.md, environment/ and tests/test.sh. DIR is one task, or a folder of tasks.
The model gets the tool `bash` in a machine of its own. After its last turn no process of it is left; then tests/ is copied
to /tests, and test.sh writes the reward to /logs/verifier/reward.json or reward.txt."""

import logging
import math
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
from pydantic import FiniteFloat, NonNegativeInt, TypeAdapter

from agentrl.adapters import task_number
from agentrl.envs.base import Environment, Step, Turn
from agentrl.errors import GraderFailure, PluginError, raised_as
from agentrl.sample import Message, Sample
from agentrl.sandbox import BubblewrapMachine, ContainerMachine, Machine, MachineLimits, MachinePool
from agentrl.sandbox.command import SYSTEM_PATHS
from agentrl.tools import ToolError, tool
from agentrl.tools.base import shortened

_Kind = Literal["auto", "container", "bubblewrap"]
_WORKDIR = "/app"
_EMPTY = 'cd /; rm -rf tests logs/verifier; mkdir -p tests logs/verifier; [ -z "$(ls -A tests; ls -A logs/verifier)" ]'
_SECONDS, _MEMORY_MB, _LONGEST_COMMAND = 600.0, 4096, 86_400.0
_MAX_OUTPUT = 16_000  # characters of a command's output; less than a tool may return
_SHARE = 0.9  # of `env_timeout`, for the commands of a turn
_REWARD = TypeAdapter[float | dict[str, float]](FiniteFloat | dict[str, FiniteFloat])
_NOTE = "harbor: no Docker or Podman (%s), so tasks get this computer's programs; what Dockerfiles install is missing"


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its folder, the sections of task.toml, and the instruction."""

    folder: Path
    settings: dict[str, Any]
    instruction: str

    @classmethod
    def load(cls, folder: Path) -> "Task":
        """Read a task's folder. Raises PluginError: it is malformed, or uses what is not supported."""
        with raised_as(PluginError, f"task {folder}", OSError, ValueError):
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
            (folder / "tests" / "test.sh").stat()
        separate = settings.get("verifier", {}).get("environment_mode", "shared") != "shared"
        if "steps" in settings or separate or any((folder / "environment").glob("docker-compose.y*ml")):
            raise PluginError(f"task {folder}: steps, separate verifiers and docker compose are not supported")
        return cls(folder, settings, instruction)

    def setting(self, section: str, name: str, otherwise: float) -> float:
        return float(self.settings.get(section, {}).get(name) or otherwise)


class HarborEnvironment(Environment):
    """A task of Harbor. All commands of a trajectory get `agent.timeout_sec` together; then the trajectory ends. A `machine`
    `container` has the task's image, `bubblewrap` this computer's programs; `auto` is `container` if it works here. Each
    process has `warm_machines` that wait for the next trajectories."""

    max_turns = 50
    tasks: ClassVar[tuple[Task, ...]] = ()
    refusal: ClassVar[str | None] = None
    pool: ClassVar[MachinePool] = MachinePool()
    machine: Machine
    _turn_end = float("inf")

    def __init__(self, machine: _Kind = "auto", network: bool = False, warm_machines: NonNegativeInt = 0) -> None:
        self._kind, self._network, self._warm, self._turn = machine, network, warm_machines, anyio.Lock()

    @classmethod
    async def setup(cls, args: Any) -> None:
        cls.pool = MachinePool(cls(**args.env_args)._warm)

    @classmethod
    async def teardown(cls) -> None:
        await cls.pool.close()

    async def reset(self, sample: Sample) -> list[Message]:
        """Start the machine of a task: number `metadata["task"]`, or the number of the sample's group."""
        self.task = self.tasks[(task_number(sample, least=-math.inf) or 0) % len(self.tasks)]
        self._left = self.task.setting("agent", "timeout_sec", _SECONDS)
        with anyio.fail_after(self.task.setting("environment", "build_timeout_sec", _SECONDS)):
            self.machine = await self._start()
        if isinstance(self.machine, BubblewrapMachine) and (self.task.folder / "environment").is_dir():
            await self.machine.upload(self.task.folder / "environment", _WORKDIR)
        sample.metadata["harbor"] = {"task": self.task.folder.name}
        return [{"role": "user", "content": self.task.instruction}]

    async def _start(self) -> Machine:
        task, cls = self.task, type(self)
        limits = MachineLimits(_LONGEST_COMMAND, int(task.setting("environment", "memory_mb", _MEMORY_MB)))
        if self._kind == "auto" and cls.refusal is None:
            cls.refusal = await ContainerMachine.refusal()
            if cls.refusal:
                logging.getLogger(__name__).warning(_NOTE, cls.refusal)
        if self._kind == "bubblewrap" or (self._kind == "auto" and cls.refusal):
            return await cls.pool.start(BubblewrapMachine, limits=limits, network=self._network, workdir=_WORKDIR)
        image = str(task.settings.get("environment", {}).get("docker_image") or task.folder / "environment")
        return await cls.pool.start(ContainerMachine, image, limits=limits, network=self._network)

    @tool(timeout=_LONGEST_COMMAND)
    async def bash(self, command: str) -> str:
        """Run a command in the task's machine. Its files stay for the next command; its processes end with it.

        Args:
            command: text for bash."""
        async with self._turn:
            start = anyio.current_time()
            seconds = max(min(self._left, self._turn_end - start), 0.0)
            result = await self.machine.run(f"exec bash -c {shlex.quote(command)} 2>&1", timeout=seconds)
            self._left -= anyio.current_time() - start
        output = shortened(result.stdout, _MAX_OUTPUT)
        if result.timed_out:
            raise ToolError(f"{output}\n[the time of the {'turn' if self._left > 0 else 'task'} is over]")
        return (output or "[no output]") + (f"\n[exit status {result.exit_code}]" if result.exit_code else "")

    async def step(self, turn: Turn) -> Step:
        """Run the turn's commands within `--env-timeout`; end the trajectory if its time is over."""
        if self.args is not None:
            self._turn_end = anyio.current_time() + _SHARE * self.args.env_timeout
        step = await super().step(turn)
        return step if step.done or self._left > 0 else step.finish(stop_reason="task_timeout")

    async def reward(self, sample: Sample) -> float:
        """Run the task's tests. The reward is 0 if they write none. Raises GraderFailure: they are unreadable, or
        write no number."""
        if (await self.machine.run(_EMPTY)).exit_code:
            return 0.0  # the model's commands left something there that cannot be removed
        try:
            await self.machine.upload(self.task.folder / "tests", "/tests")
        except OSError as error:
            if error.errno is not None:  # this computer's error; the machine's have no number
                raise GraderFailure(f"task {self.task.folder.name}: {error}", kind="grader_no_tests") from error
            return 0.0  # the model's commands removed tar, or left no place
        seconds = self.task.setting("verifier", "timeout_sec", _SECONDS)
        result = await self.machine.run("bash /tests/test.sh 2>&1", timeout=seconds)
        sample.metadata["harbor"] |= {"exit_code": result.exit_code, "output": result.stdout[-4000:]}
        read = await self.machine.run("cd /logs/verifier && { cat reward.json || cat reward.txt; } 2>/dev/null")
        if result.timed_out or read.exit_code:
            return 0.0
        what = f"task {self.task.folder.name}: {read.stdout!r:.200} is no reward"
        with raised_as(GraderFailure, what, LookupError, ValueError):
            found = _REWARD.validate_json(read.stdout)
            rewards = found if isinstance(found, dict) else {"reward": found}
            return rewards["reward"] if len(rewards) != 1 else next(iter(rewards.values()))

    async def close(self) -> None:
        if hasattr(self, "machine"):
            await self.machine.close()


def environment(name: str) -> type[Environment]:
    """Return the environment class of a folder's tasks. Raises PluginError: there is none, or one cannot be read."""
    folder = Path(name).expanduser().resolve()
    if str(folder).startswith(tuple(f"{path}/" for path in SYSTEM_PATHS)):
        raise PluginError(f"move the tasks: programs in a sandbox can read {folder}")
    if not (found := [file.parent for file in list(folder.glob("task.toml")) or sorted(folder.glob("*/task.toml"))]):
        raise PluginError(f"no task.toml in {folder}, nor in a folder in it")
    return type("Harbor", (HarborEnvironment,), {"__module__": __name__, "tasks": tuple(map(Task.load, found))})
