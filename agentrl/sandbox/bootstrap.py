"""The first lines of a zygote, as text. They read the modules of `inside` from a descriptor instead of from files."""

from pathlib import Path

ORDER = ("frames", "kernel", "syscalls", "filters", "jail", "runner", "child", "jailer", "zygote")
"""The order of import: each module imports only earlier modules."""
SCRIPT = Path(__file__).with_name("bootstrap.py.txt").read_text(encoding="utf-8")


def modules() -> dict[str, str]:
    folder = Path(__file__).parent / "inside"
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in ORDER}
