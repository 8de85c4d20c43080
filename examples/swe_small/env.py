"""Repair a small repository, in two forms.

1. `SweEnv`: native tools `read_file`, `edit_file` and `run_command`.
2. `SweAgentEnv`: a program that speaks to the gateway works in the repository's folder.

Hidden tests decide the reward of both (`grading.py`).
"""

import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import anyio
from anyio import to_thread

from agentrl import Environment, Message, Sample, tool
from agentrl.envs import CommandEnvironment
from agentrl.tools import ToolError
from examples.swe_small.grading import LARGEST, grade, run_inside
from examples.swe_small.tasks import Task, make_task, write_files

SHOWN = 4000
PROGRAM = Path(__file__).with_name("small_agent.py")


def task_of(sample: Sample) -> Task:
    """Return the task of a sample: that of its row, else the one with the number of its group."""
    number = sample.metadata.get("task", sample.group_index or 0)
    return make_task(int(number), int(sample.metadata.get("seed", 0)))


class SweEnv(Environment):
    """Repair a repository with tools that read, edit and run."""

    max_turns = 12

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-swe-"))
        self.lock = anyio.Lock()  # calls of one turn run one after the other: no link appears between check and use

    async def reset(self, sample: Sample) -> list[Message]:
        """Write the repository; show the issue and the files' names."""
        task = task_of(sample)
        await to_thread.run_sync(write_files, task.files, self.folder)
        return [{"role": "user", "content": f"{task.prompt}\nFiles: {' '.join(sorted(task.files))}"}]

    @tool
    async def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: path in the repository
        """
        async with self.lock:
            return self._file(path).read_text(encoding="utf-8", errors="replace")[:SHOWN]

    @tool
    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: path in the repository
            old: the text to replace
            new: the text in its place
        """
        async with self.lock:
            file = self._file(path)
            text = file.read_text(encoding="utf-8", errors="replace")
            if (times := text.count(old) if old else 0) != 1:
                return f"Error: the old text occurs {times} times; expected is once."
            file.write_text(text.replace(old, new), encoding="utf-8")
            return "edited"

    @tool
    async def run_command(self, command: str) -> str:
        """Run a shell command in the repository.

        Args:
            command: text for sh
        """
        async with self.lock:
            result = await run_inside(["/bin/sh", "-c", command], self.folder)
        if result is None:
            return "Error: the command took too long and was ended."
        return f"{result.stdout}{result.stderr}"[-SHOWN:] + f"\n[exit code {result.exit_code}]"

    def _file(self, path: str) -> Path:
        found = (self.folder / path).resolve()
        if not found.is_relative_to(self.folder.resolve()) or not found.is_file() or found.stat().st_size > LARGEST:
            raise ToolError(f"{path!r:.200} is not a file of the repository")
        return found

    async def reward(self, sample: Sample) -> float:
        """1.0 if all hidden tests pass, else 0.0; also for a trajectory that was cut off."""
        return await grade(task_of(sample), self.folder)

    async def close(self) -> None:
        """Remove the folder."""
        await to_thread.run_sync(shutil.rmtree, self.folder, True)


class SweAgentEnv(CommandEnvironment):
    """Repair a repository with an agent program. For another program, write a subclass with another `command`."""

    command: ClassVar[str] = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROGRAM))} {{prompt}}"
    readable: ClassVar[tuple[str, ...]] = (str(PROGRAM),)

    async def prepare(self, sample: Sample) -> None:
        """Write the repository."""
        await to_thread.run_sync(write_files, task_of(sample).files, self.folder)

    async def reward(self, sample: Sample) -> float:
        """1.0 if all hidden tests pass, else 0.0."""
        return await grade(task_of(sample), self.folder)
