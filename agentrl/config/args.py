"""`Args`: a read-only view of all settings under slime's flat names, for user functions (`generate(args, samples)`). An
unknown name raises `AttributeError` with the nearest known name. Options of the engine's server are `sglang_<name>`."""

import types
from collections.abc import Iterator, Mapping
from typing import Any, Never

from agentrl.config.fields import RENAMED
from agentrl.config.problems import did_you_mean
from agentrl.settings import shown


class Args:
    """A read-only flat view of a run's settings."""

    __slots__ = ("_values",)
    _values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", types.MappingProxyType(dict(values)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":
            raise AttributeError(name)
        try:
            return self._values[RENAMED.get(name, name)]
        except KeyError:
            raise AttributeError(f"the run's settings have no {name!r}{did_you_mean(name, self._values)}") from None

    def __setattr__(self, name: str, value: object) -> Never:
        said = f"args is read-only: cannot set {name!r}; keep per-sample state in sample.metadata,"
        raise AttributeError(f"{said} and set options by flags or the settings file")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"args is read-only: cannot delete {name!r}")

    def changed(self, **values: Any) -> "Args":
        return Args({**self._values, **values})

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and dict(self._values) == dict(other._values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        seen = {k: shown(v, k if k.startswith("sglang_") else "") for k, v in self._values.items()}
        return f"Args({', '.join(f'{k}={v!r}' for k, v in seen.items())})"

    def __reduce__(self) -> tuple[type["Args"], tuple[dict[str, Any]]]:
        return (Args, (dict(self._values),))
