"""README.md and docs/ match the code: code runs, settings load, and links, commands and flags exist."""

import ast
import asyncio
import inspect
import re
import runpy
import shlex
import sys
import tomllib
import types
from pathlib import Path

import click
import orjson
import pytest
import yaml

from agentrl.buffer.store import TrajectoryStore
from agentrl.cli.main import COMMANDS, agentrl
from agentrl.config.fields import all_fields
from agentrl.config.inapplicable import inapplicable
from agentrl.config.settings import RunSettings
from agentrl.errors import DISTRIBUTION
from agentrl.plugins import optional
from agentrl.run.evalsets import eval_sets
from agentrl.sample import Sample

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
NOT_PARAMETERS = {
    "--help",
    "--dangerously-bypass-approvals-and-sandbox",
    "--dangerously-skip-permissions",
    "--skip-git-repo-check",
}
"""Flags of every command."""
MADE = {"settings.md", "commands.md", "index.md", "changelog.md", "contributing.md"}
"""Pages of the site that scripts/docs/pages.py makes."""
LANGUAGES = {"python", "bash", "yaml", "toml", "json", "jsonl", "text", ""}
"""Languages of code blocks: run, parsed or loaded below, except plain text."""
PROGRAMS = {"source", "pip", "make", "python", "pytest", "ray", "curl", "cd", "export", "git", "uvx"}
"""Programs that command lines in the documentation may start besides agentrl."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"(?:^|[`\n])\s*agentrl ([a-z]+)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_NAMED = re.compile(r"# (\S+\.(?:py|yaml|toml|jsonl))\b")


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for name, code in _FENCE.findall(page.read_text(encoding="utf-8")) if name in languages]


def title(page: Path) -> str:
    return page.name if page.parent.name in ("docs", ROOT.name) else f"{page.parent.name}-{page.name}"


def each(*languages: str) -> list[object]:
    """Return every block of these languages, with its page."""
    return [
        pytest.param(page, code, id=f"{title(page)}-{at}")
        for page in PAGES
        for at, code in enumerate(blocks(page, *languages))
    ]


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page names in the first line of a block."""
    for code in blocks(page, "python", "yaml", "toml", "jsonl"):
        if found := _NAMED.match(code):
            (folder / found[1]).write_text(code)


@pytest.fixture
def desk(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the files that the README and the page name in the first line of a block."""
    for source in (ROOT / "README.md", page):
        write_files(source, tmp_path)
    for run in ("city", "before", "after"):
        with TrajectoryStore(tmp_path / f"runs/{run}/trajectories.sqlite", keep=10) as store:
            sample = Sample(group_index=0, index=0, prompt="Oslo?", tokens=[1], reward=0.0)
            store.add("train", "", 0, [[sample]])
            store.add("eval", "dev", 0, [[sample]])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "Oslo", "text": "Oslo is in Norway."}\n')
    (tmp_path / "train.jsonl").write_text('{"input": "How many people live in Oslo?", "label": "0.7 million"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_no_block_escapes_these_tests(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {name for name, _ in _FENCE.findall(text)} - LANGUAGES == set()
    assert re.findall(r"^\s*(?:```|~~~).*$", _FENCE.sub("", text), re.MULTILINE) == []


def takes_processes(code: str) -> bool:
    """Return true if a block starts a sandbox or graders' processes."""
    return "async with" in code or "grade_many" in code


def run_block(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    # Fragments of coroutines are shown without the function around them.
    compiled = compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(compiled, module.__dict__))  # noqa: S307
    else:
        exec(compiled, module.__dict__)


PYTHON = each("python")


@pytest.mark.parametrize(("page", "code"), [p for p in PYTHON if not takes_processes(p.values[1])])  # type: ignore[attr-defined]
def test_python_blocks_run(page: Path, code: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "from slime" in code or "agentrl.compat" in code:
        if (install := optional("agentrl.compat.modules:install")) is None:
            pytest.skip("what people bring along is read by agentrl.compat")
        install()
    run_block(code, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), [p for p in PYTHON if takes_processes(p.values[1])])  # type: ignore[attr-defined]
def test_python_blocks_with_processes_run(page: Path, code: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block(code, monkeypatch)


def lines(code: str) -> list[list[str]]:
    """Yield the command lines of a block as words, without comments."""
    single = re.sub(r"&&|&$", "\n", code.replace("\\\n", " "), flags=re.MULTILINE).splitlines()
    return [words for line in single if (words := shlex.split(line, comments=True))]


def check_command(name: str, args: list[str]) -> None:
    """Parse a command line as agentrl would; the settings of a run are checked together."""
    root = click.Context(agentrl)
    command = agentrl.get_command(root, name)
    assert command is not None, name
    try:
        context = command.make_context(name, [arg for arg in args if arg != "..."], parent=root)
    except click.exceptions.Exit as ended:
        if ended.exit_code:
            raise
        return  # a flag has done everything
    if "settings" in context.meta:
        values, origins = context.meta["settings"]
        settings = RunSettings.from_parts(values, origins, config=context.params.get("config"))
        purpose = name if name in ("rollout", "eval") else "train"
        more = {"...", "--slime-script"} & set(args)  # other inputs do not exist here
        assert more or inapplicable(settings, purpose) == []


@pytest.mark.parametrize(("page", "code"), each("bash"))
def test_command_lines_are_understood(page: Path, code: str, desk: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in lines(code):
        while re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        match words:
            case ["agentrl", name, *args]:
                check_command(name, args)
            case ["make", target, *_]:
                assert target in targets
            case ["python", "-m", module, *_]:
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists() or module == "http.server"
            case ["pip", "install", wanted]:
                extras = re.fullmatch(rf"(?:\.|{DISTRIBUTION})(?:\[(.*)\])?", wanted)
                assert extras, wanted
                assert set(filter(None, (extras[1] or "").split(","))) <= set(project["optional-dependencies"])
            case [program, *_]:
                assert program in PROGRAMS


@pytest.mark.parametrize(("page", "code"), each("yaml", "toml"))
def test_settings_files_load(page: Path, code: str, desk: Path) -> None:
    named = _NAMED.match(code)
    path = desk / (named[1] if named else "settings.yaml")
    path.write_text(code)
    if page.name == "retrain.md" and optional("agentrl.compat.retrain.config:read") is None:
        pytest.skip("retrain's files are read by agentrl.compat")
    if path.suffix == ".yaml" and "eval" in yaml.safe_load(code):
        check_sets(path)
    else:
        RunSettings.from_file(path)


def check_sets(path: Path) -> None:
    """Open the evaluation sets of a file, each on rows that have all fields."""
    found = yaml.safe_load(path.read_text())["eval"]
    for one in found["datasets"]:
        keys = {value for key, value in (*found.get("defaults", {}).items(), *one.items()) if key.endswith("_key")}
        row: dict[str, object] = dict.fromkeys(keys | {"input", "label"}, "text") | {"metadata": {}}
        file = Path(one["path"].partition("@")[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((orjson.dumps(row) + b"\n") * 3)
    assert len(eval_sets(RunSettings.from_flat({"eval_config": str(path)}))) == len(found["datasets"])


@pytest.mark.parametrize(("page", "code"), each("json", "jsonl"))
def test_json_is_json(page: Path, code: str) -> None:
    for part in [code] if "\n}" in code else code.splitlines():
        orjson.loads(part)


def test_the_environment_of_the_readme_is_short() -> None:
    code = next(code for code in blocks(ROOT / "README.md", "python") if "class CityEnv" in code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert [target for target in missing if not (page.parent.name == "docs" and target in MADE)] == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_commands_exist(page: Path) -> None:
    # Outside of fences and backticks `agentrl` is the project's name.
    code = re.findall(r"```[\s\S]*?```|`agentrl [^`]*`", page.read_text(encoding="utf-8"))
    named = {name for part in code for name in _COMMAND.findall(part)}
    assert named - set(COMMANDS) == set()


def known_flags() -> set[str]:
    context = click.Context(agentrl)
    commands = [agentrl.get_command(context, name) for name in COMMANDS if name != "demo"]
    own = [param for command in (agentrl, *commands) if command for param in command.params]
    flags = {flag for param in own for flag in (*param.opts, *param.secondary_opts)}
    return flags.union(*({field.flag, f"--no-{field.flag[2:]}"} for field in all_fields().values()))


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_flags_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Lines that call other programs have those programs' flags.
    other = r"python -m|pytest|pip install|mypy|\bray (?:start|get-auth-token)|sbatch"
    ours = "\n".join(line for line in text.splitlines() if not re.search(other, line))
    own = {flag for flag in _FLAG.findall(ours) if not flag.startswith("--sglang-")}  # the prefix of SGLang's flags
    if page.name.startswith(("coming-from", "slime-")):  # flags of other trainers, which only agentrl.compat knows
        row_of = optional("agentrl.compat.flags:row_of")
        own = {flag for flag in own if row_of is not None and row_of(flag) is None}
    assert own - known_flags() - NOT_PARAMETERS == set()


def test_modules_named_as_commands_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m (benchmarks\.\w+)", page.read_text())}
    assert [name for name in sorted(named) if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []


@pytest.mark.slow
def test_the_package_graph_is_that_of_the_code() -> None:
    program = ROOT / "scripts/docs/packages.py"
    drawing = runpy.run_path(str(program))["drawing"]()
    assert drawing == (ROOT / "docs/packages.svg").read_text(), "draw it again: python scripts/docs/packages.py"
