"""Processes from `warm.python()` behave like those of an interpreter, with and without `--warm`."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.warm import python


def test_arguments_streams_folder_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['A'], __name__); sys.exit(sys.stdin.read())"
    command = [python(), "-u", "-X", "utf8", "-c", code, "one", "two words"]
    environment = {"A": "b", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, input="why", capture_output=True, text=True, cwd=tmp_path, env=environment)
    said = f"['-c', 'one', 'two words'] {tmp_path} b __main__\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, said, "why\n")


def test_a_module_and_an_open_file() -> None:
    done = subprocess.run([python(), "-m", "agentrl", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("agentrl ")
    ours, theirs = os.pipe()
    with os.fdopen(ours) as read:
        subprocess.run([python(), "-c", f"import os; os.write({theirs}, b'here')"], pass_fds=[theirs], check=True)
        os.close(theirs)
        assert read.read() == "here"


def test_a_program_that_is_no_module_and_an_interpreter_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    for flags in ([], ["-I", "-S"]):
        command = [python(), *flags, str(tmp_path / "program.py"), "-x"]
        assert subprocess.check_output(command, text=True) == "['-x']\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen(
        [python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.stdout.read() == "", "the process is gone"
        assert process.wait() in (-number, 1 if number == signal.SIGINT else -number)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


def test_what_ends_by_an_error_says_it() -> None:
    done = subprocess.run([python(), "-c", "import torch\n1 / 0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_signals_itself_ends_so(number: signal.Signals) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    assert subprocess.run([python(), "-c", code], capture_output=True, text=True).returncode == -number
