"""Write the flag lists beside this file again, from a checkout of slime: `python -m tests.compat.scripts.extract SLIME`.

One file a launch script: its command, then a flag and its values a line. `?` is what only running it would tell.
"""

import re
import shlex
import sys
from pathlib import Path

from agentrl.compat.script import read_script

HERE = Path(__file__).parent
FOLDERS = ("scripts", "examples", "slime_plugins", "tests")
ENVIRON = {"BASE_FOLDER": "/base", "BASE_DIR": "/base", "MASTER_ADDR": "127.0.0.1", "NUM_GPUS": "8"}
"""What the scripts ask of whoever starts them."""


def _plain(text: str, slime: Path) -> str:
    """Without the folders of this checkout, and of the container that the scripts are written for."""
    home = Path("/", "root")
    return text.replace(str(slime), "slime").replace(f"{home}/", "/container/")


def main(slime: Path) -> None:
    """Every script under `FOLDERS` that starts a training."""
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
