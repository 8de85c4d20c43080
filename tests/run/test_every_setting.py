"""Real runs with and without each setting: their results differ, or they fail with a message (tests.config.toggles)."""

import json
from pathlib import Path

import pytest

from tests.config.toggles import BASE, CONTEXTS, PLUGINS, RUNS
from tests.support.produced import produced
from tests.support.runs import RunKit
from tests.support.tiny_models import make_tiny_model
from tests.support.toggled import flag

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make models, templates, rows of every kind, a dump, and a run that has started."""
    desk = Path(tmp_path_factory.mktemp("desk"))
    RunKit.make(desk, prompts=40)
    make_tiny_model(desk / "other", seed=3)
    (desk / "plugins.py").write_text(PLUGINS)
    template = (desk / "model" / "chat_template.jinja").read_text()
    (desk / "shouting.jinja").write_text("{%- if shout %}{{- 'LOUD ' }}{%- endif %}" + template)
    (desk / "greeting.jinja").write_text("{{- 'Hello. ' }}" + template)
    schema = {"name": "x", "description": "d", "parameters": {"type": "object", "properties": {}}}
    more = {
        "env": "A",
        "which": "B",
        "meta2": {"rm_type": "random"},
        "tools2": [{"type": "function", "function": schema}],
    }
    _write(desk / "rows.jsonl", [{"input": f"Count {i}", "label": str(i), **more} for i in range(9)])
    turns = [{"role": role, "content": "words"} for role in ("user", "assistant", "user", "assistant")]
    _write(desk / "chats.jsonl", [{"messages": turns} for _ in range(9)])
    (desk / "broken.jsonl").write_text((desk / "prompts.jsonl").read_text() + '{"input')
    (desk / "eval.yaml").write_text("eval:\n  datasets:\n    - {name: dev, path: 'prompts.jsonl@[0:2]'}\n")
    return desk


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    if not (desk / "kept").exists():
        assert produced(BASE, "--save-debug-rollout-data kept --output-dir begun --num-rollout 2")["failed"] == ""


@pytest.mark.parametrize("context", RUNS)
def test_each_setting_changes_what_a_run_produces(context: str) -> None:
    base = produced(BASE, CONTEXTS[context])
    assert produced(BASE, CONTEXTS[context]) == base, "two runs of the same settings differ"
    without = [
        name for name, value in RUNS[context].items() if produced(BASE, CONTEXTS[context], flag(name, value)) == base
    ]
    assert without == [], "settings that change nothing"
