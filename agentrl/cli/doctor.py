"""`agentrl doctor`."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Literal, NamedTuple

import click

from agentrl.errors import install
from agentrl.files import read_table

_EXTRAS = {
    "transformers": ("rollout", "chat templates and rollouts"),
    "torch": ("engine", "the built-in engine"),
    **dict.fromkeys(("ray", "megatron-core"), ("train", "training")),
}
_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


class DoctorResult(NamedTuple):
    """One line of the table. `problem` makes the command exit with 1."""

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


@click.command("doctor")
def command() -> int:
    """Look at this machine: what is installed, which GPUs it has, and which sandbox the Python tool gets.

    The sandbox keeps model-written code away from your files and the network. Each way to build one is tried here by
    really running a small program that tries to get out; the first that works is the one that runs will use.

    Exit code 0 if all is well (notes do not matter), 1 if something will not work; a line with an arrow says what to do.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    rows = [*_software(), *_gpus(), *_sandbox(), *_machines()]
    table = Table(*(Column(overflow="fold") for _ in range(3)), show_header=False, box=None, pad_edge=False)
    for row in rows:
        found = Text.assemble(row.found, (f"\n-> {row.advice}" if row.advice else "", "italic"))
        table.add_row(row.what, Text(row.state, style=_COLOURS[row.state]), found)
    Console().print(table)
    return 1 if any(row.state == "problem" for row in rows) else 0


def _software() -> Iterator[DoctorResult]:
    yield DoctorResult("system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield DoctorResult("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    for name, (extra, use) in _EXTRAS.items():
        try:
            yield DoctorResult(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield DoctorResult(name, "note", "not installed", f"for {use}: {install(extra)}")


def _gpus() -> Iterator[DoctorResult]:
    if (tool := shutil.which("nvidia-smi")) is None:
        yield DoctorResult("GPUs", "ok", "none (no nvidia-smi); everything runs on the processors")
        return
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield DoctorResult("GPUs", "note", f"nvidia-smi failed: {error}", "look at the driver")
        return
    if not (lines := answer.stdout.strip().splitlines()) or answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        yield DoctorResult("GPUs", "note", said[-1] if said else "nvidia-smi names none", "look at the driver")
    for number, line in enumerate(lines if answer.returncode == 0 else []):
        yield DoctorResult(f"GPU {number}", "ok", line)


def _sandbox() -> Iterator[DoctorResult]:
    from agentrl.sandbox import try_backends

    bwrap = shutil.which("bwrap")
    yield DoctorResult("command bwrap", "ok" if bwrap else "note", bwrap or "not installed", "" if bwrap else _INSTALL)
    backends = try_backends()
    for name, (works, said) in backends.items():
        found = f"works; runs {said}" if works else said
        yield DoctorResult(f"sandbox {name}", "ok" if works else "note", found, "" if works else _REMEDIES[name])
    if (gets := next((name for name, (works, _) in backends.items() if works), None)) is None:
        yield DoctorResult("Python tool", "problem", "no safe sandbox: model-written code cannot run here", _NO_SANDBOX)
    else:
        yield DoctorResult("Python tool", "ok", f"gets sandbox {gets}: {_WHY[gets]}")


def _machines() -> Iterator[DoctorResult]:
    import anyio

    from agentrl.sandbox import BubblewrapMachine, ContainerMachine

    for name, kind in (("bubblewrap", BubblewrapMachine), ("container", ContainerMachine)):
        refusal = anyio.run(kind.refusal)
        advice = _REMEDIES[name] if refusal else ""
        yield DoctorResult(f"machine {name}", "note" if refusal else "ok", refusal or "works", advice)


_INSTALL = "Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap"
_SANDBOXES = read_table(__file__, "sandboxes.tsv")
_WHY = {name: advantage for name, advantage, _ in _SANDBOXES}
_REMEDIES = {name: remedy for name, _, remedy in _SANDBOXES}
_NO_SANDBOX = "make one of the two above work, or take backend unsafe_subprocess on a machine that holds nothing"
