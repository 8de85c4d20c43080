"""The software-engineering example: reference and empty patches, attacks on the hidden tests, both forms end to end."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.config import RunSettings
from agentrl.envs import load_environment
from agentrl.sample import Sample
from agentrl.tools import ToolError
from examples.swe_small.catalog import BUGS
from examples.swe_small.env import SweAgentEnv, SweEnv
from examples.swe_small.grading import PYTHON, grade
from examples.swe_small.tasks import make_task, results, rows, write_files
from tests.gateway.acceptance_engine import hermes
from tests.rollout.scripted import END, build
from tests.rollout.test_agents import played
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
TASK = make_task(0)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return Chat.load(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(TASK.files, tmp_path / "repository")
    return tmp_path / "repository"


@pytest.mark.parametrize("number", nightly(range(20), everyday=(0, 7, 13)))
async def test_the_oracle_patch_passes_and_the_empty_patch_fails(number: int, tmp_path: Path) -> None:
    task = make_task(number)
    write_files(task.files, tmp_path)
    assert await grade(task, tmp_path) == 0.0
    write_files(task.oracle, tmp_path)
    assert await grade(task, tmp_path) == 1.0


def test_a_task_with_one_failing_call_has_a_hidden_test_that_fails() -> None:
    task = make_task(8, 7)
    assert list(task.expected) != results(BUGS[8].broken, task.calls)


@pytest.mark.parametrize("seed", nightly(range(5), everyday=(0,)))
def test_tasks_are_reproducible_and_hidden_tests_are_not_shown(seed: int) -> None:
    assert len({bug.module for bug in BUGS}) == len(rows(seed)) == 20
    for number, bug in enumerate(BUGS):
        task = make_task(number, seed)
        assert task == make_task(number + 20, seed)
        assert results(bug.source, task.calls) == list(task.expected) != results(bug.broken, task.calls)
        visible = json.dumps([task.files, task.prompt])
        assert not any(call in visible for call in task.calls)
    assert make_task(0, seed) != make_task(0, seed + 1)


FORGED = f"import os\nos.write(1, {json.dumps(list(TASK.expected)).encode()!r})\n"
ATTACKS = {
    "conftest.py": "import os\nos._exit(0)\n",
    "sitecustomize.py": FORGED,
    "usercustomize.py": FORGED,
    "json.py": "def loads(text): return []\ndef dumps(value): return '[]'\n",
    "importlib/__init__.py": "def import_module(name): return None\n",
    "pytest.py": "def main(*args): return 0\n",
    "unittest.py": "def main(*args): return 0\n",
    TASK.module: "import os\nos._exit(0)\n",
    TASK.module.replace("spans", "__init__"): "import os, sys\nos.write(1, b'[]')\nsys.exit(0)\n",
}


@pytest.mark.parametrize("path", ATTACKS)
async def test_a_file_that_attacks_the_tests_earns_nothing(path: str, folder: Path) -> None:
    write_files({path: ATTACKS[path]}, folder)
    assert await grade(TASK, folder) == 0.0


@pytest.mark.parametrize("path", ["conftest.py", "sitecustomize.py", "json.py", "pytest.py"])
async def test_such_files_do_not_disturb_a_right_patch(path: str, folder: Path) -> None:
    write_files({path: ATTACKS[path], **TASK.oracle}, folder)
    assert await grade(TASK, folder) == 1.0


async def test_links_and_pipes_are_not_copied(folder: Path, tmp_path: Path) -> None:
    write_files(TASK.oracle, tmp_path / "elsewhere")
    (folder / TASK.module).unlink()
    (folder / TASK.module).symlink_to(tmp_path / "elsewhere" / TASK.module)
    os.mkfifo(folder / "pipe.py")
    assert await grade(TASK, folder) == 0.0


async def call(env: SweEnv, name: str, **arguments: Any) -> str:
    return (await env.toolbox.run(name, arguments, state=env)).text


async def test_commands_see_no_hidden_tests_and_leave_no_process(tmp_path: Path) -> None:
    env = SweEnv()
    await env.reset(Sample(metadata={"task": 0}))
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", Path("examples/swe_small/catalog.py").resolve()):
        assert path.exists()
        assert "No such file" in await call(env, "run_command", command=f"cat {path}")
    hides = f"nohup {PYTHON} -c 'import time; time.sleep(600)' >/dev/null 2>&1 & echo started"
    assert "started" in await call(env, "run_command", command=hides)
    looks = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep(60[0]'"
    assert (await call(env, "run_command", command=looks)).startswith("0")
    assert "[exit code 0]" in await call(env, "run_command", command="python3 -m unittest discover -s tests -t .")
    await env.close()
    assert not env.folder.exists()


@pytest.mark.parametrize("path", ["../secret", "{secret}", "link", "folder/secret", "pipe", "absent"])
async def test_tools_read_and_edit_the_repository_alone(path: str, tmp_path: Path) -> None:
    env, secret = SweEnv(), tmp_path / "secret"
    secret.write_text("secret")
    (env.folder / "link").symlink_to(secret)
    (env.folder / "folder").symlink_to(tmp_path)
    os.mkfifo(env.folder / "pipe")
    path = path.format(secret=secret)
    with pytest.raises(ToolError, match="not a file of the repository"):
        env._file(path)
    await call(env, "edit_file", path=path, old="secret", new="changed")
    assert "secret" not in (await call(env, "read_file", path=path)).replace(path, "")
    assert secret.read_text() == "secret"
    await env.close()


class First(SweEnv):
    async def reset(self, sample: Sample) -> list[Any]:
        sample.metadata["task"] = 0
        return await super().reset(sample)


@pytest.mark.parametrize("repairs", [True, False])
async def test_native_tools_end_to_end(chat: Chat, repairs: bool) -> None:
    edit = {"path": TASK.module, "old": "(merged[-1][0], end)", "new": "(merged[-1][0], max(end, merged[-1][1]))"}
    calls = [("read_file", {"path": TASK.module}), ("edit_file", edit), ("run_command", {"command": "ls"})]
    replies = [hermes(calls=[one]) + END for one in calls if repairs or one[0] != "edit_file"]
    batch, _ = build(
        chat,
        [*replies, f"done{END}"],
        environment=First,
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_max_response_len=4096,
    )
    batch.player.context = _long(batch.player.context)
    samples = [sample for group in (await batch.run(0)).groups for sample in group]
    assert [sample.reward for sample in samples] == [float(repairs)] * 2
    for sample in samples:
        check_turns(chat, sample, [*replies, f"done{END}"])


@pytest.mark.parametrize("repairs", nightly((True, False), everyday=(True,)))
async def test_an_agent_program_on_the_openai_package_end_to_end(chat: Chat, repairs: bool) -> None:
    pytest.importorskip("openai")

    class FirstOfAgent(SweAgentEnv):
        async def prepare(self, sample: Sample) -> None:
            sample.metadata["task"] = 0
            await super().prepare(sample)

    command = f"sed -i 's/end)$/max(end, merged[-1][1]))/' {TASK.module}" if repairs else "ls"
    replies = [hermes(calls=[("shell", {"command": command})]) + END, f"done{END}"]
    batch, _ = build(chat, replies, environment=FirstOfAgent, rollout_batch_size=1, n_samples_per_prompt=2)
    batch.player.context = _long(batch.player.context)
    samples = await played(batch)
    assert [sample.reward for sample in samples] == [float(repairs)] * 2
    for sample in samples:
        check_turns(chat, sample, replies)


def _long(context: Any) -> Any:
    return replace(context, context_length=16384)


def check_turns(chat: Chat, sample: Sample, replies: list[str]) -> None:
    """Check that the loss mask is 1 exactly on the model's turns."""
    sample.validate()
    response = sample.tokens[sample.prompt_length :]
    turns = [segment for segment in sample.segments if segment.origin == "model"]
    assert [chat.decode(response[turn.start : turn.end]) for turn in turns] == replies
    own = {at for turn in turns for at in range(turn.start, turn.end)}
    assert [at for at, mask in enumerate(sample.loss_mask or ()) if mask] == sorted(own)


def test_the_settings_hold_together() -> None:
    settings = RunSettings.from_file(Path("examples/swe_small/qwen3-4b-8gpu.yaml"))
    assert load_environment(str(settings.rollout.env)) is SweEnv
