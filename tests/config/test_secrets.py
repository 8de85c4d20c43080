"""Secrets among the settings: used, but never shown or written."""

import io
import json
import re
from pathlib import Path

import click
import pytest
from rich.console import Console

from agentrl.cli.main import agentrl as agentrl_group
from agentrl.cli.main import run as agentrl
from agentrl.config import RunSettings
from agentrl.config.dry_run import show
from agentrl.config.fields import all_fields
from agentrl.errors import SECRET, AgentRLError, SettingsError
from agentrl.run.driver import open_folder
from agentrl.settings import shown

LINE = (
    "--engine external --sglang-api-key SEKRET --sglang-ssl-key-password SEKRET --sglang-tp-size 2 --label-key answer "
    "--judge-url https://me:SEKRET@judge/v1 --rm-url http://rm/score?model=m&api_key=SEKRET&x=1 "
    "--rollout-external-engine-addrs http://u:SEKRET@a:1"
)


def build(line: str = LINE) -> RunSettings:
    return RunSettings.from_cli(line.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_dry_run_shows_what_is_no_secret(terminal: bool) -> None:
    out = io.StringIO()
    show(build(), Console(file=out, force_terminal=terminal, width=200))
    assert "SEKRET" not in out.getvalue()
    for kept in ("answer", "tp_size", "judge/v1", "model=m", "x=1", "a:1"):
        assert kept in out.getvalue()


def test_nothing_that_prints_settings_prints_secrets() -> None:
    settings = build()
    for text in (repr(settings), str(settings.engine), repr(settings.args)):
        assert "SEKRET" not in text
        assert SECRET in text
    assert settings.args.sglang_api_key == "SEKRET"


def test_errors_hide_what_urls_and_keys_hold() -> None:
    assert str(AgentRLError("no answer from https://u:SEKRET@host/p@th?token=SEKRET")) == (
        f"no answer from https://{SECRET}@host/p@th?token={SECRET}"
    )
    with pytest.raises(SettingsError) as raised:
        RunSettings.from_flat({"sglang_options": {"api_key": {"a": "SEKRET"}}})
    assert "SEKRET" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "--rm-url http://h/x?token=SEKRET&sig=SEKRET",
        "--rm-url http://h/x?X-Amz-Signature=SEKRET",
        "--judge-url http://h/x?apiKey=SEKRET",
        "--sglang-api-kee SEKRET",
        "--sglang-authorization SEKRET",
        '--sglang-options {"apiKey":"SEKRET","headers":["Bearer\\u0020SEKRET"]}',
    ],
)
def test_secrets_under_other_names_are_hidden_too(line: str) -> None:
    out, settings = io.StringIO(), build(line)
    show(settings, Console(file=out, width=200))
    assert "SEKRET" not in out.getvalue() + repr(settings) + repr(settings.args)
    assert SECRET in out.getvalue()


@pytest.mark.parametrize(
    "line",
    [
        "train --api-key SEKRET",
        "train --hf-token=SEKRET --lr much",
        "train --judge-passwrd SEKRET extra",
        "train --wandb-key SEKRET",
        "train --sglang-api-kee SEKRET --lr much",
        "eval --api_kee=-SEKRET",
        "gateway --owner-key SEKRET --sglang-api-kee=SEKRET http://h:1",
        "serve --admin-api-kee SEKRET model",
        "router --sglang-apikey=SEKRET http://h:1",
    ],
)
def test_an_unknown_flag_is_refused_without_its_value(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.err
    assert "SEKRET" not in printed.out + printed.err


def test_each_flag_for_a_secret_names_its_environment_variable() -> None:
    secret = re.compile(r"((api|owner)_key|token|secret|passw\w*)$")
    assert [name for name in all_fields() if secret.search(name)] == []  # settings name a variable instead
    context, found = click.Context(agentrl_group), []
    for command in agentrl_group.list_commands(context):
        for option in agentrl_group.get_command(context, command).params:  # type: ignore[union-attr]
            if isinstance(option, click.Option) and secret.search(option.name or ""):
                found.append((command, option.name))
                assert option.envvar, found[-1]
                assert option.show_envvar, found[-1]
    assert {("gateway", "owner_key"), ("router", "sglang_api_key"), ("serve", "admin_api_key")} <= set(found)
    assert "SGLANG_ADMIN_API_KEY give" in str(all_fields()["sglang_options"].info.description)


@pytest.mark.parametrize("line", ["sglang_api_key: a: SEKRET", "sglang_options: {'api_key': a: SEKRET}"])
def test_a_line_of_a_file_is_told_without_its_secret(tmp_path: Path, line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"lr: 1\n{line}\n")
    with pytest.raises(SettingsError, match=r"run\.yaml line 2: not valid YAML") as raised:
        RunSettings.from_file(file)
    assert "SEKRET" not in str(raised.value)


@pytest.mark.parametrize("name", ["monkey", "size", "design", "author", "tokenizer_path", "max_tokens", "capital"])
def test_other_names_are_shown(name: str) -> None:
    assert shown({name: "value"}) == {name: "value"}


def test_keys_in_a_command_are_hidden() -> None:
    command = "KEY_API=1 API_KEY=SEKRET cli --api-key 'SEK RET' --token=SEKRET --max-tokens 5 {prompt}"
    hidden = "KEY_API=1 API_KEY=<secret-not-kept> cli --api-key <secret-not-kept> --token=<secret-not-kept>"
    assert shown("a-" * 100_000) == "a-" * 100_000, "in no time"
    assert shown({"agent": command}) == {"agent": f"{hidden} --max-tokens 5 {{prompt}}"}


def test_a_new_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with open_folder(build(f"--output-dir {tmp_path / 'run'}")) as folder:
        assert folder.path.stat().st_mode & 0o077 == 0


def test_the_file_of_a_run_has_none_and_asks_for_them_again(tmp_path: Path) -> None:
    with open_folder(build(f"{LINE} --output-dir {tmp_path}")) as folder:
        file = folder.path / "settings.json"
    written = json.loads(file.read_text())
    assert "SEKRET" not in file.read_text()
    assert written["data"]["label_key"] == "answer"
    assert written["engine"]["sglang_options"]["tp_size"] == 2
    with pytest.raises(SettingsError, match=r"settings\.json line \d+, judge_url: it was saved without its secret"):
        RunSettings.from_file(file)
    again = "--sglang-api-key A --sglang-ssl-key-password B --judge-url c --rm-url d --rollout-external-engine-addrs e"
    found = RunSettings.from_cli(["--config", str(file), *again.split()])
    assert found.engine.sglang_options == {"api_key": "A", "ssl_key_password": "B", "tp_size": 2}
