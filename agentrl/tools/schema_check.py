"""Checks a tool's arguments by a JSON schema from outside, in a process that ends if a check takes too long."""

import json
import signal
import sys
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from agentrl.errors import PluginError

SECONDS: Final = 0.5  # CPU time for one check
_PATIENCE, _GRACE = 60.0, 5.0
_MAX_BYTES = 1 << 18  # five problems of 2,000 characters, each as an escape of up to 12 bytes
_NO_ANSWER = (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.BrokenResourceError, TimeoutError)
_WORKER = Path(__file__).with_name("schema_worker.py")


class SchemaCheck:
    """The process that checks arguments. It is started at the first check, and again after its end."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = anyio.Lock()

    async def problems(self, schema: str, arguments: Any) -> list[tuple[str, str]]:
        """Return the mistakes in `arguments`, each with its JSON path. Raises PluginError: the schema is invalid, takes
        longer than `SECONDS`, or nests without end."""
        try:
            line = json.dumps([schema, arguments]).encode() + b"\n"
        except RecursionError:
            raise PluginError("the arguments nest too deeply") from None
        async with self._lock:
            try:
                with anyio.fail_after(_PATIENCE):
                    found = json.loads(await self._exchange(line))
            except _NO_ANSWER as error:
                if (status := await self.close(_GRACE)) in (-signal.SIGPROF, None):
                    raise PluginError(f"a check by it takes longer than {SECONDS:g} s of computing") from error
                raise PluginError(f"the process that checks arguments ended with status {status}") from error
            except BaseException:  # cancelled: a later request must not get the pending answer
                await self.close()
                raise
        if isinstance(found, str):
            raise PluginError(found)
        return [(path, message) for path, message in found]

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None:
            self._process = await anyio.open_process([sys.executable, "-P", str(_WORKER), str(SECONDS)], stderr=None)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        await self._process.stdin.send(line)
        return await BufferedByteReceiveStream(self._process.stdout).receive_until(b"\n", _MAX_BYTES)

    async def close(self, grace: float = 0.0) -> int | None:
        """End the process; returns its exit status if it ended by itself within `grace` seconds."""
        process, self._process = self._process, None
        if process is None:
            return None
        with anyio.CancelScope(shield=True):
            status = None
            with anyio.move_on_after(grace):
                status = await process.wait()
            if status is None:
                process.kill()
            await process.aclose()
        return status
