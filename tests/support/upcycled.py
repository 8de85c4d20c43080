"""A mixture of experts that computes what a dense model does: its experts start as copies of the dense layers.

Sparse upcycling (arXiv:2212.05055): with weights that add up to 1 the experts together give what one of them would, so what
the dense model has learned is kept, and from the first step on each expert learns from tokens of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch


def upcycled(dense: Path, folder: Path, experts: int = 4, seed: int = 0) -> Path:
    """Write the Qwen3 model in `dense` as one of `model_type` qwen3_moe, 2 of `experts` a token, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    source = AutoModelForCausalLM.from_pretrained(dense)
    config = {
        name: value for name, value in source.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    router = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    mixture = Qwen3MoeConfig(**config, **router, moe_intermediate_size=source.config.intermediate_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(mixture)
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for layer, old in zip(model.model.layers, source.model.layers, strict=True):
            joined = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
            layer.mlp.experts.gate_up_proj.copy_(joined.expand(experts, -1, -1))
            layer.mlp.experts.down_proj.copy_(old.mlp.down_proj.weight.expand(experts, -1, -1))
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.1)
    model.generation_config = source.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return folder
