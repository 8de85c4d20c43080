"""Settings files, and precedence: flags over file over defaults."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.errors import SettingsError

NESTED = """
rollout:
  rollout-batch-size: 4
  n_samples_per_prompt: 2
train:
  lr: 1e-5
engine:
  sglang_options: {mem_fraction_static: 0.5}
  sglang_log_level: info
"""
FLAT = """
rollout_batch_size: 4
n_samples_per_prompt: 2
lr: 1e-5
sglang_mem_fraction_static: 0.5
sglang_log_level: info
"""
TOML = """
lr = 1e-5
[rollout]
rollout_batch_size = 4
n_samples_per_prompt = 2
[engine]
sglang_mem_fraction_static = 0.5
sglang_log_level = "info"
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def message(folder: Path, text: str, name: str = "run.yaml") -> str:
    with pytest.raises(SettingsError) as caught:
        RunSettings.from_file(write(folder, text, name))
    return str(caught.value)


@pytest.mark.parametrize(("text", "name"), [(NESTED, "run.yaml"), (FLAT, "run.yml"), (TOML, "run.toml")])
def test_forms_of_file_mean_the_same(tmp_path: Path, text: str, name: str) -> None:
    found = RunSettings.from_file(write(tmp_path, text, name))
    assert (found.rollout.rollout_batch_size, found.rollout.n_samples_per_prompt, found.train.lr) == (4, 2, 1e-5)
    assert found.engine.sglang_options == {"mem_fraction_static": 0.5, "log_level": "info"}


def test_a_section_name_that_is_a_setting_too_can_be_set_flat(tmp_path: Path) -> None:
    assert RunSettings.from_file(write(tmp_path, "engine: sglang\n")).engine.engine == "sglang"


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert RunSettings.from_file(write(tmp_path, "# nothing\n")) == RunSettings()


def test_flags_win_over_the_file_and_options_of_the_server_merge(tmp_path: Path) -> None:
    file = write(tmp_path, NESTED)
    found = RunSettings.from_cli(["--lr", "2e-5", "--config", file, "--sglang-log-level", "debug"])
    assert (found.train.lr, found.rollout.rollout_batch_size) == (2e-5, 4)
    assert found.engine.sglang_options == {"mem_fraction_static": 0.5, "log_level": "debug"}
    assert RunSettings.from_file(file, lr=3e-5).train.lr == 3e-5


_VALUES = {
    "rollout_temperature": st.floats(0, 2),
    "num_rollout": st.integers(1, 10_000),
    "seed": st.integers(0, 2**31),
    "use_wandb": st.booleans(),
    "optimizer": st.sampled_from(["adam", "muon"]),
    "wandb_project": st.text("abcxyz", min_size=1),
    "rollout_stop_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
}


def _flags(values: dict[str, object]) -> list[str]:
    out: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            out.append(flag if value else f"--no-{flag[2:]}")
        else:
            out += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return out


@settings(max_examples=60, deadline=None)
@given(
    low=st.fixed_dictionaries({}, optional=_VALUES),
    high=st.fixed_dictionaries({}, optional=_VALUES),
    nested=st.booleans(),
)
def test_precedence_of_flags_file_defaults(
    tmp_path_factory: pytest.TempPathFactory, low: dict[str, object], high: dict[str, object], nested: bool
) -> None:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in low.items()}
    document: dict[str, object] = plain
    if nested:
        document = {}
        for name, value in plain.items():
            section = document.setdefault(all_fields()[name].section, {})
            assert isinstance(section, dict)
            section[name] = value
    file = tmp_path_factory.getbasetemp() / "precedence.yaml"
    file.write_text(yaml.safe_dump(document))
    found = RunSettings.from_cli(["--config", str(file), *_flags(high)])
    flat, defaults = found.flat(), RunSettings().flat()
    for name in _VALUES:
        assert flat[name] == high.get(name, low.get(name, defaults[name]))
    assert found.given() == set(low) | set(high)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rollout:\n  rollout_bach_size: 4\n", ["run.yaml line 2", "rollout_bach_size", "did you mean rollout_batch_"]),
        ("lr: 1\nlrr: 2\n", ["run.yaml line 2", "unknown setting lrr"]),
        ("rolout:\n  lr: 1\n", ["run.yaml line 1", "did you mean", "rollout"]),
        ("rollout:\n  lr: 1\n", ["run.yaml line 2", "lr belongs under train"]),
        ("lr: 1\ntrain:\n  lr: 2\n", ["run.yaml line 3", "given twice", "line 1"]),
        ("lr: 1\nlr: 2\n", ["run.yaml line 2", "given twice", "line 1"]),
        ("train:\n  lr: fast\n", ["run.yaml line 2", "lr", "a number", "'fast'"]),
        ("train:\n  lr: yes\n", ["run.yaml line 2", "lr", "a number", "got True"]),
        ("num_rollout: true\n", ["run.yaml line 1", "a whole number", "got True"]),
        ("train: 3\n", ["run.yaml line 1", "train is a section"]),
        ("- lr\n", ["run.yaml", "name: value"]),
        ("lr: 1\nentropy_coef: 2020-99-99\n", ["run.yaml line 2, entropy_coef", "a number", "'2020-99-99'"]),
        ("seed: 0b_\n", ["run.yaml line 1, seed", "a whole number", "got '0b_'"]),
        (f"seed: {'9' * 10_001}\n", ["run.yaml line 1, seed", "a whole number", "got '9999"]),
        ("lr: 1\nseed: 99999999999999999999\n", ["run.yaml line 2, seed", "64-bit"]),
        (f"seed: 0x{'f' * 9999}\n", ["run.yaml", "numbers of a usual length"]),
        ("lr: 1\nentropy_coef: !!float x\n", ["run.yaml line 2", "tags (!!...)", "write the plain value"]),
        ("x: !!binary aa\n", ["run.yaml line 1", "tags"]),
        ("rollout_stop: &a [*a]\n", ["run.yaml line 1", "aliases"]),
        ("a: &a [x, x]\nrollout_stop: [*a, *a]\n", ["run.yaml line 2", "aliases"]),
        ("rollout_stop: " + "[" * 3000 + "]" * 3000, ["run.yaml", "nested too deep"]),
        ("lr: .nan\n", ["run.yaml line 1, lr", "a finite number", "got nan"]),
        ("trajectory_timeout: .inf\n", ["run.yaml line 1, trajectory_timeout", "a finite number", "got inf"]),
        ("sglang_x: .inf\n", ["run.yaml line 1, sglang_options", "a finite number", "'x'"]),
        ("apply_chat_template_kwargs: {a: [.nan]}\n", ["apply_chat_template_kwargs", "a finite number"]),
        ('wandb_name: "\\ud800"\n', ["run.yaml line 1, wandb_name", "surrogates"]),
        ("sglang_options: 3\nsglang_x: 4\n", ["run.yaml line 2, sglang_options", "KEY=VALUE", "got 3"]),
        ("compat_options: [1]\n", ["run.yaml line 1, compat_options", "KEY=VALUE", "got [1]"]),
        ("lr: [1\n", ["run.yaml", "not valid YAML"]),
        ("lr: 1\nrm_type: a: b\n", ["run.yaml line 2: not valid YAML", "in quotes", "The line is: rm_type: a: b"]),
        ("train:\n\tlr: 1\n", ["run.yaml line 2: not valid YAML", "indent with spaces, not with tabs"]),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    found = message(tmp_path, text)
    assert [part for part in parts if part not in found] == [], found


def test_words_that_flags_take_mean_the_same_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("progress: off\nsave_interval: none\nrecompute_granularity: none\ntool_call_parser: none\n")
    found = RunSettings.from_file(file)
    assert (found.observability.progress, found.train.save_interval) == ("off", None)
    assert (found.train.recompute_granularity, found.rollout.tool_call_parser) == (None, "none")


def test_a_number_without_a_dot_is_a_number_in_free_settings_too(tmp_path: Path) -> None:
    file = write(tmp_path, "env_args: {rate: 1e-5, big: -2E+3, name: e5, hex: 1e5x}\n")
    assert RunSettings.from_file(file).rollout.env_args == {"rate": 1e-5, "big": -2000.0, "name": "e5", "hex": "1e5x"}


def test_a_date_is_text(tmp_path: Path) -> None:
    file = write(tmp_path, "wandb_name: 2020-01-02\napply_chat_template_kwargs: {date_string: 2024-07-26}\n")
    found = RunSettings.from_file(file)
    assert found.observability.wandb_name == "2020-01-02"
    assert found.data.apply_chat_template_kwargs == {"date_string": "2024-07-26"}


def test_bad_toml(tmp_path: Path) -> None:
    assert "run.toml line 3" in message(tmp_path, "\n[train]\nlrr = 1\n", "run.toml")
    assert "not valid TOML" in message(tmp_path, "lr = = 1\n", "run.toml")
    assert "not valid TOML" in message(tmp_path, f"seed = {'9' * 10_001}\n", "run.toml")
    assert "numbers of a usual length" in message(tmp_path, f"seed = 0x{'f' * 9999}\n", "run.toml")
    assert "nested too deep" in message(tmp_path, "rollout_stop = " + "[" * 3000, "run.toml")
    assert "lr: expected a finite number; got inf" in message(tmp_path, "lr = inf\n", "run.toml")


def test_all_unknown_keys_come_at_once(tmp_path: Path) -> None:
    found = message(tmp_path, "lrr: 1\nrollout:\n  batch: 3\n")
    assert "line 1" in found
    assert "line 3" in found


def test_missing_file() -> None:
    with pytest.raises(SettingsError, match="no file"):
        RunSettings.from_cli(["--config", "does-not-exist.yaml"])


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 1600, "a: " + "{a: " * 1600, "a:\n" + "".join(f"{' ' * n}-\n" for n in range(1, 900))]
)
def test_nesting_without_end_is_refused_where_it_begins(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"seed: 1\n{text}")
    with pytest.raises(
        SettingsError, match=r"run.yaml line \d+: not valid YAML: lists or mappings are nested too deep, more than 64"
    ):
        RunSettings.from_file(tmp_path / "run.yaml")
