"""Loading user objects by path: every failure names what was searched for and where."""

from pathlib import Path

import pytest

from agentrl.errors import PluginError
from agentrl.plugins import load_object, optional


def test_loads_by_module_and_by_file(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text("class Env: ...\ndef generate(): return 7\n")
    assert load_object("collections:OrderedDict", what="--env").__name__ == "OrderedDict"
    assert load_object("collections.OrderedDict", what="--env").__name__ == "OrderedDict"
    file = str(tmp_path / "my_env.py")
    assert load_object(f"{file}:Env", what="--env").__name__ == "Env"
    assert load_object(file, what="--env", default_names=("generate",))() == 7
    assert load_object(f"{file}:Env", what="--env") is load_object(f"{file}:Env", what="--env")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nonsense", "expected 'package.module:Name' or 'path/file.py:Name'"),
        ("no_such_module:Env", "no module 'no_such_module'"),
        ("collections:OrderedDic", "did you mean 'OrderedDict'"),
        ("no/such/file.py:Env", "--env no/such/file.py: no such file .looked for /"),
    ],
)
def test_what_cannot_be_found(path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_object(path, what="--env")


def test_a_file_that_raises_at_import_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(PluginError, match=r"raises.py failed to import: ZeroDivisionError: .* at .*raises.py:2"):
        load_object(f"{tmp_path}/raises.py:Env", what="--env")


def test_a_file_that_fails_to_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_thing_here\n")
    with pytest.raises(PluginError, match=r"broken.py failed to import: ModuleNotFoundError.*no_such_thing_here"):
        load_object(f"{tmp_path}/broken.py:Env", what="--env")


@pytest.mark.parametrize("name", ["leaves.py:Env", "leaves_too:Env"])
def test_a_file_that_exits_at_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name.removesuffix(':Env').removesuffix('.py')}.py").write_text(
        "class Env: ...\nraise SystemExit(0)\n"
    )
    for _ in range(2):
        with pytest.raises(PluginError, match=r"leaves.* failed to import: SystemExit: 0"):
            load_object(name, what="--env")


def test_a_missing_package_is_none_and_its_own_missing_imports_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_room.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert optional("agentrl.no_such_room:DOOR") is None
    assert optional("agentrl.plugins:optional") is optional
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        optional("half_a_room:DOOR")
