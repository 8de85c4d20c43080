"""slime's module names, resolved to our objects, and the test for slime functions.

1. `names.tsv` maps slime's names to our objects (`*`: the whole module), which are imported at their first use. A name
   that is not in the table raises an ImportError.
2. The names resolve once a first user file is loaded, so that imports inside functions work too. They take precedence
   over an installed slime, whose classes the run would not know.
3. A function is slime's if its file imports slime. It is called with slime's args and samples (`calls.adapted`)."""

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.files import read_table

ROOTS = ("slime", "slime_plugins")


@functools.cache
def names() -> dict[str, dict[str, str]]:
    """Return for each of slime's modules its names, and the paths of our objects (`module:name`)."""
    table: dict[str, dict[str, str]] = {}
    for module, name, ours in read_table(__file__, "names.tsv"):
        table.setdefault(module, {})[name] = ours
    return table


class _Finder(MetaPathFinder, Loader):
    """Import finder for slime's modules in the table."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        if not _known(fullname):
            known = f"agentrl has no counterpart of slime's module {fullname}; see docs/slime-hooks.md for those it has"
            raise ModuleNotFoundError(known, name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        whole = names().get(spec.name, {}).get("*")
        return importlib.import_module(whole) if whole else None

    def exec_module(self, module: ModuleType) -> None:
        if (spec := module.__spec__) is not None and module.__name__ == spec.name:
            module.__getattr__ = functools.partial(_look_up, spec.name)  # type: ignore[method-assign]


def _known(module: str) -> bool:
    return any(f"{known}.".startswith(f"{module}.") for known in names())


def _look_up(module: str, name: str) -> Any:
    if (ours := names().get(module, {}).get(name)) is None:
        # Python also looks up submodules and optional dunder names here, and expects AttributeError.
        wrong = AttributeError if name.startswith("__") or _known(f"{module}.{name}") else ImportError
        known = ", ".join(names().get(module, {})) or "only modules"
        raise wrong(f"agentrl has no counterpart of {module}.{name}; of that module it has {known}")
    source, _, attribute = ours.partition(":")
    return getattr(importlib.import_module(source), attribute)


_FINDER = _Finder()


def install() -> None:
    """Make slime's names resolve to our objects in this process."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def speaks_slime(found: Any) -> bool:
    """Return true if the file of a function, class or object's class imports slime, or is slime's or this package's."""
    found = inspect.unwrap(getattr(found, "func", found))
    module = str(getattr(found, "__module__", "") or "")
    if module.partition(".")[0] in ROOTS or module.startswith(f"{__package__}."):
        return True
    try:
        file = inspect.getsourcefile(found if inspect.isroutine(found) or inspect.isclass(found) else type(found))
    except TypeError:
        return False
    return file is not None and _imports_slime(file)


@functools.cache
def _imports_slime(file: str) -> bool:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError):
        return False
    found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return any(name.partition(".")[0] in ROOTS for name in found)


def adapt(found: Any, what: str) -> Any:
    """Return `found`, adapted to our form if it has slime's; see `plugins.Compat`."""
    from agentrl.compat.calls import adapted, four_to_three

    if what == "--data-source-path" and inspect.isclass(found) and speaks_slime(found):
        from agentrl.compat.source import adapted_source

        return adapted_source(found)
    found = adapted(found) if speaks_slime(found) else found
    return four_to_three(found) if what == "--buffer-filter-path" else found
