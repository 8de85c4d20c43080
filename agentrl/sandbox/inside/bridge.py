"""Starts a command in a sandbox, and forwards its connections to 127.0.0.1:PORT to a Unix socket.

    python -I -S bridge.py SOCKET PORT COMMAND ...

It uses only the standard library, and exits with the command's status."""

import contextlib
import socket
import subprocess
import sys
import threading


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends, then close the target for writing."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def forward(client: socket.socket, path: str) -> None:
    """Connect a client with the socket until both sides have ended."""
    with client, socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        back = threading.Thread(target=copy, args=(server, client), daemon=True)
        back.start()
        copy(client, server)
        back.join()


def listen(port: int, path: str) -> None:
    """Forward connections to the port, each in two threads of its own."""
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it: no event waits 40 ms

    def accept() -> None:
        while True:
            threading.Thread(target=forward, args=(listener.accept()[0], path), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main(path: str, port: str, *command: str) -> int:
    listen(int(port), path)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
