"""The first lines of a zygote, as text. They read the modules of `inside` from a descriptor instead of from files."""

from pathlib import Path

PACKAGE = "agentrl.sandbox.inside"
ORDER = ("frames", "kernel", "syscalls", "filters", "jail", "runner", "child", "jailer", "zygote")
"""The order of import: each module imports only earlier modules."""
SCRIPT = f"""
import json, os, socket, sys, types
control, lifeline, source = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
with os.fdopen(source, "rb") as file:
    message = json.load(file)
name = ""
for part in "{PACKAGE}".split("."):
    name = f"{{name}}.{{part}}".lstrip(".")
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = []
for part, text in message["modules"].items():
    module = types.ModuleType(f"{PACKAGE}.{{part}}")
    module.__file__ = f"<sandbox>/{{part}}.py"
    sys.modules[module.__name__] = module
    setattr(package, part, module)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
package.zygote.main(control, lifeline, message["settings"])
"""


def modules() -> dict[str, str]:
    folder = Path(__file__).parent / "inside"
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in ORDER}
