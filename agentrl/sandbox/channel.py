"""Messages over a socket, without blocking the event loop."""

import socket
from typing import Any

import anyio

from agentrl.sandbox.inside import frames


class ChannelClosed(Exception):
    """The other end hung up, or sent something that is no message."""


class Channel:
    """Our end of a socket on which a jailer listens. Every wait is the caller's to bound."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = frames.Decoder()

    async def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            ChannelClosed: nobody reads any more.
        """
        rest = memoryview(frames.encode(message))
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    async def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            ChannelClosed: there will be none.
        """
        while True:
            try:
                message = self._decoder.next()
                if message is not None:
                    return message
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except (OSError, frames.BadFrame) as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the sandbox's process ended")
            self._decoder.feed(data)

    async def hang_up(self) -> None:
        """Tell the other end to stop, and wait until it has: then nothing of it is left."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while True:
                await self.receive()
        except (ChannelClosed, OSError):
            return
        finally:
            self.close()

    def close(self) -> None:
        """Close our end; the other end stops by itself."""
        self._socket.close()
