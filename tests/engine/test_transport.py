"""One HTTP exchange: the exceptions that it raises."""

import pytest

from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionRefused, HttpTransport, Reply
from tests.engine.faults import ok, serving


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/x", "http://[::1/x", "nonsense", "http:///x", f"http://{'a' * 70}.b/x"]
)
async def test_an_address_that_is_none_is_a_refused_connection(url: str) -> None:
    async with HttpTransport(EngineSettings()) as transport:
        with pytest.raises(ConnectionRefused, match="cannot connect to the engine at"):
            await transport.exchange("GET", url)


async def test_an_error_of_the_sink_is_not_blamed_on_the_engine() -> None:
    def sink(part: Reply) -> None:
        raise ValueError("the sink's own")

    async with serving(ok([5])) as server, HttpTransport(EngineSettings()) as transport:
        with pytest.raises(ValueError, match="the sink's own"):
            await transport.exchange("POST", f"{server.url}/generate", b'{"input_ids": [1]}', sink=sink)


async def test_an_answer_is_asked_for_without_compression() -> None:
    async with serving(ok([5])) as server, HttpTransport(EngineSettings()) as transport:
        await transport.exchange("POST", f"{server.url}/generate", b'{"input_ids": [1]}', {"x-own": "1"})
    assert server.headers[0]["Accept-Encoding"] == "identity"
