"""Conversations of `agentrl rollout` with a hosted model, as `agentrl sft` reads them: `demonstrations.jsonl`.

A row has `messages` up to the assistant's last one, `tools` if there were any, `reward`, and where it is from: `rollout`,
`group_index`, `index`. Trajectories that failed or were cut off are left out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from agentrl.files import write_atomic
from agentrl.groups import Group
from agentrl.sample import Sample, Status


class RecordedConversations:
    """The file at `path`. What it has of rollout `first` and later ones is dropped: these are played again. `reward_key`
    picks from dict rewards; only rewards of at least `least` are kept."""

    def __init__(self, path: Path, first: int, reward_key: str | None = None, least: float | None = None) -> None:
        self._path, self._key, self._least = path, reward_key, least
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # A kill may have cut the last line.
        kept = [line for line in lines if line.endswith(b"\n") and orjson.loads(line)["rollout"] < first]
        write_atomic(path, b"".join(kept))

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Append the conversations of a rollout."""
        samples = (sample for group in groups for sample in group)
        rows = [{**row, "rollout": step} for sample in samples for row in self._rows(sample)]
        with self._path.open("ab") as file:
            file.write(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))

    def _rows(self, sample: Sample) -> Iterator[dict[str, Any]]:
        if sample.status is not Status.COMPLETED or sample.remove_sample:
            return
        reward, messages = sample.get_reward_value(self._key), sample.metadata["messages"]
        if self._least is not None and reward < self._least:
            return
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        tools = {"tools": tools} if (tools := sample.metadata.get("tools")) else {}
        about = {"reward": reward, "group_index": sample.group_index, "index": sample.index}
        yield {"messages": messages[: last + 1], **tools, **about}
