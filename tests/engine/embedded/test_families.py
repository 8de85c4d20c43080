"""Further model families: tiny models against transformers' own forward pass.

Each gets prompts in several chunks, continues a cached prefix and a copied prefix, and runs again after
its weights are replaced.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.engine.embedded.cpu_model import CpuModel
from agentrl.engine.embedded.model import context_length, load_model
from agentrl.engine.embedded.weights import WeightUpdater
from agentrl.errors import AgentRLError
from tests.engine.embedded.driver import make_engine, make_job, prompt, reference_log_probs, run
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model

WINDOW = {"sliding_window": 24}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mistral": ("mistral", WINDOW),
    "qwen2, windows from its second layer on": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma3_text": ("gemma3_text", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "minimax_m2": ("minimax_m2", {}),
    "deepseek_v3 without latent queries": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 32}),
}


STATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe")
OTHER_FORMS = ("gemma3_text", "glm", "glm4", "deepseek_v3", "minimax_m2")
"""RoPE of neighbouring pairs, norms after attention, latent attention: transformers' own code runs these."""


@pytest.mark.parametrize("case", nightly(CASES, 2))
def test_log_probs_are_those_of_a_plain_forward(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    arch, changes = CASES[case]
    folders = [make_tiny_model(tmp_path / f"{seed}", arch, seed, **changes) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval() for folder in folders]
    engine = make_engine(folders[0])
    assert isinstance(engine.forward, CpuModel) == (arch not in OTHER_FORMS)
    first = [make_job(prompt(n, n), seed=n) for n in (1, 20, 100, 101)]
    run(engine, *first)
    after = [make_job(job.prompt + job.output + prompt(9, 9), seed=8) for job in first]
    siblings = [make_job(first[2].prompt[:90], seed=i, want=first[2].want) for i in range(3)]
    run(engine, *after, *siblings)
    assert [job.cached_tokens for job in after] == [12, 31, 111, 112]
    assert [job.cached_tokens for job in siblings] == [89] * 3
    weights = WeightUpdater(engine.model)
    weights.write(engine, weights.read_folder(str(folders[1])), "new")
    updated = make_job(first[2].prompt)
    run(engine, updated)
    assert updated.cached_tokens == 0
    for model, jobs in zip(models, ([*first, *after, *siblings], [updated]), strict=True):
        for job in jobs:
            assert job.log_probs == pytest.approx(reference_log_probs(model, job), abs=1e-5)


@pytest.mark.parametrize("arch", nightly(STATES, 1))
def test_states_are_those_of_a_plain_forward(arch: Any, tmp_path: Path) -> None:
    """Prompts in chunks, a conversation that continues in its slot or a copy, and one that departs from it, and so
    starts anew. The same after new weights, and after a retraction."""
    from transformers import AutoModelForCausalLM

    folders = [make_tiny_model(tmp_path / f"{seed}", arch, seed) for seed in (0, 1)]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval() for folder in folders]
    engine = make_engine(folders[0])
    first = [make_job(prompt(n, n), seed=n) for n in (1, 2, 20, 100, 101)]
    run(engine, *first)
    after = [make_job(job.prompt + job.output + prompt(9, 9), seed=8) for job in (*first, first[3])]
    other = [make_job(first[3].prompt[:90], seed=i) for i in range(3)]
    run(engine, *after, *other)
    assert [job.cached_tokens for job in after] == [12, 13, 31, 111, 112, 111]
    assert [job.cached_tokens for job in other] == [0] * 3
    back = make_job(prompt(70, 7))
    engine.add(back)
    while len(back.output) < 5:
        engine.step()
    engine.pause("retract")
    engine.resume()
    run(engine)
    weights = WeightUpdater(engine.model)
    weights.write(engine, weights.read_folder(str(folders[1])), "new")
    updated = make_job(first[3].prompt + first[3].output)
    run(engine, updated)
    assert updated.cached_tokens == 0
    for model, jobs in zip(models, ([*first, *after, *other, back], [updated]), strict=True):
        for job in jobs:
            assert job.log_probs == pytest.approx(reference_log_probs(model, job), abs=1e-5)


@pytest.mark.parametrize("arch", ["lfm2_moe", "minimax_m2", "qwen3_5_moe_text"])
def test_weights_are_written_under_the_names_of_the_folder(arch: Any, tmp_path: Path) -> None:
    folders = [make_tiny_model(tmp_path / f"{seed}", arch, seed, tie_word_embeddings=False) for seed in (0, 1)]
    engines = [make_engine(folder) for folder in folders]
    weights, wanted = (WeightUpdater(engine.model) for engine in engines)
    within = "model.language_model." if arch == "qwen3_5_moe_text" else "model."  # with a vision part
    tensors = load_file(folders[1] / "model.safetensors").items()
    weights.write(engines[0], [(name.replace("model.", within, 1), tensor) for name, tensor in tensors], "new")
    assert weights.checksums(engines[0]) == wanted.checksums(engines[1])


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("gemma2", {}, "softcap"),
        ("gpt_oss", {}, "s_aux"),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2},
            "linear_attention",
        ),
    ],
)
def test_other_attention_is_refused_by_name(arch: Any, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", arch, **changes)
    with pytest.raises(AgentRLError, match=named):
        load_model(str(folder), dtype="float32", device="cpu", trust_remote_code=False)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    folder, jobs = make_tiny_model(tmp_path / "m", "deepseek_v3"), [make_job(prompt(30)) for _ in range(2)]
    run(make_engine(folder), jobs[0])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}})
    )
    run(make_engine(folder), jobs[1])
    assert jobs[1].log_probs == jobs[0].log_probs


def test_a_rope_that_changes_with_the_length_is_served_until_it_does() -> None:
    config = {
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512},
    }
    assert context_length(config, None) == context_length(config, 512) == 512
    with pytest.raises(AgentRLError, match="more than the model's original_max_position_embeddings 512"):
        context_length(config, 513)
