"""`agentrl gateway`: the context length that it allows sessions."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import run
from agentrl.engine.pool import EnginePool
from agentrl.gateway.server import Gateway
from tests.support.tiny_models import make_tiny_model

ENGINES = ("http://127.0.0.1:9", "http://127.0.0.1:10")


class Opened(Exception):
    """Raised where the command would begin to serve."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("model"))
    make_tiny_model(folder)
    return folder


def context_of(patch: pytest.MonkeyPatch, folder: Path | str, lengths: list[int | None], *flags: str) -> int:
    """Return the context length of the gateway if the engines report these lengths."""
    opened: list[int] = []

    async def model_info(self: EnginePool) -> dict[str, Any]:
        return {"model_path": str(folder)}

    async def server_info(self: EnginePool) -> dict[str, dict[str, Any]]:
        return {url: {"context_length": length} for url, length in zip(ENGINES, lengths, strict=True)}

    def note(self: Gateway, *given: object, context_length: int, **options: object) -> None:
        opened.append(context_length)
        raise Opened

    patch.setattr(EnginePool, "check_present", model_info)
    patch.setattr(EnginePool, "server_info", server_info)
    patch.setattr(Gateway, "__init__", note)
    with pytest.raises(Opened):
        run(["gateway", *ENGINES, "--port", "0", "--owner-port", "0", *flags])
    return opened[0]


@pytest.mark.parametrize(
    ("lengths", "flags", "context"),
    [
        ([None, None], (), 2048),
        ([None, 100], (), 100),
        ([300, 100], (), 100),
        ([None, None], ("--context-length", "77"), 77),
    ],
)
def test_the_context_is_the_engines_or_the_models(
    model: Path, lengths: list[int | None], flags: tuple[str, ...], context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert context_of(monkeypatch, model, lengths, *flags) == context


def test_a_context_that_nobody_knows_has_to_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pytest.fail.Exception):
        context_of(monkeypatch, tmp_path, [None, None])
    assert "neither the engines nor the model say a context length; give --context-length" in capsys.readouterr().err
