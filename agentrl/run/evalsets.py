"""The evaluation sets that `--eval-prompt-data` names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunSettings
from agentrl.data.prompts import Look, PromptData
from agentrl.data.source import pending_group
from agentrl.errors import DataError, SettingsError
from agentrl.groups import Group


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Held-out prompts under a name."""

    name: str
    data: PromptData
    n_samples: int

    def groups(self) -> list[Group]:
        """Fresh groups of pending samples, one a prompt."""
        return [pending_group(row, row.index, self.n_samples, attempt="eval") for row in self.data]

    def check(self, look: Look = lambda row: None) -> None:
        """Read every row once, and show it to `look`, which may say what is wrong with it.

        Raises:
            DataError: a row is malformed.
        """
        with _named(self.name):
            self.data.check(look)


def eval_sets(settings: RunSettings) -> list[EvalSet]:
    """Open every set; a path without a name takes the file's.

    Raises:
        SettingsError: a name is given twice.
        DataError: a file is missing or empty.
    """
    pairs = name_paths(settings.rollout.eval_prompt_data)
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise SettingsError(f"--eval-prompt-data: each set needs its own name, got {', '.join(names)}")
    n_samples = settings.rollout.n_samples_per_eval_prompt
    return [EvalSet(name, _open(settings, name, path), n_samples) for name, path in pairs]


def _open(settings: RunSettings, name: str, path: str) -> PromptData:
    with _named(name):
        return PromptData(path, settings.data)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the set's flag and name in front of what is wrong with its data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"--eval-prompt-data {name}: {error}") from error


def name_paths(values: tuple[str, ...]) -> list[tuple[str, str]]:
    """`NAME PATH NAME PATH ...`, or one bare `PATH`, as pairs.

    Raises:
        SettingsError: a name without a path.
    """
    if len(values) == 1:
        return [(Path(values[0].split("@")[0]).stem, values[0])]
    if len(values) % 2:
        raise SettingsError(f"--eval-prompt-data expects NAME PATH pairs, got {' '.join(values)}")
    return list(zip(values[::2], values[1::2], strict=True))
