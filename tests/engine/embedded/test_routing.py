"""Experts in an answer, against those of a real SGLang and of transformers' own routers."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.embedded.sequence import SequenceState, Wanted
from tests.conformance.sglang.recorded_model import make_recorded_model
from tests.engine.embedded.driver import make_engine, make_job, prompt, run
from tests.engine.embedded.test_server import post
from tests.support.embedded_server import embedded_server

Folder = Callable[..., Path]
RECORDED = [10, 60, 61, 62, 195, 430, 144]
SAID = (
    "AAAAAAUAAAAFAAAAAwAAAAYAAAAFAAAAAwAAAAAAAAAEAAAABwAAAAYAAAAAAAAABgAAAAQAAAAFAAAAAwAAAAQAAAAFAAAAAwAAAAAAAAAFAAAABAAAAAUAAAAG"
    "AAAA"
)
"""The experts that SGLang 0.5.23 returned for RECORDED, a prompt of 4 tokens and 3 sampled ones."""


def own_routing(model: Any, ids: list[int]) -> torch.Tensor:
    """Return [tokens, layers, experts a token], from all router logits of a plain forward pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, -1).indices for layer in logits], 1)


def wanted(ids: list[int], start: int = 0, **changes: Any) -> SequenceState:
    return make_job(ids, want=Wanted(return_routed_experts=True, routed_experts_start_len=start), **changes)


def test_a_cached_prefix_brings_its_rows(folder: Folder, plain_model: Callable[..., Any]) -> None:
    """Read in chunks, batched, extended in place, copied, read again after a retraction."""
    engine, model = make_engine(folder("qwen3_moe"), slots=4), plain_model("qwen3_moe")
    first = wanted(prompt(150))
    run(engine, first, make_job(prompt(70, 5)))
    turn = wanted([*first.prompt, *first.output, *prompt(30, 1)], start=len(first.prompt) + 11)
    siblings = [wanted([*prompt(60), *prompt(9, 7 + n)], seed=n) for n in range(3)]
    run(engine, turn, *siblings)
    again = wanted(prompt(40, 9))
    engine.add(again)
    while len(again.output) < 5:
        engine.step()
    engine.pause("retract")
    engine.resume()
    run(engine)
    assert turn.cached_tokens >= len(first.prompt)
    assert again.retractions == 1
    for job in (first, turn, *siblings, again):
        assert job.routed is not None
        want = own_routing(model, job.prompt + job.output)[job.want.routed_experts_start_len : -1]
        np.testing.assert_array_equal(job.routed, want)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_recorded_model(tmp_path_factory.mktemp("moe"), arch="qwen3_moe")
    with embedded_server(folder, "--dtype", "bfloat16", "--slots", "4") as url:
        yield url


def ask(url: str, **fields: Any) -> Any:
    body = {"input_ids": RECORDED[:-1], "sampling_params": {"max_new_tokens": 1}, "return_routed_experts": True}
    return post(url, "/generate", body | fields).json()


@pytest.mark.slow
def test_the_answer_is_a_real_servers(mixture: str) -> None:
    assert ask(mixture)["meta_info"]["routed_experts"] == SAID
    later = ask(mixture, routed_experts_start_len=4)["meta_info"]["routed_experts"]
    assert base64.b64decode(later) == base64.b64decode(SAID)[4 * 16 :]
    assert "routed_experts" not in ask(mixture, return_routed_experts=False)["meta_info"]
    assert ask(mixture, input_ids=[RECORDED[:4]], routed_experts_start_len=9)["error"]["message"] == (
        "recv_req.routed_experts_start_len=9 is higher than the number of input tokens len(req.origin_input_ids)=4. "
        "Please use a smaller routed_experts_start_len."
    )


def test_a_dense_model_has_none_and_says_nothing(server: str) -> None:
    assert "routed_experts" not in ask(server)["meta_info"]
