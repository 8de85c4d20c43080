"""Stands in for `sgl_kernel` on a CPU without AMX: every name can be imported, calling one raises.

SGLang imports many kernels by name at start-up and picks plain torch code on such a machine.
"""

import sys
import types
from typing import Any, NoReturn

__version__ = "0.0.0"

_SUBMODULES = (
    "elementwise",
    "flash_attn",
    "kvcacheio",
    "mamba",
    "quantization",
    "scalar_type",
    "sparse_flash_attn",
    "speculative",
    "top_k",
    "utils",
)


class MissingKernel:
    """A kernel that this machine does not have."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self.__name__} has no CPU build; run SGLang on a GPU to use it")

    def __getattr__(self, name: str) -> "MissingKernel":
        return _missing(f"{self.__name__}.{name}", name)


class MissingModule(types.ModuleType):
    """A submodule whose names are all missing kernels."""

    __path__: list[str] = []  # noqa: RUF012 - marks it as a package for `import sgl_kernel.x.y`

    def __getattr__(self, name: str) -> MissingKernel:
        return _missing(f"{self.__name__.removeprefix('sgl_kernel.')}.{name}", name)


def _missing(path: str, name: str) -> MissingKernel:
    if name.startswith("__"):  # let Python's own protocols see that they are absent
        raise AttributeError(name)
    return MissingKernel(path)


def __getattr__(name: str) -> MissingKernel:
    return _missing(name, name)


def weak_ref_tensor(tensor: Any) -> Any:
    """Used for graph capture, where a plain reference does as well."""
    return tensor


for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = MissingModule(f"{__name__}.{_name}")
