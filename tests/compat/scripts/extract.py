"""Rewrite the flag lists beside this file from a checkout of slime: `python -m tests.compat.scripts.extract SLIME`.

One file for each launch script: its command, then a line for each flag. `?` is a value known only at run time.
"""

import re
import shlex
import sys
from pathlib import Path

from agentrl.compat.script import read_script

HERE = Path(__file__).parent
FOLDERS = ("scripts", "examples", "slime_plugins", "tests")
ENVIRON = {"BASE_FOLDER": "/base", "BASE_DIR": "/base", "MASTER_ADDR": "127.0.0.1", "NUM_GPUS": "8"}
"""Variables that the user of a script must set."""


def _plain(text: str, slime: Path) -> str:
    """Remove the folders of this checkout, and of the container that the scripts are written for."""
    home = Path("/", "root")
    return text.replace(str(slime), "slime").replace(f"{home}/", "/container/")


def main(slime: Path) -> None:
    """Extract every script under `FOLDERS` that starts a training."""
    for script in sorted(found for folder in FOLDERS for found in (slime / folder).rglob("*.sh")):
        if not re.search(r"\btrain(_async)?\.py", script.read_text()):
            continue
        launch = read_script(script, ENVIRON)
        lines = [f"# {script.relative_to(slime)}: {'train_async.py' if launch.asynchronous else 'train.py'}"]
        for found in launch.flags:
            text = "?" if found.text is None else shlex.quote(_plain(found.text, slime))
            if found.text is not None and found.text.startswith("--"):
                lines.append(text)
            else:
                lines[-1] += f" {text}"
        (HERE / f"{script.stem}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
