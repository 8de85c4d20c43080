"""`openenv:URL` against a server of the pinned package: rewards and texts equal those of the package's own client."""

import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from agentrl import Sample
from agentrl.chat import Chat
from agentrl.envs import Environment, Turn, load_environment
from agentrl.errors import EnvFailure, PluginError
from agentrl.run.training import free_port
from tests.adapters.played import play

SERVER = Path(__file__).parent / "openenv_server.py"
Server = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server and return its address."""
    pytest.importorskip("openenv.core")
    with ExitStack() as stack:

        def start(game: str, places: int = 64) -> str:
            port = free_port()
            process = subprocess.Popen([sys.executable, str(SERVER), str(port), game, str(places)])
            stack.callback(process.wait)
            stack.callback(process.terminate)
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while True:
                try:
                    httpx.get(f"{url}/schema", trust_env=False)
                    return url
                except httpx.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.05)

        yield start


@pytest.fixture(scope="module")
def guess(server: Server) -> str:
    return server("guess")


async def loaded(url: str) -> type[Environment]:
    kind = load_environment(f"openenv:{url}")
    await kind.setup(None)
    return kind


def guesses(group: int) -> list[int]:
    """Guess by halving the interval around that group's secret; some groups give up early."""
    made: list[int] = []
    secret, low, high = random.Random(group).randrange(100), 0, 99
    while not made or made[-1] != secret:
        made.append((low + high) // 2)
        low, high = (made[-1] + 1, high) if made[-1] < secret else (low, made[-1] - 1)
    return made if group % 3 else [0] * 32


async def theirs(url: str, group: int, actions: list[dict[str, Any]]) -> tuple[list[str], float]:
    """Return the observations and rewards of the library's own client."""
    from openenv.core import GenericEnvClient

    async with GenericEnvClient(base_url=url) as client:
        result = await client.reset(seed=group)
        seen, total = [result.observation["text"]], 0.0
        for action in actions:
            result = await client.step(action)
            seen.append(result.observation["text"])
            total += result.reward or 0.0
            if result.done:
                break
    return seen, total


@pytest.mark.slow
async def test_200_episodes_have_the_texts_and_rewards_of_the_librarys_client(chat: Chat, guess: str) -> None:
    kind, rewards = await loaded(guess), set()
    for group in range(200):
        actions = [{"number": number} for number in guesses(group)]
        answers = [f"I try ```{json.dumps(action)}```" for action in actions]
        sample, said = await play(chat, kind, group, answers)
        seen, total = await theirs(guess, group, actions)
        assert [said[0].rsplit("\n\n")[-1], *said[1:]] == seen
        assert sample.reward == total
        if sample.stop_reason == "done":
            assert sample.metadata["openenv_state"] == {"episode_id": None, "step_count": len(seen) - 1}
        rewards.add(sample.reward)
    assert min(rewards) == 0.0
    assert max(rewards) > 1.0


@pytest.mark.slow
async def test_invalid_actions_a_text_as_the_action_and_a_broken_game(chat: Chat, server: Server, guess: str) -> None:
    kind = await loaded(guess)
    sample, said = await play(
        chat, kind, 1, ["seven", '{"number": "many"}', '{"number": 1, "at": 2}', '{"number": 17}']
    )
    assert '"number"' in said[0]
    assert "metadata" not in said[0]
    assert said[1].startswith("The answer has no JSON object. Answer with one JSON object")
    assert said[2].startswith("The action is invalid: number: Input should be a valid integer")
    assert said[3].startswith("The action is invalid: at: Extra inputs are not permitted. Answer")
    assert sample.reward == 1.0
    with pytest.raises(EnvFailure, match="answered step with EXECUTION_ERROR: the game is broken"):
        await play(chat, kind, 1, ['{"number": -1}'])
    sample, said = await play(chat, await loaded(server("echo")), 1, ['{"a": 1}'])
    assert "Your whole answer is the action's message." in said[0]
    assert (sample.reward, said[1]) == (8.0, "heard '{\"a\": 1}'")


@pytest.mark.slow
async def test_a_session_is_free_again_after_close_and_after_a_cancel(chat: Chat, server: Server) -> None:
    kind = await loaded(server("guess", 1))
    for group in range(20):
        env = kind()
        await env.reset(Sample(group_index=group))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await env.step(Turn(1, "", '{"number": 3}'))
        await env.close()
    await (one := kind()).reset(Sample(group_index=0))
    with pytest.raises(EnvFailure, match="CAPACITY_REACHED.*; --rollout-max-concurrency limits the sessions"):
        await kind().reset(Sample(group_index=0))
    await one.close()


Answers = Callable[[ServerConnection], Any]


@pytest.fixture
async def fake() -> AsyncIterator[Callable[[Answers], Any]]:
    """Start a WebSocket server with given answers, for cases that a real server rarely produces."""
    servers = []

    async def start(answers: Answers) -> type[Environment]:
        servers.append(one := await serve(answers, "127.0.0.1", 0))
        return load_environment(f"openenv:http://127.0.0.1:{next(iter(one.sockets)).getsockname()[1]}")

    yield start
    for one in servers:
        one.close()
        await one.wait_closed()


async def test_what_is_late_lost_or_not_openenv_is_a_failure_of_the_environment(fake: Callable[[Answers], Any]) -> None:
    async def silent(socket: ServerConnection) -> None:
        async for message in socket:
            if "close" in str(message):
                return

    async def leaves(socket: ServerConnection) -> None:
        await socket.recv()

    async def other(socket: ServerConnection) -> None:
        await socket.send('{"hello": 1}')
        await silent(socket)

    for answers, message in ((silent, "reset: no answer in 0.05 s"), (leaves, "Closed"), (other, "KeyError")):
        env = (await fake(answers))(timeout=0.05 if answers is silent else 60.0)
        with pytest.raises(EnvFailure, match=message) as failed:
            await env.reset(Sample(group_index=1))
        assert failed.value.kind == "openenv_connection"
        await env.close()


async def test_an_address_without_a_server() -> None:
    with pytest.raises(PluginError, match="expected the address of an OpenEnv server"):
        load_environment("openenv:somewhere")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(PluginError, match=f"{url}/schema gave no schema of an OpenEnv server: ConnectError"):
        await loaded(url)
