"""`Network`: the interface through which the shared trainer code uses one model of a backend."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from agentrl.engine.weights import TensorSpec
from agentrl.errors import TrainError
from agentrl.train.forward_backward import ForwardBackward, ModelContext
from agentrl.train.hf import HFFolder
from agentrl.train.optimizer import Optimizer
from agentrl.train.saving import WriteFiles
from agentrl.train.settings import PATTERNS, TrainSettings

ELSEWHERE = torch.empty(0, 0)
"""Placeholder for a tensor that only another rank has."""


@dataclass(frozen=True, slots=True)
class CostShape:
    """The sizes of a model that packing and FLOP counts need."""

    vocab: int
    matrices: int  # number of matrix weights that a token is multiplied with; of experts, only the token's
    channels: int  # number of channels of keys and values, over all heads and layers


def attention_crossover(shape: CostShape) -> int | None:
    """Return the sequence length at which causal attention costs as much as all else; None without such attention. A
    token costs 2 FLOPs per matrix weight; causal attention over n tokens costs n^2 FLOPs per channel."""
    return 2 * shape.matrices // shape.channels if shape.channels else None


def forward_flops(shape: CostShape, lengths: NDArray[np.int64]) -> float:
    """Return the FLOPs of a forward pass over sequences of these lengths, with causal attention and nothing shared."""
    return 2 * float(lengths.sum()) * shape.matrices + float((lengths.astype(np.float64) ** 2).sum()) * shape.channels


class Network(ABC):
    """This rank's part of the model in `folder`, with its weights; a part that `learns` has gradients. With `values`
    the model's output is one value per token in place of logits."""

    model: Any  # the form that hooks get
    forward_backward: ForwardBackward
    shape: CostShape
    sizes: Mapping[str, Any]  # plain values by name; models of one architecture have equal ones
    reach: tuple[int, str] | None  # maximum length that the trainer computes correctly, and the reason; or None

    @abstractmethod
    def __init__(self, folder: HFFolder, place: ModelContext, *, values: bool, learns: bool) -> None: ...

    @staticmethod
    @abstractmethod
    def sizes_of(folder: HFFolder) -> Mapping[str, Any]:
        """Return the `sizes` of the model in a folder. Raises TrainError: the model cannot be trained."""

    @classmethod
    @abstractmethod
    def check_model(cls, folder: HFFolder, settings: TrainSettings, *, values: bool) -> None:
        """Raise the errors that `__init__` would raise for a model, by its config alone, without ranks or a device."""

    def check(self, longest: int) -> None:
        """Raise TrainError if the longest input of a batch, of `longest` tokens, exceeds `reach`."""
        if self.reach is not None and longest > self.reach[0]:
            raise TrainError(
                f"a sample has {longest} tokens before its last, but with the {self.reach[1]} of config.json only "
                f"{self.reach[0]} can be trained; keep samples shorter with --rollout-max-context-len"
            )

    @abstractmethod
    def optimizer(self, total_steps: int | None) -> Optimizer:
        """Build the optimizer of the parameters that learn."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""

    def forget(self) -> None:
        """Clear the state that a failed forward or backward pass left behind, and the gradients."""
        self.zero_grad()

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return this rank's parameters, and buffers that belong to the weights, by the framework's names."""

    @abstractmethod
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors whose values must survive an offload, and the tensors that are computed anew after it."""

    @abstractmethod
    def specs(self) -> Mapping[int, list[TensorSpec]]:
        """Return the specs of the tensors that `export` yields with `by_stage`, in its order, by the yielding rank."""

    @abstractmethod
    def export(self, *, by_stage: bool = False, in_step: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by HF name on rank 0 or, with `by_stage`, on each stage's first rank. With `in_step`,
        other ranks yield a copy or `ELSEWHERE` for each tensor, so that all ranks can stop at one. Collective."""

    @abstractmethod
    def unadapted(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes without its adapter."""

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter with the names and shapes of `lora.write_adapter`, or {}, on every rank. Collective."""
        return {}

    @abstractmethod
    def state(self, prefix: str = "") -> dict[str, Any]:
        """Return the weights in the form of the backend's checkpoints, under names that begin with `prefix`."""

    @abstractmethod
    def take(self, state: dict[str, Any], prefix: str = "") -> None:
        """Set the weights from a loaded `state`."""

    @staticmethod
    @abstractmethod
    def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> WriteFiles:
        """Begin a checkpoint of `state`; returns a function that writes this rank's files. With a `group`, it may run
        in another thread: it writes a CPU copy of the state and communicates over the group. Collective."""

    @staticmethod
    @abstractmethod
    def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Read the saved values of `state`, sharded as `state` is. Collective."""

    @abstractmethod
    def random(self) -> Any:
        """Return the random state of this rank, as an entry of a checkpoint's state."""

    @staticmethod
    @abstractmethod
    def restore_random(loaded: Any) -> None:
        """Set the random state to a loaded one."""


def rope_max_length(config: Any) -> tuple[int, str] | None:
    """Return `Network.reach` of a transformers config. Beyond it, some RoPE types depend on a sequence's length."""
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) not in ("dynamic", "longrope"):
        return None
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings, f"rope type {kind}"


def frozen(settings: TrainSettings) -> dict[str, list[str]]:
    """Return the patterns that freeze parameters, by setting; empty if all parameters learn."""
    found = {name: list(getattr(settings, name)) for name in PATTERNS}
    return {name: patterns for name, patterns in found.items() if patterns}


def learning(settings: TrainSettings, called: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each parameter's names whether it learns. Raises TrainError: a pattern matches no name."""
    only = settings.only_train_params_name_list
    patterns = only or settings.freeze_params_name_list

    def has(names: Sequence[str], patterns: Sequence[str]) -> bool:
        return any(re.search(pattern, name) for pattern in patterns for name in names)

    for pattern in patterns:
        if not any(has(names, [pattern]) for names in called):
            some = ", ".join(name for names in called[1:3] for name in names)
            raise TrainError(f"{_flag(settings)} {pattern}: no parameter is called so; they are called like {some}")
    return [has(names, patterns) == bool(only) for names in called]


def idle(settings: TrainSettings, what: str) -> TrainError:
    """Return the error for settings that leave nothing of `what` to learn."""
    patterns = settings.only_train_params_name_list or settings.freeze_params_name_list
    return TrainError(f"{_flag(settings)} {' '.join(patterns)}: nothing of {what} is left to learn; freeze less of it")


def _flag(settings: TrainSettings) -> str:
    return f"--{'only-train' if settings.only_train_params_name_list else 'freeze'}-params-name-list"
