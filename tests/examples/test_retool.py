"""The code-interpreter example: the author of each token, the demonstrations, valid settings, faulty tools."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.config import Args, RunSettings
from agentrl.demo.example import held_out
from agentrl.engine.pool import EnginePool
from agentrl.envs import Environment, Environments, load_environment
from agentrl.observability.metrics import read_metrics
from agentrl.rm_hub import grade
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from agentrl.tiny import shipped
from agentrl.tiny.create import create
from examples.retool.data import HELD_OUT_NUMBERS, gsm8k_rows, make_problem, make_problems, write_synthetic
from examples.retool.env import shaped
from examples.retool.lessons import PythonLessons, demonstrate
from examples.retool.run import EXAMPLE as EXAMPLE_RUN
from tests.examples.conftest import GROUPS, SIZE, Exchange, Questions, check_who_wrote_each_token
from tests.rollout.scripted import OneBatch
from tests.support.nightly import nightly, weekly
from tests.support.runs import RunKit

EXAMPLE = Path("examples/retool")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small model for some seconds: it calls the tool, with code that may be nonsense."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, lessons, rng = tmp_path_factory.mktemp("model"), PythonLessons(), random.Random(0)
    create(folder, layers=2, hidden=64, corpus=lessons.corpus())
    chat, network = Chat.load(str(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    for _ in range(60):
        talks = [demonstrate(make_problem(rng), rng.choice(("good", "broken")), rng) for _ in range(4)]
        samples = [to_sample(chat, talk, lessons.tools()) for talk in talks]
        width = max(len(sample.tokens) for sample in samples)
        ids = torch.tensor([[*sample.tokens, *[0] * (width - len(sample.tokens))] for sample in samples])
        trained = torch.full_like(ids, -100)
        for row, sample in enumerate(samples):
            for at, mask in enumerate(sample.loss_mask or (), sample.prompt_length):
                trained[row, at] = ids[row, at] if mask else -100
        network(input_ids=ids, labels=trained).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    return folder


@pytest.fixture
async def environment() -> AsyncIterator[type[Environment]]:
    """Open the example's environment with its sandbox."""
    found = load_environment("examples.retool.env:RetoolEnv")
    await found.setup(None)
    yield found
    await found.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["env", "generate"])
async def test_the_mask_is_one_exactly_on_what_the_engine_returned(
    way: str,
    model: Path,
    pool: EnginePool,
    environment: type[Environment],
    exchanges: list[Exchange],
    tmp_path: Path,
) -> None:
    settings = RolloutSettings(
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SIZE,
        rollout_max_response_len=64,
        rm_type="gsm8k",
        env_timeout=600,
    )
    patient = RmHubSettings(grader_timeout=600)
    args = Args({**settings.model_dump(), **patient.model_dump(), "prompt_data": None})
    own = way == "generate"
    generate = GenerateFunction.load(str(EXAMPLE / "generate.py")) if own else None
    reward = RewardFunction.load(str(EXAMPLE / "generate.py"), group=False) if own else None
    context = RolloutContext(
        settings,
        args,
        Chat.load(str(model)),
        pool,
        1024,
        Environments.alone(environment, args) if environment else None,
    )
    runner = GroupPlayer(context, Grader(settings, args, reward), generate)
    result = await OneBatch(runner, Questions(write_synthetic(tmp_path, 0)[0])).run(0)

    samples = [sample for group in result.groups for sample in group]
    assert len(samples) == GROUPS * SIZE, result.stats
    check_who_wrote_each_token(samples, exchanges)
    counters = [sample.metadata.get("counters", {}) for sample in samples]
    assert sum(bool(counts.get("tool_calls")) for counts in counters) > 100
    assert sum(bool(counts.get("tool_ok")) for counts in counters) > 10
    for sample, counts in zip(samples, counters, strict=True):
        assert sample.reward in {1.0, shaped(False, counts.get("tool_ok", 0))}


@pytest.mark.slow
async def test_lessons_show_what_the_tool_really_says(environment: type[Environment]) -> None:
    rng = random.Random(3)
    for at in range(8):
        problem = make_problem(rng, "test" if at % 2 else "train")
        for kind in ("good", "broken", "mistyped"):
            _, call, shown, _ = demonstrate(problem, kind, rng)
            env = environment.create()
            said = await env.toolbox.run("python", call["tool_calls"][0]["function"]["arguments"], state=env)
            await env.close()
            assert said.text == shown["content"]


async def test_variables_stay_within_a_trajectory_and_only_there(environment: type[Environment]) -> None:
    one, other = environment.create(), environment.create()
    assert (await one.toolbox.run("python", {"code": "x = 6"}, state=one)).ok
    assert (await one.toolbox.run("python", {"code": "print(x * 7)"}, state=one)).text == "42"
    assert "NameError" in (await other.toolbox.run("python", {"code": "print(x)"}, state=other)).text
    await one.close()
    await other.close()


def test_held_out_numbers_occur_in_no_training_question() -> None:
    train, test = make_problems(800, "train", 0), make_problems(200, "test", 0)
    assert not {n for problem in train for n in problem.numbers} & set(HELD_OUT_NUMBERS)
    assert {n for problem in test for n in problem.numbers} <= set(HELD_OUT_NUMBERS)


def test_only_good_demonstrations_are_right() -> None:
    rng = random.Random(2)
    for _ in range(200):
        problem = make_problem(rng)
        for kind in ("good", "guess", "broken", "miscopied"):
            answer = demonstrate(problem, kind, rng)[-1]["content"]
            assert grade("gsm8k", answer, str(problem.answer)).correct == (kind == "good")


def test_the_reward_gives_a_wrong_answer_something_back_for_code_that_ran() -> None:
    assert shaped(True, 0) == shaped(True, 3) == 1.0
    assert [shaped(False, calls) for calls in (0, 1, 4)] == pytest.approx([-1.0, -0.9, -0.9])


def test_gsm8k_rows_have_numbers_as_labels() -> None:
    rows = [row for name in ("train", "test") for row in gsm8k_rows(EXAMPLE / f"data/gsm8k_{name}.jsonl")]
    assert len(rows) == 800
    for row in rows:
        assert grade("gsm8k", f"The answer is \\boxed{{{row['label']}}}.", row["label"]).correct


@pytest.mark.parametrize("name", nightly(["cpu", "qwen2.5-3b-8gpu", "smollm2-135m"], 1))
def test_the_settings_hold_together(name: str) -> None:
    settings = RunSettings.from_file(EXAMPLE / f"{name}.yaml")
    assert settings.rollout.env == "examples.retool.env:RetoolEnv"
    assert issubclass(load_environment(settings.rollout.env), Environment)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("env", weekly(["FaultyRetoolEnv", "FailingRetoolEnv"], 1))
def test_learns_though_tools_fail_and_hang(env: str, tmp_path: Path) -> None:
    model = shipped(str(EXAMPLE_RUN.model))
    train, test = write_synthetic(tmp_path / "data", 0)
    flags = ["--config", str(EXAMPLE / "cpu.yaml"), "--env", f"tests.examples.faulty_retool:{env}"]
    flags += ["--hf-checkpoint", str(model), "--prompt-data", str(train), "--output-dir", str(tmp_path / "run")]
    flags += ["--eval-prompt-data", "held_out", str(test), "--num-rollout", "10", "--progress", "plain"]
    run = RunKit(Path.cwd()).start(flags)
    assert run.wait(900) == 0, run.output

    rows = [row for row in read_metrics(run.folder / "metrics.jsonl") if "rollout/reward" in row]
    assert len(rows) == 10
    if env == "FailingRetoolEnv":
        assert sum(row.get("failures/tool/tool_raised", 0) for row in rows) > 10
        assert sum(row["rollout/retries"] for row in rows) > 10
    else:
        assert sum(row.get("rollout/tool_raised", 0) for row in rows) > 0
        assert sum(row.get("rollout/tool_timeout", 0) for row in rows) > 0
    before, after = held_out(run.folder, "pass@1")[0], held_out(run.folder, "pass@1")[-1]
    assert after > before + 0.2
