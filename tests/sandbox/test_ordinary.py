"""Tests that the sandbox's system-call filter allows ordinary programs."""

import os

import pytest

from agentrl.sandbox import Sandbox
from tests.support.nightly import nightly

NICE = os.getpriority(os.PRIO_PROCESS, 0)
"""The nice value of the test process; the sandbox must not change it."""
ALONE = {
    "threads": """
import threading
found = []
threads = [threading.Thread(target=found.append, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert sorted(found) == [0, 1, 2, 3]
""",
    "clocks": "import time\nassert time.process_time() > 0 and time.thread_time() > 0 and time.monotonic() > 0",
    "processors": f"import os\nassert os.sched_getaffinity(0) and os.getpriority(0, 0) == {NICE} and os.getsid(0)",
    "event loop": """
import asyncio, socket
async def main():
    left, right = socket.socketpair()
    reader, ours = await asyncio.open_connection(sock=left)
    theirs, writer = await asyncio.open_connection(sock=right)
    writer.write(b"line\\n")
    assert await reader.readline() == b"line\\n"
    assert await asyncio.to_thread(lambda: 3) == 3
asyncio.run(main())
""",
    "database": "import sqlite3\nassert sqlite3.connect(':memory:').execute('select 1').fetchall() == [(1,)]",
    "timer": "import signal, time\nsignal.signal(14, lambda *_: None)\nsignal.setitimer(0, 0.01)\nsignal.pause()",
}
WITH_FILES = {
    "database": """
import sqlite3
for mode in ("delete", "wal"):
    one, two = sqlite3.connect("/tmp/base"), sqlite3.connect("/tmp/base")
    assert one.execute(f"pragma journal_mode={mode}").fetchall() == [(mode,)]
    one.execute("create table if not exists t (x)"); one.execute("insert into t values (1)"); one.commit()
    assert two.execute("select x from t").fetchall()[0] == (1,)
    two.execute("insert into t values (2)"); two.commit()
""",
    "locks": """
import fcntl
with open("/tmp/lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_UN)
""",
    "processes": """
import multiprocessing
def square(x): return x * x
with multiprocessing.Pool(2) as pool:
    assert pool.map(square, range(4)) == [0, 1, 4, 9]
queue = multiprocessing.Queue(); process = multiprocessing.Process(target=queue.put, args=(5,))
process.start(); assert queue.get() == 5; process.join()
""",
    "subprocess": """
import asyncio, subprocess, sys
assert subprocess.run([sys.executable, "-c", "print(input())"], input=b"x", capture_output=True).stdout == b"x\\n"
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
    assert (await child.communicate(b"y"))[0] == b"y\\n"
asyncio.run(main())
""",
}


@pytest.mark.parametrize("name", nightly(ALONE, 5))
async def test_programs_that_need_nothing(box: Sandbox, name: str) -> None:
    result = await box.run(ALONE[name])
    assert result.ok, result
    async with box.session() as session:
        assert (await session.run(ALONE[name])).ok


@pytest.mark.parametrize("name", nightly(WITH_FILES, 4))
async def test_programs_with_files_and_processes(box: Sandbox, name: str) -> None:
    if box.backend == "landlock":
        pytest.skip("the landlock backend allows no file writes and no subprocesses")
    result = await box.run(WITH_FILES[name])
    assert result.ok, result
