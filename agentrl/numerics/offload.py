"""Offloaded tensors: their memory is freed, and restored with the same bytes. Tensors and their views stay the same
objects; nothing may use them meanwhile. CPU bytes go to an unnamed file in `TMPDIR`, which the kernel removes when the
process ends. GPU bytes go to pinned host memory."""

import ctypes
import mmap
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class OffloadedTensors:
    """Tensors whose memory is freed until `restore`. The bytes of `kept` are restored; `emptied` become zeros, except
    memory that `kept` shares. Raises OSError: the file could not be written. Then no tensor was changed."""

    def __init__(self, kept: Iterable[Tensor], emptied: Iterable[Tensor] = ()) -> None:
        self._kept = _storages(kept)
        self._emptied = {at: storage for at, storage in _storages(emptied).items() if at not in self._kept}
        self._sizes = {at: storage.nbytes() for at, storage in (self._kept | self._emptied).items()}
        self._file: Any = tempfile.TemporaryFile(prefix="agentrl-offload-")  # noqa: SIM115 - open until `restore`
        self._host: dict[int, list[Tensor]] = {}
        for at, storage in self._kept.items():
            if storage.device.type == "cpu":
                self._file.write(_bytes(storage).numpy().data)
            else:
                self._host[at] = [part.cpu().pin_memory() for part in _bytes(storage).split(_PINNED)]
        self._file.flush()
        for storage in (self._kept | self._emptied).values():
            _drop(storage)
        release_freed_memory()

    def restore(self) -> None:
        """Restore all tensors in place. Raises OSError: the file could not be read."""
        self._file.seek(0)
        for at, storage in (self._kept | self._emptied).items():
            if storage.device.type != "cpu":
                storage.resize_(self._sizes[at])
            view = _bytes(storage)
            if at in self._emptied:
                view.zero_()
            elif at in self._host:
                for part, held in zip(view.split(_PINNED), self._host.pop(at), strict=True):
                    part.copy_(held)
            elif self._file.readinto(view.numpy()) != self._sizes[at]:
                raise OSError("the file of offloaded tensors is shorter than it was written")
        self._file.close()


def release_freed_memory() -> None:
    """Return freed memory to the system, because allocators keep it for the next request."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (trim := getattr(_C, "malloc_trim", None)) is not None:  # glibc's
        trim(0)


_PINNED = 1 << 28
"""Bytes of one piece of pinned memory, which torch rounds up to a power of two."""
_C = ctypes.CDLL(None, use_errno=True)


def _storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _drop(storage: Any) -> None:
    """Free the memory of a storage: on a GPU all of it, on a CPU the pages that contain nothing else."""
    if storage.device.type != "cpu":
        storage.resize_(0)
        return
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _C.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise: the memory of tensors could not be given back")


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
