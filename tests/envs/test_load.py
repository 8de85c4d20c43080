"""Loading an environment by path, and the errors for other objects."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.envs import Environment, check_environment, load_environment
from agentrl.errors import PluginError
from agentrl.tools import Tool

FILE = """
from agentrl import Environment

class GoodEnv(Environment):
    max_turns = 3

class Other:
    pass

def generate(args, samples):
    return samples

instance = GoodEnv()
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(FILE)
    return path


def test_from_a_file_and_from_a_module(file: Path) -> None:
    found = load_environment(f"{file}:GoodEnv")
    assert issubclass(found, Environment)
    assert found.max_turns == 3
    assert load_environment("agentrl:Environment") is Environment
    assert load_environment("agentrl.demo.task:CalculatorEnv").__name__ == "CalculatorEnv"
    assert load_environment("agentrl.demo.task.CalculatorEnv").__name__ == "CalculatorEnv"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GodEnv", "has no 'GodEnv'; did you mean 'GoodEnv'"),
        ("Other", "expected a class that subclasses agentrl.Environment, got class Other"),
        ("Environment", "this is the base class itself; name a subclass of it, or agentrl:Environment"),
        ("generate", "expected a class that subclasses agentrl.Environment, got function generate"),
        ("instance", "expected a class that subclasses agentrl.Environment, got GoodEnv$"),
        ("number", "expected a class that subclasses agentrl.Environment, got int$"),
    ],
)
def test_not_an_environment(file: Path, name: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        load_environment(f"{file}:{name}")
    assert str(caught.value).startswith("--env ")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/env.py", "expected 'package.module:Name' or 'path/file.py:Name'"),
        ("nowhere/env.py:Env", r"--env nowhere/env\.py: no such file \(looked for /.*nowhere/env\.py\)"),
        ("no_such_package_here:Env", "no module 'no_such_package_here'"),
        ("agentrl.demo:task", "got module agentrl.demo.task"),
        ("JustAName", "expected 'package.module:Name'"),
    ],
)
def test_not_found(path: str, message: str) -> None:
    import agentrl.demo.task  # noqa: F401

    with pytest.raises(PluginError, match=message):
        load_environment(path)


class Guess(Environment):
    pass


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An adapter that replaces harbor's, whose environments are called by their names."""
    module = ModuleType("agentrl.adapters.harbor")
    vars(module)["environment"] = lambda name: type(name, (Guess,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_scheme_names_an_adapter_and_each_name_has_one_class(adapter: ModuleType) -> None:
    found = load_environment("harbor:stub_one")
    assert (found.__name__, found.__base__) == ("stub_one", Guess)
    assert load_environment("harbor:stub_one", what="--env a") is found
    assert load_environment("harbor:stub_two") is not found


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (
            ModuleNotFoundError("no", name="lib"),
            r"the package lib is not installed; pip install 'agentrl-sdk\[harbor\]'$",
        ),
        (PluginError("no such folder"), "no such folder$"),
        (KeyError("task"), r"KeyError: 'task' at .*test_load\.py:\d+ in fail$"),
    ],
)
def test_a_scheme_that_has_no_such_environment(adapter: ModuleType, raises: Exception, message: str) -> None:
    def fail(name: str) -> type[Environment]:
        raise raises

    vars(adapter)["environment"] = fail
    with pytest.raises(PluginError, match=f"^--env 'harbor:none': {message}"):
        load_environment("harbor:none")
    with pytest.raises(PluginError, match=r"^--env 'harbor:': expected harbor:NAME$"):
        load_environment("harbor:")


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    path = tmp_path / "bad_import.py"
    path.write_text("import does_not_exist_anywhere\n")
    with pytest.raises(PluginError, match=r"bad_import\.py failed to import: ModuleNotFoundError"):
        load_environment(f"{path}:Env")


BAD_CLASSES = [
    ("max_turns = 0", "Env.max_turns: expected a positive integer, got 0"),
    ("max_turns = '3'", "Env.max_turns: expected a positive integer, got '3'"),
    ("max_turns = True", "Env.max_turns: expected a positive integer, got True"),
    ("when_interrupted = 'wait'", r"Env.when_interrupted: expected one of \('keep', 'replay', 'restart'\), got 'wait'"),
    ("when_interrupted = []", r"Env.when_interrupted: expected one of .*, got \[\]"),
    ("tools = 'search'", "Env.tools: expected a list of functions, got 'search'"),
    ("tools = [3]", "Env.tools: expected a function or a Tool, got 3"),
    ("tools = [lambda: 1]", "Env.tools: tool '<lambda>': a name has 1-64 letters"),
    ("def f(self, x): ...\n    tools = [f]", "Env.tools: tool 'f': parameter 'x' has no type hint"),
    ("tools = [f, f]", "Env.tools: two tools are called 'f'"),
    ("def step(self, turn): ...", r"Env.step must be a coroutine: write `async def step"),
    ("def reset(self, sample): ...", "Env.reset must be a coroutine"),
    ("def close(self): ...", "Env.close must be a coroutine"),
    ("async def setup(self, args): ...", "Env.setup must be a class method"),
    ("async def step(self): ...", r"Env.step\(self\): expected the parameters \(self, turn\)"),
    ("async def reward(self, sample, extra): ...", "expected the parameters"),
]


@pytest.mark.parametrize(("body", "message"), BAD_CLASSES)
def test_bad_definitions(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        f"from agentrl import Environment\ndef f(x: int) -> int:\n    return x\nclass Env(Environment):\n    {body}\n"
    )
    with pytest.raises(PluginError, match=message) as caught:
        load_environment(f"{path}:Env")
    assert "bad.py:Env" in str(caught.value)


def test_an_agents_program_cannot_be_restarted_by_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    body = "from agentrl.envs import AgentEnvironment\nclass Env(AgentEnvironment):\n    when_interrupted = 'replay'\n"
    path.write_text(body)
    with pytest.raises(PluginError, match=r"Env.when_interrupted: expected one of \('keep',\), got 'replay'"):
        load_environment(f"{path}:Env")


def test_a_good_definition_with_everything_overridden() -> None:
    class Full(Environment):
        tools = (Tool(lambda: "x", name="f"),)

        def __init__(self, size: int = 3) -> None:
            self.size = size

        @classmethod
        async def setup(cls, args, more=None): ...  # type: ignore[no-untyped-def]

        async def step(self, turn, *rest): ...  # type: ignore[no-untyped-def]

    check_environment(Full)


def test_rooms_load_neither_torch_nor_ray() -> None:
    import subprocess
    import sys

    code = (
        "import sys, agentrl.envs, agentrl.tools, agentrl.tiny, agentrl.demo.task\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"
