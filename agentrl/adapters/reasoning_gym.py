"""The tasks of reasoning-gym: `--data-source-path agentrl.adapters.reasoning_gym:ReasoningGymSource` makes the prompts, and
`--rm-type reasoning_gym` gives the library's own scores. Each row of `--prompt-data` names one dataset:

    {"input": "chain_sum", "metadata": {"weight": 2, "config": {"max_terms": 4}}}
    {"input": "leg_counting"}"""

import ast
import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from agentrl.data.prompts import PromptRow
from agentrl.data.source import RolloutDataSource
from agentrl.errors import GraderFailure, PluginError, raised_as
from agentrl.rm_hub.grade import Grade

SIZE = 1_000_000  # rows of an epoch, if no dataset's config has a smaller `size`
_ENTRY = "reasoning_gym"


class ReasoningGymSource(RolloutDataSource):
    """Rows of the library's composite dataset, drawn by weight with the seed `--rollout-seed`. Order, epochs, saving and
    loading are those of the built-in source."""

    def __init__(self, dataset: Any, args: Any) -> None:
        """Make the composite of the datasets that the rows of `dataset` name. Raises PluginError: there are no rows, or
        the library cannot combine them. DataError: a row is wrong."""
        if dataset is None:
            raise PluginError('ReasoningGymSource needs --prompt-data with rows as {"input": "chain_sum"}')
        dataset.check(self.check_prompt_row)
        self._chosen = [(row.prompt, row.metadata) for row in map(dataset.__getitem__, range(len(dataset)))]
        super().__init__(_Rows(self._chosen, args.rollout_seed), args)

    @staticmethod
    def check_prompt_row(row: PromptRow) -> str | None:
        """Describe why a row does not give a dataset of the library, its weight and its configuration; None if it does."""
        if not isinstance(row.prompt, str) or row.prompt not in DATASETS:
            return f"{row.prompt!r:.100} is no dataset of reasoning-gym"
        if unknown := sorted(row.metadata.keys() - {"weight", "config"}):
            return f"field {unknown[0]!r} of the metadata has no effect; expected weight or config"
        try:
            (spec := _spec(row.prompt, row.metadata)).validate()
            config = DATASETS[row.prompt][1](**spec.config)
            getattr(config, "validate", lambda: None)()
        except (AssertionError, TypeError, ValueError) as error:
            return f"{row.prompt}: {error}"
        return None

    def identity(self) -> dict[str, object]:
        """Return the values that determine the meaning of a group number: also the datasets and their seed."""
        chosen = json.dumps(self._chosen, sort_keys=True)
        return {**super().identity(), "rollout_seed": self.args.rollout_seed, "reasoning_gym": chosen}


class _Rows:
    def __init__(self, chosen: list[tuple[Any, dict[str, Any]]], seed: int) -> None:
        specs = [_spec(name, said) for name, said in chosen]
        self._configs = {spec.name: spec.config for spec in specs}
        size = min([SIZE, *(spec.config["size"] for spec in specs if "size" in spec.config)])
        what = "--prompt-data: no composite dataset of reasoning-gym"
        with raised_as(PluginError, what, AssertionError, TypeError, ValueError):
            self._made: Any = reasoning_gym.create_dataset("composite", size=size, seed=seed, datasets=specs)

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> PromptRow:
        entry = self._made[index]
        system = {"role": "system", "content": SYSTEM_PROMPTS["default"]}
        prompt = [system, {"role": "user", "content": entry["question"]}]
        config = self._configs[entry["metadata"]["source_dataset"]]
        return PromptRow(index, prompt, entry["answer"], {_ENTRY: _kept({**entry, "config": config})})


def _spec(name: str, said: Mapping[str, Any]) -> DatasetSpec:
    return DatasetSpec(name, said.get("weight", 1.0), said.get("config", {}))


def grade(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Score the text of the last `<answer>`, or the whole answer if it has none, with the dataset's own function. An answer
    for which this function raises has score 0. Raises GraderFailure: the row is not from `ReasoningGymSource`."""
    if not isinstance(kept := metadata.get(_ENTRY), str):
        what = "--rm-type reasoning_gym grades rows of agentrl.adapters.reasoning_gym:ReasoningGymSource"
        raise GraderFailure(what, kind="grader_no_entry")
    entry = ast.literal_eval(kept)
    answer = extract_answer(response) or response.strip()
    dataset = _dataset(entry["metadata"]["source_dataset"], json.dumps(entry.pop("config", {})))
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # noqa: BLE001 - some functions raise for answers that they cannot read
        return Grade(0.0, False, answer, f"the dataset's function raised {error!r:.300}", unjudged="grader_crashed")
    return Grade(score, score >= 1.0, answer)


@functools.cache
def _dataset(name: str, config: str) -> Any:
    kind, settings = DATASETS[name]
    return kind(settings(**json.loads(config)))


def _kept(entry: dict[str, Any]) -> str:
    """Return the entry as a Python literal, which keeps tuples, and keys that are numbers, unlike JSON."""
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if ast.literal_eval(text := repr(entry)) == entry:
            return text
    return repr(json.loads(json.dumps(entry, default=str)))
