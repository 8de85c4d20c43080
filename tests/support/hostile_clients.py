"""Hostile clients of a server: `python -m tests.support.hostile_clients HOST PORT` attacks until it is killed.

64 connections at once, each with one of `attacks()`. After an answer or a disconnect the attack is repeated.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import repeat
from typing import Any

CONNECTIONS = 64
MEGABYTE = 1 << 20


def request(path: str, body: Any, *, host: str = "127.0.0.1", head: str = "", kind: str = "application/json") -> bytes:
    """Return a whole POST; `body` is sent as JSON, or unchanged if it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(raw)}\r\n{head}\r\n"
    return lines.encode() + raw


def chunked(content: bytes, total: int) -> Iterator[bytes]:
    """Return a body of `total` bytes without a stated length."""
    yield request("/generate", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunk = (content * (MEGABYTE // len(content) + 1))[:MEGABYTE]
    yield from repeat(b"%x\r\n%s\r\n" % (len(chunk), chunk), total // MEGABYTE)
    yield b"0\r\n\r\n"


GOOD = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
DEAD = {"master_address": "203.0.113.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
SLOW = r"(?:(?:.|.)*(?:.|.)*)*(?!.|\n|$)"
"""A pattern that takes forever to fail."""


@cache
def attacks() -> dict[str, bytes]:
    """Return what each attack sends, by name; "large" sends 400 MB."""
    return {
        "n": request("/generate", {"text": "a", "sampling_params": {"n": 10**9}}),
        "n of a chat": request("/v1/chat/completions", {**CHAT, "n": 10**9}),
        "batch": request("/generate", {"text": ["a"] * 100_000}),
        "batch times n": request("/generate", {"text": ["a"] * 4_000, "sampling_params": {"n": 2_000}}),
        "log-probs": request("/generate", {**GOOD, "return_logprob": True, "top_logprobs_num": 10**9}),
        "deep": request("/generate", b"[" * 100_000),
        "deep enough": request("/generate", b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}"),
        "brackets": request("/generate", b"[" + b"[]," * 5_000_000 + b"1]"),
        "keys": request("/generate", {str(i): 1 for i in range(1_000_000)}),
        "numbers": request("/generate", {"input_ids": [1] * 5_000_000}),
        "text": request("/generate", {"text": "ab " * 2_000_000}),
        "type": request("/generate", GOOD, kind="text/plain; a=json"),
        "wrong": request("/generate", {"input_ids": {"a": [[]]}, "sampling_params": [7]}),
        "host": request("/generate", GOOD, host="evil.example"),
        "origin": request("/abort_request", {"abort_all": True}, head="Origin: http://evil.example\r\n"),
        "regex": request("/generate", {**GOOD, "sampling_params": {"stop_regex": SLOW, "max_new_tokens": 64}}),
        "weights": request("/init_weights_update_group", DEAD),
        "half a body": request("/generate", {"text": "a" * 2_000_000})[:MEGABYTE],
        "half a head": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        "large": b"",
    }


async def attack(address: tuple[str, int], name: str) -> None:
    """Repeat one attack forever."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError:
            return
        answer = asyncio.ensure_future(reader.readline())
        try:
            for part in [attacks()[name]] if attacks()[name] else chunked(b"[1,2,3,4,5,6,7,8],", 400 * MEGABYTE):
                writer.write(part)
                await writer.drain()
                if answer.done():
                    break
            status = (await answer).decode()[9:12]
        except OSError:
            status = "cut"
        finally:
            answer.cancel()
            writer.close()
        sys.stdout.write(f"{name}: {status or 'cut'}\n")
        sys.stdout.flush()


async def main(host: str, port: int) -> None:
    async with asyncio.TaskGroup() as group:
        for i in range(CONNECTIONS):
            group.create_task(attack((host, port), list(attacks())[i % len(attacks())]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
