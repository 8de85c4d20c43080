"""Environments for agent programs: the requests that a program sends to the gateway are the trajectory."""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from agentrl import parent_watchdog
from agentrl.envs.base import Environment
from agentrl.errors import AgentFailure, SandboxUnavailable, SettingsError
from agentrl.sample import Sample, content_text
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.command import CommandResult, bubblewrapped, run_command, split_command


class AgentEnvironment(Environment):
    """An environment in which an agent program acts.

    An environment that asks one question through the OpenAI SDK:

        class Ask(AgentEnvironment):
            async def act(self, base_url, sample):
                client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any")
                messages = [{"role": "user", "content": sample.prompt}]
                await client.chat.completions.create(model="policy", messages=messages)"""

    socket: Path | None = None  # the gateway's Unix socket, for programs without network access

    async def act(self, base_url: str, sample: Sample) -> None:
        """Run the agent to its end. OpenAI's clients add `/v1` to `base_url`, Anthropic's do not. Its result has no effect."""
        raise NotImplementedError


class CommandEnvironment(AgentEnvironment):
    """An environment in which a command acts. Each trajectory runs the command in a new folder.

        class Fix(CommandEnvironment):
            command = "claude -p {prompt} --dangerously-skip-permissions"

            async def prepare(self, sample):
                (self.folder / "main.py").write_text(sample.metadata["source"])

            async def reward(self, sample):
                return float("fixed" in (self.folder / "main.py").read_text())

    `command` is split by a shell's rules; then `{prompt}`, `{base_url}` and `{folder}` are replaced in its arguments. The
    variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set."""

    command: ClassVar[str] = ""
    sandbox: ClassVar[Literal["bubblewrap", "none"]] = "bubblewrap"  # `none`: with your permissions and network
    readable: ClassVar[tuple[str, ...]] = ()  # more paths that a sandboxed command may read
    variables: ClassVar[Mapping[str, str]] = {}  # more environment variables
    result: CommandResult | None = None  # exit code and output of the command, when it has ended

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))  # where the command runs; `close` removes it

    async def prepare(self, sample: Sample) -> None:
        """Write the files of the task into `folder`."""

    async def act(self, base_url: str, sample: Sample) -> None:
        """Run the command. Raises AgentFailure: the command cannot be started."""
        await self.prepare(sample)
        sandboxed, own = self.sandbox != "none", str(self.folder)
        values = {"prompt": prompt_text(sample), "base_url": base_url, "folder": "/workspace" if sandboxed else own}
        words = split_command(self.command, values)
        words[0] = _program(words[0])
        variables = {**_variables(base_url, "/home/agent" if sandboxed else own), **self.variables}
        if sandboxed:
            bridged = None if self.socket is None else (self.socket, urlsplit(base_url).port or 80)
            words = bubblewrapped(words, self.folder, readable=(*_folders(words[0]), *self.readable), bridged=bridged)
        else:  # without bubblewrap, the watchdog ends the command if this process dies
            words = [sys.executable, "-I", "-S", parent_watchdog.__file__, str(os.getpid()), *words]
        try:
            self.result = await run_command(words, variables, self.folder, kill_rest=True)
        except SandboxUnavailable as error:
            if getattr(error.__cause__, "errno", None) != errno.E2BIG:
                raise
            problem = f"the command's arguments are too long; the prompt has {len(values['prompt'])} characters"
            remedy = "write it to a file in `prepare` of a CommandEnvironment (--env) whose command has no {prompt}"
            raise AgentFailure(f"{problem}; {remedy}", kind="agent_arguments") from error
        output = {"output": self.result.stdout[-4000:], "errors": self.result.stderr[-4000:]}
        sample.metadata["agent"] = {"exit_code": self.result.exit_code, **output}

    async def close(self) -> None:
        await BubblewrapMachine.delete(str(self.folder))  # also removes files that the command made read-only


def prompt_text(sample: Sample) -> str:
    """Return the sample's prompt as one text."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n\n".join(content_text(message.get("content")) for message in sample.prompt)


def _variables(base_url: str, home: str) -> dict[str, str]:
    bases = {"OPENAI_BASE_URL": f"{base_url}/v1", "ANTHROPIC_BASE_URL": base_url}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "agentrl")
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": home, "LANG": "C.UTF-8", **bases, **keys}


def _program(name: str) -> str:
    """Return the absolute path of a program, because it runs in another folder. Raises AgentFailure: it is not installed."""
    if (program := shutil.which(name)) is None:
        raise AgentFailure(f"the command {name!r} is not installed, or not on the PATH", kind="agent_absent")
    return os.path.abspath(program)


def _folders(program: str) -> tuple[str, ...]:
    """Return the folders with a program's files, except system folders. For a program in `node_modules` or in a virtual
    environment, that is the whole `node_modules` or environment. For a program directly in the home folder, or in a
    folder above it, that is the program's file alone."""
    folders = {_package(Path(program)), _package(Path(os.path.realpath(program)))}
    return tuple(str(folder) for folder in folders if not str(folder).startswith(("/usr/", "/bin", "/sbin")))


def _package(program: Path) -> Path:
    roots = (folder for folder in program.parents if folder.name == "node_modules" or (folder / "pyvenv.cfg").exists())
    return next(roots, program if Path(os.path.expanduser("~")).is_relative_to(program.parent) else program.parent)


def command_environment(command: str, sandbox: str, readable: tuple[str, ...]) -> type[CommandEnvironment]:
    """Return the environment class that runs the command of `--agent`. Raises SettingsError: a path is missing."""
    paths = tuple(map(os.path.expanduser, readable))
    if missing := next((path for path in paths if not os.path.exists(path)), None):
        raise SettingsError(f"--agent-readable {missing}: there is no such file or folder on this machine")
    body: dict[str, Any] = {"command": command, "sandbox": sandbox, "readable": paths, "__module__": __name__}
    return type("Agent", (CommandEnvironment,), body)
