"""Settings files of retrain: the acceptance data of `documents/`, written from retrain's document before the code."""

import csv
import inspect
import json
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.compat import retrain
from agentrl.config import RunSettings
from agentrl.errors import SettingsError

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open() as lines:
        return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


@cache
def parsed(document: str) -> Any:
    return yaml.safe_load((HERE / "documents" / f"{document}.yaml").read_text())


@cache
def read(document: str) -> RunSettings:
    return RunSettings.from_file(HERE / "documents" / f"{document}.yaml")


def changed(key: str, value: Any, document: str = "whole") -> Any:
    whole = at = deepcopy(parsed(document))
    *above, last = key.split(".")
    for name in above:
        at = at.setdefault(name, {})
    at[last] = value
    return whole


def settings_of(document: Any, folder: Path, **more: Any) -> RunSettings:
    (folder / "retrain.yaml").write_text(yaml.safe_dump(document))
    return RunSettings.from_file(folder / "retrain.yaml", **more)


@pytest.mark.parametrize("row", rows("accepted.tsv"), ids=lambda row: f"{row['document']}-{row['setting']}")
def test_what_the_document_says_is_a_setting(row: dict[str, str]) -> None:
    assert read(row["document"]).flat()[row["setting"]] == json.loads(row["value"])


@pytest.mark.parametrize("row", rows("refused.tsv"), ids=lambda row: row["key"])
def test_what_is_wrong_is_said_with_its_line_and_key(row: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^retrain.yaml line \d+, ") as caught:
        settings_of(changed(row["key"], json.loads(row["value"])), tmp_path)
    assert not [word for word in row["words"].split() if word not in str(caught.value)]


@pytest.mark.parametrize("row", rows("classes.tsv"), ids=lambda row: row["class"])
def test_every_class_that_the_document_names_is_there(row: dict[str, str]) -> None:
    found = getattr(retrain, row["class"])
    assert all(callable(getattr(found, method)) for method in (row["methods"] or "").split())
    assert inspect.getdoc(found)


@pytest.mark.parametrize("row", [r for r in rows("behaviours.tsv") if r["test"]], ids=lambda row: row["behaviour"])
def test_every_behaviour_has_its_test(row: dict[str, str]) -> None:
    file, _, name = row["test"].partition("::")
    assert f"def {name}(" in (HERE / file).read_text()


@pytest.mark.parametrize("section", ["algorithm", "model", "environment", "prompt_source", "reward_setup"])
@pytest.mark.parametrize("value", [3, "x", [1], {"a": {"b": 1}}])
def test_a_section_of_another_shape_is_an_error_of_ours(section: str, value: Any, tmp_path: Path) -> None:
    document = changed(section, value)
    with pytest.raises(SettingsError):
        settings_of(document, tmp_path)


OF_OTHER_KIND = """algorithm.hyperparameters environment.env_specific_config prompt_source.source_config
    reward_setup.step_reward_configs batch_size num_episodes algorithm.hyperparameters.learning_rate
    algorithm.hyperparameters.num_generations"""


@pytest.mark.parametrize("key", OF_OTHER_KIND.split())
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, -1.5])
def test_a_value_of_another_kind_is_an_error_of_ours(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=key.rpartition(".")[2]):
        settings_of(changed(key, value), tmp_path)


def test_episodes_become_rollouts_of_whole_groups(tmp_path: Path) -> None:
    settings = settings_of(changed("batch_size", 12), tmp_path)
    assert (settings.rollout.n_samples_per_prompt, settings.rollout.rollout_batch_size) == (6, 2)
    assert settings.rollout.num_rollout == 3  # 32 episodes of 12 each
    with pytest.raises(SettingsError, match="12 episodes are not whole groups of 5"):
        settings_of(changed("algorithm.hyperparameters.num_generations", 5) | {"batch_size": 12}, tmp_path)


def test_hyperparameters_win_over_episodes_and_functions_find_both(tmp_path: Path) -> None:
    settings = settings_of(
        changed("algorithm.hyperparameters", {"num_iterations": 7, "rollout_batch_size": 3}), tmp_path
    )
    assert (settings.rollout.num_rollout, settings.rollout.rollout_batch_size) == (7, 3)
    assert (settings.args.num_episodes, settings.args.batch_size) == (32, 16)


def test_beta_is_the_weight_of_a_kl_loss(tmp_path: Path) -> None:
    settings = settings_of(changed("algorithm.hyperparameters", {"beta": 0.1}), tmp_path)
    assert (settings.algorithm.use_kl_loss, settings.algorithm.kl_loss_coef) == (True, 0.1)


@pytest.mark.parametrize(
    ("name", "key"), [("use_retrain_environment", "env"), ("use_retrain_rewards", "custom_rm_path")]
)
def test_a_bridge_can_be_left_out(name: str, key: str, tmp_path: Path) -> None:
    assert settings_of(changed(f"algorithm.hyperparameters.slime_{name}", True), tmp_path).flat()[key] is not None
    assert settings_of(changed(f"algorithm.hyperparameters.slime_{name}", False), tmp_path).flat()[key] is None


def test_top_p_is_replayed_or_needs_consent(tmp_path: Path) -> None:
    document = changed("algorithm.hyperparameters.slime_rollout_top_p", 0.9)
    assert settings_of(document, tmp_path).rollout.replays_truncation
    assert not settings_of(document, tmp_path, allow_truncated_sampling=True).rollout.replays_truncation


def test_a_flag_wins_and_one_thing_said_twice_must_agree(tmp_path: Path) -> None:
    assert settings_of(changed("model.torch_dtype", "float32"), tmp_path, bf16=True).train.bf16
    both = changed("algorithm.hyperparameters.slime_bf16", True)
    both["model"]["torch_dtype"] = "bfloat16"
    assert settings_of(both, tmp_path).train.bf16
    both["model"]["torch_dtype"] = "float32"
    with pytest.raises(SettingsError, match=r"bf16 is given twice \(also retrain.yaml line \d+, model.torch_dtype"):
        settings_of(both, tmp_path)


def test_a_file_of_ours_is_read_as_before() -> None:
    code = (
        "import sys; from agentrl.config import RunSettings; from agentrl.compat.retrain import TrainingConfig;"
        f"TrainingConfig.from_yaml({str(HERE / 'documents/whole.yaml')!r}).settings(lr=2e-5);"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"
