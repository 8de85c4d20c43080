"""Freeing the accelerator between training phases: contents go to the CPU, storages shrink to nothing.

Tensors keep their identity (parameters stay views of their buffers), so nothing holds a stale reference. Gradient
buffers are dropped without a copy and come back as zeros. On the CPU both calls do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def offload(model: torch.nn.Module, optimizer: Any) -> None:
    """Move every CUDA storage of model and optimizer to the CPU."""
    gradients = {_key(t) for t in _gradients(model)}
    for tensor in _tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.device.type != "cuda" or storage.nbytes() == 0:
            continue
        kept = None if _key(tensor) in gradients else storage.cpu()
        _kept(model).append((tensor, storage.nbytes(), kept))
        storage.resize_(0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def onload(model: torch.nn.Module, optimizer: Any) -> None:
    """Bring back what `offload` moved."""
    kept = _kept(model)
    while kept:
        tensor, size, content = kept.pop()
        storage = tensor.untyped_storage()
        storage.resize_(size)
        if content is None:
            storage.fill_(0)
        else:
            storage.copy_(content)


def _kept(model: torch.nn.Module) -> list[Any]:
    holder: Any = model
    if not hasattr(holder, "offloaded_storages"):
        holder.offloaded_storages = []
    found: list[Any] = holder.offloaded_storages
    return found


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _gradients(model: Any) -> Iterator[Tensor]:
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        yield buffer.grad_data


def _tensors(model: Any, optimizer: Any) -> Iterator[Tensor]:
    """Tensors that between them own every storage, some of them more than once."""
    yield from _gradients(model)
    for parameter in model.parameters():
        yield parameter.data
    for part in optimizer.chained_optimizers:
        for group in part.param_groups:
            yield from (p.data for p in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
