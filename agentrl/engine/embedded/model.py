"""Loading a Hugging Face folder: the model with our attention, and a light tokenizer.

1. `load_model` returns a transformers causal language model in eval mode on one device, with `attention.ATTENTION`, and
   with its vision tower if it sees images.
2. `Vocabulary` reads `tokenizer.json` with the `tokenizers` library (no transformers import). A folder without this
   file is served with ids only: `decode` returns "", and text prompts are refused.
3. Code from the model folder runs only with `trust_remote_code`."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl import modelfolder
from agentrl.engine.embedded import attention
from agentrl.errors import AgentRLError
from agentrl.modelfolder import text_config
from agentrl.serving.http import refused

MEMORY_SHARE = 0.3  # share of the device's memory that KV slots may take if `--slots` is not given
MAX_SLOTS = 64
LIKE = {"kimi_k2": "deepseek_v3"}  # the layers are the same, but transformers knows only the second name


class Vocabulary:
    """Ids and text of one model folder."""

    def __init__(self, path: str, config: dict[str, Any]) -> None:
        self.path, self.size = path, int(config["vocab_size"])
        self.tokenizer: Any = None  # of the library `tokenizers`; None for a folder without tokenizer.json
        if (file := Path(path, "tokenizer.json")).is_file():
            from tokenizers import Tokenizer

            with named(f"{file}: no tokenizer that can be used"):
                self.tokenizer = Tokenizer.from_file(str(file))
        ends = [config.get("eos_token_id"), _read_json(Path(path, "generation_config.json")).get("eos_token_id")]
        token = _read_json(Path(path, "tokenizer_config.json")).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token and self.tokenizer is not None:
            ends.append(self.tokenizer.token_to_id(token))
        known = (end if isinstance(end, list) else [end] for end in ends if end is not None)
        self.eos = frozenset(int(token) for tokens in known for token in tokens)

    def encode(self, text: str, most: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids. Raises RequestError: the folder has no tokenizer, or the ids are far over `most`."""
        if self.tokenizer is None:
            raise refused("this model folder has no tokenizer.json: send input_ids instead of text.")
        size = 16 * most
        while size < len(text):
            if len(self._encode(text[:size], add_special_tokens)) > 2 * most:
                raise refused(f"a text of {len(text)} characters has more than {most} tokens: shorten it.")
            size *= 2
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, special: bool) -> list[int]:
        # Encoding a batch of one lets other threads run meanwhile.
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def read_config(path: str) -> dict[str, Any]:
    """Return the folder's `config.json`, with the text settings of a composite config at the top level."""
    return text_config(modelfolder.read_config(Path(path)))


def context_length(config: dict[str, Any], asked: int | None) -> int:
    """Return `asked`, or the model's own length. LongRoPE changes its frequencies beyond the original length, but
    cached tokens and other sequences of a batch would keep the old frequencies. So a model with LongRoPE is served up
    to its original length. Raises AgentRLError: `asked` is more than the model's length."""
    name = "max_position_embeddings"
    longest = int(config.get(name) or 2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    first = rope.get(f"original_{name}") or config.get(f"original_{name}")
    if first and rope.get("rope_type", rope.get("type")) == "longrope":
        name, longest = f"original_{name}", int(first)
    if asked is not None and asked > longest:
        raise AgentRLError(f"--context-length {asked} is more than the model's {name} {longest}.")
    return asked or longest


def load_model(path: str, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Load a model for serving. Raises AgentRLError: weights are missing, or the model's attention is not served."""
    if any(Path(path).glob("*.safetensors*")):
        modelfolder.check_weights(Path(path))
    config = _config_of(path, trust_remote_code=trust_remote_code)
    options = {"config": config, "dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    with named(f"{path}: no weights could be loaded from here"):
        model, found = model_class(config).from_pretrained(path, **options, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise AgentRLError(f"{path}: its weights lack {missing[0]} and {len(missing) - 1} more; fetch them again")
    made = for_serving(model.to(device))
    attention.layers_of(made)
    return made


def check_served(path: str, length: int | None) -> None:
    """Check, without weights, layers and context length. Raises AgentRLError: as `load_model`, `context_length`."""
    config = _config_of(path, trust_remote_code=False)
    context_length(read_config(path), length)
    with named(f"{path}: its config.json cannot be used"), torch.device("meta"):
        model = model_class(config).from_config(config)
    try:
        attention.layers_of(for_serving(model))
    except (NotImplementedError, RuntimeError):
        return  # a layer does not run on meta tensors; the engine checks it at start
    except (AttributeError, TypeError, KeyError) as error:
        raise AgentRLError(f"{path}: the embedded engine cannot serve {type(model).__name__}: {error}") from error


def model_class(config: Any) -> Any:
    """Return transformers' auto class for a model. If the model sees images, this class loads its vision tower too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in modelfolder.VISION_MODEL_TYPES else AutoModelForCausalLM


def _config_of(path: str, *, trust_remote_code: bool) -> Any:
    """Return transformers' config of a folder. Raises AgentRLError: the config cannot be used."""
    from transformers import AutoConfig

    with named(f"{path}: its config.json cannot be used"):
        stored = modelfolder.read_config(Path(path))
        if (like := LIKE.get(stored.get("model_type", ""))) is not None and not trust_remote_code:
            own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map")}
            return AutoConfig.for_model(like, **own)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def for_serving(model: Any) -> Any:
    """Return `model` with our attention, in eval mode and without gradients."""
    attention.attach(model)
    return model.eval().requires_grad_(False)


def slots_that_fit(model: Any, length: int) -> int:
    """Return how many slots of `length` tokens fit into `MEMORY_SHARE` of the device's memory, 1 to `MAX_SLOTS`."""
    if model.device.type == "cuda":
        memory = torch.cuda.mem_get_info(model.device)[0]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    each = sum(layer.bytes(length, model.dtype) for layer in attention.layers_of(model))
    return max(1, min(MAX_SLOTS, int(memory * MEMORY_SHARE / each)))


def _read_json(file: Path) -> dict[str, Any]:
    return modelfolder.read_json(file) if file.is_file() else {}


@contextmanager
def named(trouble: str) -> Iterator[None]:
    """Convert any exception inside the context to an AgentRLError that begins with `trouble`."""
    try:
        yield
    except Exception as error:
        raise AgentRLError(f"{trouble}: {type(error).__name__}: {error}") from error


_EXPERTS = re.compile(r".*\blayers\.(\d+)\..*\bexperts")
Rows = NDArray[np.int16]


class Routing:
    """Chosen experts of `slots` sequences of up to `length` tokens: int16 [tokens, layers, experts per token] each."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        self._shape = (slots, length, model.config.get_text_config().num_hidden_layers)
        self._rows: Rows | None = None
        self._passed: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            if (found := _EXPERTS.fullmatch(name)) and not isinstance(module, torch.nn.ModuleList):
                module.register_forward_pre_hook(partial(self._pass, int(found[1])))

    def _pass(self, layer: int, _module: Any, args: tuple[Any, ...]) -> None:
        self._passed[layer] = args[1]

    def keep(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Record the routing of a packed forward pass. `pieces`, in order: (slot, first token, number of tokens)."""
        if not self._passed:
            return
        layers, chosen = list(self._passed), torch.stack(list(self._passed.values()), 1).to("cpu", torch.int16).numpy()
        if self._rows is None:
            self._rows = np.zeros((*self._shape, chosen.shape[2]), np.int16)  # unwritten pages take no memory
        offset = 0
        for slot, start, count in pieces:
            self._rows[slot][start : start + count, layers] = chosen[offset : offset + count]
            offset += count

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if self._rows is not None:
            self._rows[target, :length] = self._rows[source, :length]

    def of(self, slot: int, start: int, end: int) -> Rows | None:
        """Return the rows of a slot's tokens `start` to `end`; None for a model without experts."""
        return None if self._rows is None else self._rows[slot, start:end].copy()
