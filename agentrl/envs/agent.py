"""Environments for agent programs: the requests that a program sends to the gateway are the trajectory."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from anyio import to_thread

from agentrl.envs.base import Environment
from agentrl.errors import AgentFailure
from agentrl.sample import Sample, content_text
from agentrl.sandbox.command import CommandResult, bubblewrapped, run_command, split_command


class AgentEnvironment(Environment):
    """A task that an agent program works on.

    An environment that asks one question through the OpenAI SDK:

        class Ask(AgentEnvironment):
            async def act(self, base_url, sample):
                client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="any")
                messages = [{"role": "user", "content": sample.prompt}]
                await client.chat.completions.create(model="policy", messages=messages)

    Attributes:
        socket: the gateway as a Unix socket, for programs without a network."""

    socket: Path | None = None

    async def act(self, base_url: str, sample: Sample) -> None:
        """Run the agent to its end. OpenAI's clients add `/v1` to `base_url`, Anthropic's do not."""
        raise NotImplementedError


class CommandEnvironment(AgentEnvironment):
    """A task that a command works on. Each trajectory runs the command in a new folder.

        class Fix(CommandEnvironment):
            command = "claude -p {prompt} --dangerously-skip-permissions"

            async def prepare(self, sample):
                (self.folder / "main.py").write_text(sample.metadata["source"])

            async def reward(self, sample):
                return float("fixed" in (self.folder / "main.py").read_text())

    The variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set.

    Attributes:
        command: split by a shell's rules; then `{prompt}`, `{base_url}` and `{folder}` are replaced in their arguments.
        sandbox: `bubblewrap`, or `none`; with `none` the command has your rights and your network.
        readable: more paths that a sandboxed command may read.
        variables: more environment variables.
        folder: the command's folder; it is removed with the trajectory.
        result: exit code and output of the command, when it has ended."""

    command: ClassVar[str] = ""
    sandbox: ClassVar[Literal["bubblewrap", "none"]] = "bubblewrap"
    readable: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[Mapping[str, str]] = {}
    result: CommandResult | None = None

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))

    async def prepare(self, sample: Sample) -> None:
        """Write the files of the task into `folder`."""

    async def act(self, base_url: str, sample: Sample) -> None:
        """Run the command. Raises AgentFailure: it cannot be started."""
        await self.prepare(sample)
        inside = self.sandbox != "none"
        values = {
            "prompt": prompt_text(sample),
            "base_url": base_url,
            "folder": "/workspace" if inside else str(self.folder),
        }
        words = split_command(self.command, values)
        found = shutil.which(words[0])
        if found is None:
            raise AgentFailure(f"the command {words[0]!r} is not installed, or not on the PATH", kind="agent_absent")
        variables = {**_variables(base_url, "/home/agent" if inside else str(self.folder)), **self.variables}
        if inside:
            port = urlsplit(base_url).port or 80
            bridged = None if self.socket is None else (self.socket, port)
            words = bubblewrapped(words, self.folder, readable=(*_beside(found), *self.readable), bridged=bridged)
        self.result = await run_command(words, variables, self.folder)
        told = {"output": self.result.stdout[-4000:], "errors": self.result.stderr[-4000:]}
        sample.metadata["agent"] = {"exit_code": self.result.exit_code, **told}

    async def close(self) -> None:
        await to_thread.run_sync(shutil.rmtree, self.folder, True)


def prompt_text(sample: Sample) -> str:
    """Return the sample's prompt as one text."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n\n".join(content_text(message.get("content")) for message in sample.prompt)


def _variables(base_url: str, home: str) -> dict[str, str]:
    bases = {"OPENAI_BASE_URL": f"{base_url}/v1", "ANTHROPIC_BASE_URL": base_url}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), "agentrl")
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": home, "LANG": "C.UTF-8", **bases, **keys}


def _beside(program: str) -> tuple[str, ...]:
    """Return the folders of a program's files, except system folders. For a program in `node_modules` or in a virtual
    environment, this is the whole folder."""
    folders = {_package(Path(program)), _package(Path(os.path.realpath(program)))}
    return tuple(str(folder) for folder in folders if not str(folder).startswith(("/usr/", "/bin", "/sbin")))


def _package(program: Path) -> Path:
    wholes = (up for up in program.parents if up.name == "node_modules" or (up / "pyvenv.cfg").exists())
    return next(wholes, program.parent)


def command_environment(command: str, sandbox: str, readable: tuple[str, ...]) -> type[CommandEnvironment]:
    """Return the environment class of `--agent`."""
    body: dict[str, Any] = {"command": command, "sandbox": sandbox, "readable": readable, "__module__": __name__}
    return type("Agent", (CommandEnvironment,), body)
