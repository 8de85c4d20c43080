"""Stub of `sgl_kernel` for a CPU without AMX: every name can be imported, and every call raises. SGLang imports many
kernels by name at start-up, but runs plain torch code on such a machine."""

import sys
import types
from typing import Any, NoReturn

__version__ = "0.0.0"

_PARTS = "elementwise flash_attn kvcacheio mamba quantization scalar_type sparse_flash_attn speculative top_k utils"


class Missing(types.ModuleType):
    """A kernel that this machine does not have, or a submodule of such kernels."""

    __path__: list[str] = []  # noqa: RUF012 - marks it as a package for `import sgl_kernel.x.y`

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} has no CPU build; run SGLang on a GPU to use it")

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):  # Python's protocols must find special names absent
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


__getattr__ = Missing(__name__).__getattr__


def weak_ref_tensor(tensor: Any) -> Any:
    """Return the tensor itself: for graph capture, a plain reference is enough."""
    return tensor


for _name in _PARTS.split():
    sys.modules[f"{__name__}.{_name}"] = Missing(f"{__name__}.{_name}")
