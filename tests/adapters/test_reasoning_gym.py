"""reasoning-gym as data source and grader equals the library: the same rows and scores, also after a resume."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Args
from agentrl.data.settings import DataSettings
from agentrl.data.source import RolloutDataSource
from agentrl.data.user_source import check_source, load_source
from agentrl.errors import DataError, GraderFailure, PluginError
from agentrl.rm_hub import grade
from agentrl.sample import Sample

reasoning_gym = pytest.importorskip("reasoning_gym")

PATH = "agentrl.adapters.reasoning_gym:ReasoningGymSource"
CHOSEN = {"chain_sum": {"weight": 3, "config": {"max_terms": 4}}, "leg_counting": {}, "rearc": {"weight": 0.5}}
SLOW = {"acre", "arc_agi", "futoshiki", "intermediate_integration", "word_ladder", "zebra_puzzles", "composite"}
"""Datasets that need seconds for one row."""


def written(folder: Path, chosen: dict[str, Any], **more: Any) -> DataSettings:
    rows = [json.dumps({"input": name, "metadata": said}) for name, said in chosen.items()]
    (folder / "datasets.jsonl").write_text("\n".join(rows))
    return DataSettings(prompt_data=str(folder / "datasets.jsonl"), data_source_path=PATH, **more)


def source(folder: Path, chosen: dict[str, Any], seed: int = 5, **more: Any) -> RolloutDataSource:
    settings = written(folder, chosen, **more)
    args = Args({**settings.model_dump(), "rollout_seed": seed, "n_samples_per_prompt": 2})
    found = load_source(settings, args)
    assert isinstance(found, RolloutDataSource)
    return found


def theirs(chosen: dict[str, Any], seed: int = 5) -> Any:
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(n, said.get("weight", 1.0), said.get("config", {})) for n, said in chosen.items()]
    return reasoning_gym.create_dataset("composite", size=1_000_000, seed=seed, datasets=specs)


def questions(groups: list[list[Sample]]) -> list[str]:
    return [group[0].prompt[-1]["content"] for group in groups]  # type: ignore[index]


def stored(sample: Sample) -> Sample:
    """Return the sample as the ledger returns it."""
    return Sample.from_dict(json.loads(json.dumps(sample.to_dict())))


def test_rows_and_scores_are_the_librarys(tmp_path: Path) -> None:
    ours, library, names = source(tmp_path, CHOSEN).get_samples(60), theirs(CHOSEN), []
    for index, group in enumerate(ours):
        entry, one = library[index], stored(group[0])
        assert (len(group), questions([group])) == (2, [entry["question"]])
        assert one.label == entry["answer"]
        for text in (entry["answer"], "<answer>42</answer>", f"42 <answer>\n{entry['answer']}</answer>", "none"):
            answer = text.partition("<answer>")[2].partition("</answer>")[0].strip() or text
            graded = grade("reasoning_gym", text, one.label, one.metadata)
            assert graded.score == library.score_answer(answer, entry)
            assert graded.correct == (graded.score == 1.0)
        names.append(entry["metadata"]["source_dataset"])
    assert set(names) == set(CHOSEN)
    assert names.count("chain_sum") > 30


def test_scores_are_those_of_the_rows_configuration(tmp_path: Path) -> None:
    """Both functions read their configuration: one a tolerance, the other a table of words."""
    decimals = {"min_num_decimal_places": 8, "max_num_decimal_places": 8, "precision": 12}
    words = {"min_word_length": 5, "max_word_length": 5, "size": 20}
    chosen = {"decimal_arithmetic": {"config": decimals}, "word_ladder": {"config": words}}
    library, scores = theirs(chosen), set()
    for index, group in enumerate(source(tmp_path, chosen).get_samples(20)):
        entry, one = library[index], stored(group[0])
        near = entry["answer"] if "," in entry["answer"] else str(Decimal(entry["answer"]) + Decimal("1e-7"))
        for answer in (entry["answer"], near):
            graded = grade("reasoning_gym", answer, one.label, one.metadata)
            assert graded.score == library.score_answer(answer, entry), graded.reason
            scores.add((entry["metadata"]["source_dataset"], graded.score))
    assert scores == {("decimal_arithmetic", 0.0), ("decimal_arithmetic", 1.0), ("word_ladder", 1.0)}


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loaded_source_goes_on_with_the_same_rows(tmp_path: Path, shuffle: bool) -> None:
    chosen = {**CHOSEN, "gcd": {"config": {"size": 40}}}
    unbroken = source(tmp_path, chosen, rollout_shuffle=shuffle)
    unbroken.get_samples(54)
    wanted = questions(unbroken.get_samples(9))
    first = source(tmp_path, chosen, rollout_shuffle=shuffle)
    first.get_samples(54)
    first.save(tmp_path / "state.json")
    again = source(tmp_path, chosen, rollout_shuffle=shuffle)
    again.load(tmp_path / "state.json")
    assert questions(again.get_samples(9)) == wanted, "also beyond the first epoch of 40 rows"
    for other in (source(tmp_path, CHOSEN), source(tmp_path, chosen, seed=6, rollout_shuffle=shuffle)):
        with pytest.raises(DataError, match="the saved source has"):
            other.load(tmp_path / "state.json")


@pytest.mark.slow
def test_scores_of_every_dataset_survive_the_ledger(tmp_path: Path) -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - SLOW):
        chosen = {name: {"config": {"size": 100}}}
        group, entry = source(tmp_path, chosen).get_samples(1)[0], theirs(chosen)[0]
        one, score = stored(group[0]), reasoning_gym.get_score_answer_fn(name)
        for answer in filter(None, (entry["answer"], "42")):
            graded = grade("reasoning_gym", answer, None, one.metadata)
            try:
                wanted = score(answer.strip(), entry)
            except Exception:  # noqa: BLE001
                assert (graded.score, graded.unjudged) == (0.0, "grader_crashed"), name
            else:
                assert graded.score == wanted, name


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "chain_sums": ({}, "'chain_sums' is no dataset of reasoning-gym"),
        "chain_sum": ({"config": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        "gcd": ({"weight": 0}, "Weight must be positive"),
        "rearc": ({"wieght": 2}, "field 'wieght' of the metadata has no effect; expected weight or config"),
    }
    for name, (said, message) in wrong.items():
        rows = written(tmp_path, {"leg_counting": {}, "tsumego": {"weight": 2}, name: said})
        with pytest.raises(DataError, match=f"datasets.jsonl line 3: .*{message}"):
            check_source(rows)
        with pytest.raises(DataError, match=f"datasets.jsonl line 3: .*{message}"):
            source(tmp_path, {"leg_counting": {}, "tsumego": {"weight": 2}, name: said}, prompt_data_check="lazy")
    settings = DataSettings(data_source_path=PATH)
    with pytest.raises(PluginError, match="needs --prompt-data with rows as"):
        load_source(settings, Args({**settings.model_dump(), "rollout_seed": 1, "n_samples_per_prompt": 1}))
    with pytest.raises(GraderFailure, match="grades rows of"):
        grade("reasoning_gym", "42", "42", {})
