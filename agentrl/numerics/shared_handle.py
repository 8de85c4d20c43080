"""Handles of memory for another process on the device, in the format of SGLang's `update_weights_from_tensor`."""

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from agentrl.numerics.weight_group import views

_DEVICE = 6  # the place of the device among the arguments that rebuild a CUDA tensor


class _Rebuilt:
    """A tensor that is pickled as a function that rebuilds it and the function's arguments."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def flattened_bucket(flat: Tensor, specs: Sequence[tuple[str, str, list[int]]]) -> str:
    """Return the handle of a bucket: `flat` [bytes], in which the tensors of `specs` lie without gaps. On a GPU the
    handle is CUDA's, with the device's UUID, because processes number devices differently. On a CPU it is a file in
    shared memory. The memory must stay until the other process has read it."""
    function, arguments = reductions.reduce_tensor(flat)
    if flat.is_cuda:
        uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    tensors, end = [], 0
    for name, view in views(flat, specs):
        start, end = end, end + view.nbytes
        bounds = {"start_idx": start, "end_idx": end, "numel": end - start}
        tensors.append(SimpleNamespace(name=name, shape=view.shape, dtype=view.dtype, **bounds))
    before, out = mp.get_sharing_strategy(), io.BytesIO()
    mp.set_sharing_strategy("file_system")  # processes of other parents can open a file by name
    try:
        ForkingPickler(out).dump({"flattened_tensor": _Rebuilt(function, arguments), "metadata": tensors})
    finally:
        mp.set_sharing_strategy(before)
    return base64.b64encode(out.getvalue()).decode()
