"""Commands that are run to their end."""

import os
import signal
from pathlib import Path

import anyio

from agentrl.sandbox.command import run_command


async def test_a_process_of_another_group_that_holds_an_output_is_not_waited_for(tmp_path: Path) -> None:
    program = "setsid sh -c 'echo $$ > pid; exec sleep 600' & while [ ! -s pid ]; do :; done; echo done"
    with anyio.fail_after(300):
        result = await run_command(["sh", "-c", program], {"PATH": os.environ["PATH"]}, tmp_path, kill_rest=True)
    assert (result.exit_code, result.output) == (0, b"done\n")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it is still there
