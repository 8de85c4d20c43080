"""Cost of importing `rm_hub`, and functions that its modules must not call."""

import ast
import subprocess
import sys
from pathlib import Path

import agentrl.rm_hub
from tests.support.commands import processor_seconds

FOLDER = Path(agentrl.rm_hub.__file__).parent
EVERY = sorted(FOLDER.rglob("*.py"))
# The harness is source text for the sandbox, where it must run submitted code.
SOURCES = [path for path in EVERY if "harness" not in path.parts]
BANNED = {"eval", "exec", "compile", "sympify", "parse_expr", "parse_latex", "system", "popen"}


def test_importing_every_public_name_is_quick_and_light() -> None:
    every = "from agentrl.rm_hub import *"
    heavy = {"torch", "ray", "transformers", "sympy", "numpy", "httpx", "math_verify"}
    code = f"import sys\n{every}\nprint(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    settings = "import pydantic; pydantic.create_model('Settings', seed=(int, 1))"
    assert processor_seconds("-c", every) < 2.5 * processor_seconds("-c", settings)


def test_graders_that_wait_for_servers_or_sandboxes_are_light_before_they_are_used() -> None:
    code = (
        "import sys, agentrl.rm_hub.code, agentrl.rm_hub.llm_judge, agentrl.rm_hub.remote_rm\n"
        "assert not {'httpx', 'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_no_module_evaluates_text() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                plain = isinstance(function, ast.Name)
                of_re = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "re"
                if name in BANNED and (plain or not of_re):
                    found.append(f"{path.name}:{node.lineno} {name}")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", "") or ""
                names = [alias.name for alias in node.names]
                if {"pickle", "marshal", "shelve"} & {module, *names}:
                    found.append(f"{path.name}:{node.lineno} {module} {names}")
                if "harness" in module.split(".") and not {"encode", "NotPlain"}.issuperset(names):
                    found.append(f"{path.name}:{node.lineno} imports the harness")
                if module.startswith("sympy") and BANNED & set(names):
                    found.append(f"{path.name}:{node.lineno} {module} {names}")
    assert found == []


def test_every_module_says_what_it_is() -> None:
    assert [path.name for path in EVERY if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []
