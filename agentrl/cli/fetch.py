"""`agentrl fetch`: a model or data set of the Hugging Face Hub, as a local folder."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import click

from agentrl.errors import DataError, disk_trouble
from agentrl.files import write_atomic

_NOTE = ".fetched.json"  # the file that records the origin of a fetched folder
_TEXTS = ["*.md", "LICENSE*"]
_MODEL = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", *_TEXTS]
_DATA = ["*.jsonl", "*.parquet", *_TEXTS]
_COPIES = ["original/*", "onnx/*", "openvino/*", "consolidated*"]
"""Copies of the weights that many models have, in forms that a run does not read."""


@click.command("fetch")
@click.argument("name", metavar="NAME")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--data", is_flag=True, help="NAME is a data set, not a model.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit; default: the main branch.")
@click.option("--include", multiple=True, metavar="GLOB", help="Fetch these files instead of all that a run reads.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these files out.")
def command(
    name: str, folder: Path, data: bool, revision: str | None, include: tuple[str, ...], exclude: tuple[str, ...]
) -> None:
    """Download the model or data set NAME (owner/name) from the Hugging Face Hub into the new folder DIR.

    DIR appears when all files are complete. After an interruption, the same command fetches the missing files.
    Runs download nothing: give DIR as --hf-checkpoint, or a file in it as --prompt-data.

    HF_TOKEN gives access to private and gated repositories; HF_ENDPOINT names a mirror.

    \b
        agentrl fetch Qwen/Qwen3-0.6B models/qwen3-0.6b
        agentrl fetch --data openai/gsm8k data/gsm8k --include 'main/*.parquet'"""
    folder = folder.absolute()
    asked = {"name": name, "data": data, "revision": revision, "include": list(include), "exclude": list(exclude)}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        known: dict[str, object] = {}
        with suppress(OSError, ValueError):
            known = json.loads((folder / _NOTE).read_bytes())
        if {key: known.get(key) for key in asked} != asked:
            raise DataError(f"{folder} is there already, and not empty; choose another DIR")
        click.echo(f"{folder} has {name} already, commit {known.get('commit')}")
        return
    commit, files = _fetch(folder, asked)
    click.echo(f"{folder}: {name}, commit {commit}")
    flag, shown = ("--prompt-data", _rows(files)) if data else ("--hf-checkpoint", "")
    click.echo(f"Next: {flag} {folder / shown}")


def _rows(files: list[str]) -> str:
    found = [file for file in files if file.endswith((".jsonl", ".parquet"))]
    return next((file for file in found if "train" in file), found[0] if found else "FILE")


def _fetch(folder: Path, asked: dict[str, Any]) -> tuple[str, list[str]]:
    """Download beside `folder` and rename; return the commit and the names of the files."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils._paths import filter_repo_objects
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    name: str = asked["name"]
    kind = "dataset" if asked["data"] else "model"
    allow = asked["include"] or (_DATA if asked["data"] else _MODEL)
    ignore = [*asked["exclude"], *([] if asked["include"] or asked["data"] else _COPIES)]
    with _one_message(name, kind, asked["revision"]):
        found: Any = HfApi().repo_info(name, repo_type=kind, revision=asked["revision"], files_metadata=True)
    sizes = {file.rfilename: file.size for file in found.siblings or ()}
    chosen = list(filter_repo_objects(sizes, allow_patterns=allow, ignore_patterns=ignore))
    needed = ("*",) if asked["include"] else ("*.jsonl", "*.parquet") if asked["data"] else ("*.safetensors",)
    if not any(PurePosixPath(file).match(glob) for file in chosen for glob in needed):
        hint = "; --revision refs/convert/parquet has Parquet files of many data sets" if asked["data"] else ""
        names = ", ".join(list(sizes)[:10]) or "no file"
        raise DataError(f"{name}: no file {' or '.join(needed)}; it has {names}. Choose files by --include{hint}")
    if outside := [file for file in chosen if file.startswith("/") or ".." in PurePosixPath(file).parts]:
        raise DataError(f"{name}: the file {outside[0]!r} would be written outside of {folder}")
    commit, digest = str(found.sha), hashlib.sha256(json.dumps([name, kind, found.sha, chosen]).encode()).hexdigest()
    part = folder.with_name(f".{folder.name}.{digest[:12]}.part")
    click.echo(f"fetching {len(chosen)} files, {sum(sizes[file] or 0 for file in chosen) / 1e6:,.1f} MB", err=True)
    with _one_message(name, kind, commit):
        part.mkdir(parents=True, exist_ok=True)
        patterns: dict[str, Any] = {"allow_patterns": allow, "ignore_patterns": ignore}
        snapshot_download(name, repo_type=kind, revision=commit, local_dir=part, **patterns)
        for file in chosen:
            if not (part / file).is_file() or (part / file).stat().st_size != (sizes[file] or 0):
                raise OSError(f"{file} is incomplete")
        shutil.rmtree(part / ".cache", ignore_errors=True)
        write_atomic(part / _NOTE, json.dumps({**asked, "commit": commit}))
        part.rename(folder)
    return commit, chosen


@contextmanager
def _one_message(name: str, kind: str, revision: object) -> Iterator[None]:
    """Turn the errors of huggingface_hub into a `DataError` that says what to do."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    network: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of httpx or httpx2, by version
    try:
        yield
    except errors.HFValidationError as error:
        raise DataError(f"{name!r} names no model or data set; expected owner/name") from error
    except errors.OfflineModeIsEnabled as error:
        raise DataError(f"{name} cannot be fetched: HF_HUB_OFFLINE is set; unset it") from error
    except errors.GatedRepoError as error:
        raise DataError(f"{name} is gated: accept its terms on {where}/{name}, and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        other = "without --data if it is a model" if kind == "dataset" else "with --data if it is a data set"
        raise DataError(f"no {kind} {name} on {where}; {other}, with HF_TOKEN if it is private") from error
    except errors.RevisionNotFoundError as error:
        raise DataError(f"{name} has no revision {revision}") from error
    except (network, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and (disk := disk_trouble(error)):
            raise DataError(disk) from error
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        again = "check the network, then give the same command again: it continues the download"
        raise DataError(f"{name} could not be fetched from {where}: {said}; {again}") from error
