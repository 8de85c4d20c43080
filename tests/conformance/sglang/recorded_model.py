"""The model behind the recordings: 2 layers, 64 wide, 512 ids, random bf16 weights from seed 0.

The same construction gives the same weights and ids here, so recorded log-probs and greedy tokens can be compared.
"""

from pathlib import Path

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|pad|> <tool_call> </tool_call> <tool_response> </tool_response> <think> "
    "</think>"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    "What is 12 plus 30? The answer is 42. ",
    "Solve the equation x + 3 = 7 step by step. ",
)
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_recorded_model(folder: Path, seed: int = 0, *, arch: str = "qwen3", dtype: str = "bfloat16") -> Path:
    """Write the model folder; `arch`: qwen3, qwen2, llama or qwen3_moe (8 experts, 2 a token)."""
    import torch
    import transformers

    _write_tokenizer(folder)
    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
    sizes: dict[str, object] = {} if arch == "qwen2" else {"head_dim": 16}
    if arch == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = getattr(transformers, f"{names[arch]}Config")(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=3,
        tie_word_embeddings=arch != "qwen3_moe",
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{names[arch]}ForCausalLM")(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL.split(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(list(CORPUS) * 20, trainer)
    bpe.add_tokens([f"<extra_{i}>" for i in range(bpe.get_vocab_size(), 512)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
