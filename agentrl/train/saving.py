"""Checkpoints in progress. All ranks begin a checkpoint together, and finish it together. With `async_save`, a thread
of each rank writes a copy of the state in between, while training continues."""

import datetime
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from agentrl.errors import CheckpointError
from agentrl.runfolder import CRITIC
from agentrl.train.checkpoints import replace_folder

WriteFiles = Callable[[], Any]  # writes a rank's files. Collective.


class Background(ThreadPoolExecutor):
    """A thread that writes checkpoints, and a process group for these threads on all ranks. Collective."""

    def __init__(self, minutes: int) -> None:
        self.group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=max(minutes, 30)))
        super().__init__(1, thread_name_prefix="checkpoint")


@dataclass(frozen=True, slots=True)
class Saving:
    """One model's checkpoint in progress."""

    path: Path  # the checkpoint's folder
    partial: Path  # the folder that gets the files
    folder: ExitStack  # renames `partial` to `path` when it closes
    files: WriteFiles | Future[Any]  # a function that writes the files, or the result of the thread that runs it
    critic: "Saving | Path | None"  # the critic's: in progress, or a folder that rank 0 moves into this one

    def written(self) -> bool:
        """Return true if `finish` would not wait for this rank's thread."""
        done = not isinstance(self.files, Future) or self.files.done()
        return done and (not isinstance(self.critic, Saving) or self.critic.written())

    def finish(self) -> None:
        """Complete the checkpoint. Collective. Raises CheckpointError: its files could not be written."""
        with write_errors(self.path), self.folder:  # leaving `folder` writes the manifest
            self.files.result() if isinstance(self.files, Future) else self.files()
            if isinstance(self.critic, Saving):
                self.critic.finish()
            elif self.critic is not None:
                replace_folder(self.critic, self.partial / CRITIC)


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise any error of the block as a CheckpointError about the checkpoint at `path`."""
    try:
        yield
    except CheckpointError:  # it names the critic's folder
        raise
    # Torch's writer has no error type for a full disk and does not name the cause, so the message gives the free space.
    except (Exception, CheckpointException) as error:
        free = shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free / 2**20
        raise CheckpointError(
            f"{path} could not be written, with {free:.1f} MiB free on its disk: {last_line(error)}; "
            "earlier checkpoints are whole. Make room, or give another --save and the folder of these as --load, and start the same "
            "command again"
        ) from error


def last_line(error: BaseException) -> str:
    """Return the last line of an error: torch's report of all ranks ends a page of tracebacks with the cause."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
