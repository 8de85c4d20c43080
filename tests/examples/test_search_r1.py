"""The search example: the author of each token, the queries, the demonstrations, valid settings."""

import json
import random
from pathlib import Path

import pytest

from agentrl import Sample
from agentrl.chat import Chat
from agentrl.config import Args, RunSettings
from agentrl.engine.pool import EnginePool
from agentrl.envs import Environments, load_environment
from agentrl.rm_hub import grade
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.functions import GenerateFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from agentrl.tiny.create import create
from examples.search_r1.data import CORPUS, FORMAT_SCORES, write_hotpotqa, write_train_and_test
from examples.search_r1.env import find
from examples.search_r1.knowledge import NAMES, ask, questions
from examples.search_r1.lessons import Kind, SearchLessons, demonstrate
from tests.examples.conftest import GROUPS, SIZE, Exchange, Questions, check_who_wrote_each_token
from tests.rollout.scripted import OneBatch

EXAMPLE = Path("examples/search_r1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model that often writes the example's tags, so that it searches without training."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, lessons = tmp_path_factory.mktemp("model"), SearchLessons()
    create(folder, layers=2, hidden=64, corpus=lessons.corpus(), markup=lessons.markup, tie_embeddings=False)
    tags, end = (Chat.load(str(folder)).encode(text) for text in ("<search></search>", "<|im_end|>"))
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        # Every embedding gets a common component, to which the output weights of some tokens are aligned.
        weights.get_input_embeddings().weight[:, 0] = 1.0
        weights.get_output_embeddings().weight[:, 0] = 0.0
        weights.get_output_embeddings().weight[tags, 0] = 2.0
        weights.get_output_embeddings().weight[end, 0] = 1.6
    weights.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", ["env", "generate"])
async def test_the_mask_is_one_exactly_on_what_the_engine_returned(
    way: str, model: Path, pool: EnginePool, exchanges: list[Exchange], tmp_path: Path
) -> None:
    settings = RolloutSettings(
        rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, rollout_max_response_len=24, rm_type="search_r1"
    )
    args = Args({**settings.model_dump(), "prompt_data": None})
    environment = load_environment("examples.search_r1.env:SearchR1Env") if way == "env" else None
    generate = None if environment else GenerateFunction.load(str(EXAMPLE / "generate.py"))
    context = RolloutContext(
        settings,
        args,
        Chat.load(str(model)),
        pool,
        1024,
        Environments.alone(environment, args) if environment else None,
    )
    runner = GroupPlayer(context, Grader(settings, args, None), generate)
    result = await OneBatch(runner, Questions(write_train_and_test(tmp_path, 0)[0])).run(0)

    samples = [sample for group in result.groups for sample in group]
    assert len(samples) == GROUPS * SIZE
    check_who_wrote_each_token(samples, exchanges)
    searches = sum(sample.metadata.get("counters", {}).get("tool_calls", 0) for sample in samples)
    assert searches > 50
    assert len(exchanges) > len(samples)


async def test_native_tool_calls_search_the_samples_own_passages() -> None:
    env = load_environment("examples.search_r1.env:SearchR1ToolEnv").create()
    question = ask(random.Random(0))
    await env.reset(Sample(prompt=question.text, metadata={"passages": question.passages}))
    outcome = await env.toolbox.run("search", {"query": question.steps[0].query})
    assert outcome.text.splitlines()[0] == f"Doc 1 {question.steps[0]}"


def test_the_right_query_finds_the_fact_first() -> None:
    rng = random.Random(1)
    for _ in range(300):
        question = ask(rng, "test")
        world = Sample(metadata={"passages": question.passages})
        for step in question.steps:
            assert find(world, step.query).splitlines()[0] == f"Doc 1 {step}"
        # The question as a whole does not rank the last fact first if another fact must be looked up before.
        if len(question.steps) == 2:
            assert str(question.steps[1]) not in find(world, question.subject).splitlines()[0]
    assert find(world, "nonsense") == "Nothing found."


def test_facts_are_new_in_every_episode_and_held_out_names_never_trained() -> None:
    train, test = questions(400, "train", 0), questions(200, "test", 0)
    assert len({question.passages for question in train}) == len(train)
    seen = " ".join(text for question in train for text in (question.text, *question.passages))
    assert not [name for name in NAMES["test"] if name in seen]
    assert not [q for q in test if any(name in q.text for name in NAMES["train"])]
    # The same question has another answer in another episode.
    answers: dict[str, set[str]] = {}
    for question in questions(20_000, "train", 1):
        answers.setdefault(question.subject, set()).add(question.answer)
    assert sum(len(values) > 1 for values in answers.values()) > 500


@pytest.mark.parametrize("native", [False, True])
def test_good_demonstrations_earn_the_whole_reward_and_others_only_the_formats(native: bool) -> None:
    rng = random.Random(2)
    kinds: dict[Kind, float] = {"good": 1.0, "guess": 0.2, "wrong_query": 0.2, "stops_early": 0.2, "miscopied": 0.2}
    for _ in range(60):
        question = ask(rng)
        for kind, expected in kinds.items():
            messages = demonstrate(question, kind, rng, native=native)
            response = "".join(message["content"] for message in messages[1:])
            given = grade("search_r1", response, question.answer, {"messages": messages, **FORMAT_SCORES})
            assert given.score == pytest.approx(expected), (kind, messages)


def test_hotpotqa_prompts_are_answered_from_its_paragraphs(tmp_path: Path) -> None:
    train, test = write_hotpotqa(tmp_path)
    rows = [json.loads(line) for file in (train, test) for line in file.open(encoding="utf-8")]
    assert len(rows) == 100
    assert len(CORPUS.read_text(encoding="utf-8").splitlines()) == 1000
    hit = 0
    for row in rows:
        question = row["prompt"][0]["content"].rpartition("Question: ")[2]
        found = find(Sample(metadata=row["metadata"]), question)
        hit += any(title in found for title in row["metadata"]["titles"])
    assert hit >= 95


@pytest.mark.parametrize("name", ["cpu", "qwen2.5-3b-8gpu", "smollm2-135m"])
def test_the_settings_hold_together(name: str) -> None:
    settings = RunSettings.from_file(EXAMPLE / f"{name}.yaml")
    assert settings.rollout.env == "examples.search_r1.env:SearchR1Env"
