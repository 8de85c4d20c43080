"""Adapters in the built-in engine: loaded alone, requested by name, and equal to merged weights."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Sink
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineFailure
from agentrl.lora import LoraShape, write_adapter
from tests.engine.conftest import OwnTransport
from tests.engine.faults import FAST, PARAMS, FaultyServer, ok, serving, status

SETTINGS = EngineSettings(embedded_slots=4, engine_max_retries=0)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
SHAPE = LoraShape(2, 4.0, ("q_proj", "down_proj"))


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Make an adapter, and a folder of the model with it merged into its weights."""
    torch.manual_seed(5)
    model, tensors = AutoModelForCausalLM.from_pretrained(tiny_model), dict[str, torch.Tensor]()
    for name, layer in SHAPE.layers(model).items():
        a, b = torch.randn(2, layer.in_features), 0.2 * torch.randn(layer.out_features, 2)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        layer.weight.data += 2.0 * b @ a
    model.save_pretrained(tmp_path / "merged")
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", tensors, SHAPE, tiny_model)
    return tmp_path / "adapter", tmp_path / "merged"


async def post(transport: OwnTransport, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    asked = transport.exchange("POST", transport.url + path, orjson.dumps(body), transport.control_headers)
    status, answer, *_ = await asked
    return status, orjson.loads(answer)


async def test_an_adapter_alone_gives_what_merged_weights_give(
    transport: OwnTransport, tiny_model: Path, adapter: tuple[Path, Path]
) -> None:
    pool = EnginePool([transport.url], SETTINGS, vocab_size=512, transport=transport)
    prompt, folder, merged = list(range(10, 40)), *map(str, adapter)
    plain = await pool.generate(prompt, GREEDY)
    await pool.receive(DiskUpdate(folder, "one"), "1")
    adapted = await pool.generate(prompt, GREEDY)
    assert adapted.ids != plain.ids
    assert {v for v, _, _ in adapted.weight_versions} == {"1"}

    status, answer = await post(transport, "/generate", {"input_ids": prompt})
    assert status == 400
    assert "has the adapter 'one'" in answer["error"]["message"]
    await pool.receive(DiskUpdate(folder, "two"), "2")
    assert (await pool.generate(prompt, GREEDY)).log_probs == adapted.log_probs
    assert (await post(transport, "/unload_lora_adapter", {"lora_name": "two"}))[0] == 200
    status, answer = await post(transport, "/generate", {"input_ids": prompt, "lora_path": "two"})
    assert status == 400
    assert "none is loaded" in answer["error"]["message"]

    await pool.receive(DiskUpdate(merged), "3")
    other = await pool.generate(prompt, GREEDY)
    assert other.ids == adapted.ids
    torch.testing.assert_close(other.log_probs, adapted.log_probs, rtol=0, atol=1e-5)


async def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_is(
    transport: OwnTransport, tiny_model: Path, tmp_path: Path
) -> None:
    pool = EnginePool([transport.url], SETTINGS, vocab_size=512, transport=transport)
    before = await pool.generate([1, 2, 3], GREEDY)
    write_adapter(
        tmp_path,
        {"x.q_proj.lora_A.weight": torch.ones(2, 3), "x.q_proj.lora_B.weight": torch.ones(3, 2)},
        SHAPE,
        tmp_path,
    )
    with pytest.raises(EngineFailure, match="down_proj|0 of its 1 pairs fit"):
        await pool.receive(DiskUpdate(str(tmp_path), "bad"), "1")
    with pytest.raises(EngineFailure, match="adapter_config.json"):
        await pool.receive(DiskUpdate(str(tmp_path / "nowhere"), "bad"), "1")
    assert (await pool.generate([1, 2, 3], GREEDY)).log_probs == before.log_probs


async def test_an_engine_that_was_started_again_gets_its_adapter_back(tmp_path: Path) -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        for version in ("1", "2"):
            await pool.receive(DiskUpdate(str(tmp_path), version), version)
        assert server.adapters == ["2"]
        server.adapters.clear()
        server.version = "default"
        await pool._registry.regain(pool.members[0])
        assert (server.adapters, server.version) == (["2"], "2")


@pytest.mark.parametrize("sink", [None, lambda _: None], ids=["whole", "streamed"])
@pytest.mark.parametrize("noticed", [False, True])
async def test_a_request_that_reaches_a_restarted_engine_first_gets_its_adapter_loaded(
    noticed: bool, sink: Sink, tmp_path: Path
) -> None:
    async def adapted(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if (name := body["lora_path"]) not in server.adapters:
            return await status(400, f"LoRA adapters are not loaded: {name}".encode())(server, body, request)
        return await ok([5])(server, body, request)

    settings = FAST.model_copy(update={"engine_max_retries": 1, "engine_absence_timeout": 120.0})
    async with serving(adapted) as server, EnginePool([server.url], settings, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path), "7-ab"), "7")
        server.adapters.clear()
        server.version = "default"
        if noticed:
            pool._registry.lost(pool.members[0])
        assert (await pool.generate([1], PARAMS, sink=sink)).weight_version == "7"
        server.adapters.clear()
        server.version = "default"
        assert (await pool.relay("/generate", {"input_ids": [1]})).status == 200
        assert server.adapters == ["7-ab"]


async def test_an_adapter_is_loaded_again_if_the_answer_was_lost(tmp_path: Path) -> None:
    async with serving(ok([5])) as server, EnginePool([server.url], FAST, vocab_size=512) as pool:
        await pool.receive(DiskUpdate(str(tmp_path), "1"), "1")
        server.loses_answer = True
        with pytest.raises(EngineFailure, match="lost the connection"):
            await pool.members[0].load_folder(DiskUpdate(str(tmp_path), "2"), "2")
        assert server.adapters == ["1", "2"]
        await pool.members[0].load_folder(DiskUpdate(str(tmp_path), "2"), "2")
        assert (server.adapters, server.version) == (["2"], "2")
