"""Tiny models: the folder loads, is reproducible, and tokenizes as the module says."""

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from agentrl import tiny
from agentrl.errors import SettingsError
from tests.support.nightly import nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.create(path, seed=3)
    return path


@pytest.mark.parametrize("arch", nightly(get_args(tiny.Arch), 4))
def test_folder_loads_and_runs(tmp_path: Path, arch: tiny.Arch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = tiny.create(tmp_path, arch=arch, layers=2, hidden=32, seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == made.num_parameters()
    assert len(tokenizer) <= model.config.vocab_size == made.config.vocab_size
    ids = torch.tensor([tokenizer.encode("What is 12*34?")])
    assert torch.isfinite(model(ids).logits).all()
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_same_seed_same_files_other_seed_other_weights(tmp_path: Path, folder: Path) -> None:
    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    tiny.create(tmp_path / "a", seed=3)
    tiny.create(tmp_path / "b", seed=4)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert digest(tmp_path / "a" / name) == digest(folder / name)
    assert digest(tmp_path / "b" / "model.safetensors") != digest(folder / "model.safetensors")


def test_digits_operators_and_markup_are_single_tokens(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("7*13-(2+9)", "<tool_call>", "<answer>42</answer>", "<|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("7*13-(2+9)")) == 10
    assert len(tokenizer.encode("<answer>42</answer>")) == 4
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]
    text = "Grüße, 世界!\n\tx"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_template_renders_hermes_calls_and_merges_tool_results(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    one = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    results = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert text == (
        f"<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n{one}\n{one}<|im_end|>\n"
        f"<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"arch": "mamba"}, "expected one of qwen3"),
        ({"hidden": 30}, "even multiple"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"vocab_size": 100}, "at least"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        tiny.create(tmp_path, **sizes)


def test_the_padding_token_can_have_an_embedding_like_the_others(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows = {}
    for drawn in (False, True):
        tiny.create(tmp_path / str(drawn), seed=3, draw_pad_row=drawn)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(drawn))
        pad, rows[drawn] = model.config.pad_token_id, model.get_input_embeddings().weight
    assert 0.5 < rows[True][pad].norm() / rows[True].norm(dim=1).median() < 2
    rest = [at for at in range(len(rows[True])) if at != pad]
    assert rows[True][rest].equal(rows[False][rest]), "nothing else changes"
