"""`Network`: one model in a backend's form, and what the shared body asks of it."""

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
"""Stands for a tensor that only another rank has."""


@dataclass(frozen=True, slots=True)
class CostShape:
    """Of a model's sizes what planning and measuring need."""

    vocab: int
    matrices: int  # matrix weights that a token is multiplied with; in a mixture, those of the experts that it goes to
    channels: int  # of keys and of values, over all heads and layers


def attention_crossover(shape: CostShape) -> int:
    """The tokens at which a sequence's causal attention costs as much as everything else: a token costs 2 operations a
    matrix weight; attention over n tokens, halved by causality, n^2 a channel."""
    return 2 * shape.matrices // shape.channels


def forward_flops(shape: CostShape, lengths: NDArray[np.int64]) -> float:
    """Operations of a forward pass over sequences of these lengths, each by itself, attention halved by causality."""
    return 2 * float(lengths.sum()) * shape.matrices + float((lengths.astype(np.float64) ** 2).sum()) * shape.channels


class Network(ABC):
    """This rank's part of the model that lies in `folder`, with its weights; a part that `learns` has gradients.

    With `values` it ends in one value a token in place of the vocabulary."""

    model: Any  # as hooks get it
    forward_backward: ForwardBackward
    shape: CostShape
    sizes: Mapping[str, Any]  # plain values by name, by which a model is told from another
    reach: tuple[int, str] | None  # the longest sequence that the trainer computes right, and the reason, or None

    @abstractmethod
    def __init__(self, folder: HFFolder, place: ModelContext, *, values: bool, learns: bool) -> None: ...

    @staticmethod
    @abstractmethod
    def sizes_of(folder: HFFolder) -> Mapping[str, Any]:
        """The `sizes` of the model in a folder. Raises TrainError: it cannot be trained."""

    @classmethod
    @abstractmethod
    def check_model(cls, folder: HFFolder, settings: TrainSettings, *, values: bool) -> None:
        """Refuse a model as `__init__` would, by its config alone: without weights, ranks or a device."""

    def check(self, longest: int) -> None:
        """Raises `TrainError` for a batch whose longest input has so many tokens, if that is out of reach."""
        if self.reach is not None and longest > self.reach[0]:
            raise TrainError(
                f"a sample has {longest} tokens before its last, but with the {self.reach[1]} of config.json only "
                f"{self.reach[0]} can be trained; keep samples shorter with --rollout-max-context-len"
            )

    @abstractmethod
    def optimizer(self, total_steps: int | None) -> Optimizer:
        """The optimizer of the parameters that learn."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the last step's gradients."""

    def forget(self) -> None:
        """Drop what a forward or backward pass that failed has left behind, and the gradients."""
        self.zero_grad()

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """This rank's parameters, and buffers that belong to the weights, by the framework's names."""

    @abstractmethod
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors whose values must survive an offload, and the tensors that are computed anew after it."""

    @abstractmethod
    def specs(self) -> Mapping[int, list[TensorSpec]]:
        """The specs of the tensors that `export` yields by stage, in its order, by the rank that has them then."""

    @abstractmethod
    def export(self, *, by_stage: bool = False, in_step: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under HF names on rank 0, none elsewhere; `by_stage`: on each stage's first. `in_step`: other ranks
        yield as many, copies or `ELSEWHERE`, so that all can stop at a tensor. Collective."""

    @abstractmethod
    def unadapted(self) -> AbstractContextManager[None]:
        """The model, which has an adapter, computes as if it had none."""

    def adapter(self) -> dict[str, Tensor]:
        """Its adapter, in the names and shapes of `lora.write_adapter`, on every rank; empty where it has none. Collective."""
        return {}

    @abstractmethod
    def state(self, prefix: str = "") -> dict[str, Any]:
        """The weights as the backend's checkpoints take them, under names that begin with `prefix`."""

    @abstractmethod
    def take(self, state: dict[str, Any], prefix: str = "") -> None:
        """Take over a loaded `state`."""

    @staticmethod
    @abstractmethod
    def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> WriteFiles:
        """Begin a checkpoint of `state`; returns what writes this rank's files. With a `group`, that is done in another
        thread, of a copy of the state on the CPU, and its ranks meet in the group. Collective."""

    @staticmethod
    @abstractmethod
    def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The saved values of `state`, cut as `state` is. Collective."""

    @abstractmethod
    def random(self) -> Any:
        """The random state of this rank, as an entry of a `state`."""

    @staticmethod
    @abstractmethod
    def restore_random(loaded: Any) -> None:
        """Go on with a loaded random state."""


def rope_reach(config: Any) -> tuple[int, str] | None:
    """`Network.reach` by a config of transformers whose rotary positions depend on the length: siblings' would differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) not in ("dynamic", "longrope"):
        return None
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings, f"rope type {kind}"


def frozen(settings: TrainSettings) -> dict[str, list[str]]:
    """The patterns that keep parameters from learning, by setting; empty where all learn."""
    found = {name: list(getattr(settings, name)) for name in PATTERNS}
    return {name: patterns for name, patterns in found.items() if patterns}


def learning(settings: TrainSettings, called: Sequence[Sequence[str]]) -> list[bool]:
    """The parameters that the settings let learn, by their names. Raises TrainError: a pattern that no name has."""
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
    """The settings leave nothing of `what` to learn."""
    patterns = settings.only_train_params_name_list or settings.freeze_params_name_list
    return TrainError(f"{_flag(settings)} {' '.join(patterns)}: nothing of {what} is left to learn; freeze less of it")


def _flag(settings: TrainSettings) -> str:
    return f"--{'only-train' if settings.only_train_params_name_list else 'freeze'}-params-name-list"
