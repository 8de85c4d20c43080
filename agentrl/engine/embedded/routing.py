"""Which experts the tokens of a mixture went to, beside the keys and values that they left.

1. A row a token and slot: the experts of each layer, zeros where a layer is dense. What is reused of a slot's keys and values
   brings its rows along, so a cached prefix answers with the routing that it was computed with.
2. They are read where every mixture of transformers has them: the second argument of a module called `experts`. A model
   without one has no rows.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EXPERTS = re.compile(r".*\blayers\.(\d+)\..*\bexperts")

Rows = NDArray[np.int16]


class Routing:
    """The rows of `slots` sequences of up to `length` tokens: int16 [tokens, layers, experts a token]."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        self._shape = (slots, length, model.config.num_hidden_layers)
        self._rows: Rows | None = None
        self._passed: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            if (found := _EXPERTS.fullmatch(name)) and not isinstance(module, torch.nn.ModuleList):
                module.register_forward_pre_hook(partial(self._pass, int(found[1])))

    def _pass(self, layer: int, _module: Any, args: tuple[Any, ...]) -> None:
        self._passed[layer] = args[1]

    def keep(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Note the routing of a forward pass over packed tokens: (slot, first token, number of tokens), one after the other."""
        if not self._passed:
            return
        layers, chosen = list(self._passed), torch.stack(list(self._passed.values()), 1).to("cpu", torch.int16).numpy()
        if self._rows is None:
            self._rows = np.zeros((*self._shape, chosen.shape[2]), np.int16)  # memory that is not written is not taken
        offset = 0
        for slot, start, count in pieces:
            self._rows[slot][start : start + count, layers] = chosen[offset : offset + count]
            offset += count

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        if self._rows is not None:
            self._rows[target, :length] = self._rows[source, :length]

    def of(self, slot: int, start: int, end: int) -> Rows | None:
        """The rows of a slot's tokens `start` to `end`; None for a model without experts."""
        return None if self._rows is None else self._rows[slot, start:end].copy()
