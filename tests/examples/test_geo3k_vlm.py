"""Drawn scenes: pictures and questions, the tools, the rewards of right answers and guesses, the settings."""

import json
import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl import Sample
from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.chat.messages import ToolCall
from agentrl.chat.render_turn import unread_call
from agentrl.config import Args, RunSettings
from agentrl.demo.example import run_example
from agentrl.envs import Environment, Turn, load_environment
from agentrl.errors import DataError
from agentrl.media import take_images
from agentrl.rm_hub.settings import RmHubSettings
from examples.geo3k_vlm import make_model
from examples.geo3k_vlm.env import CropEnv, Geo3kEnv
from examples.geo3k_vlm.run import EXAMPLE
from examples.geo3k_vlm.scenes import (
    COLOURS,
    DOT_COLOURS,
    FIELD,
    GRID,
    Question,
    Split,
    Thing,
    choices,
    cropped,
    draw,
    held_out,
    questions,
    row,
    write_data,
)
from tests.support.nightly import weekly
from tests.support.tiny_models import make_tokenizer
from tests.support.vision import tiny_vlm

FOLDER = Path("examples/geo3k_vlm")
ARGS = Args({**RmHubSettings(grader_timeout=600).model_dump(), "rm_type": "exact_match"})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Load the chat of a tiny vision model with random weights."""
    return Chat.load(str(tiny_vlm(tmp_path_factory.mktemp("model"))))


def sample_of(prompt: list[dict[str, Any]], label: str | None = None) -> Sample:
    messages, images = take_images(prompt, {})
    return Sample(prompt=messages, label=label, images=images)


def test_the_seed_alone_decides_the_questions(tmp_path: Path) -> None:
    train, test = write_data(tmp_path, 3)
    splits: tuple[tuple[Path, Split, int], ...] = ((train, "train", 3), (test, "test", 0))
    for file, split, seed in splits:
        lines = file.read_text(encoding="utf-8").splitlines()
        again = list(islice(questions(split, seed), 20))
        assert [json.loads(line) for line in lines[:20]] == [row(question) for question in again]
        assert list(islice(questions(split, seed + 1), 20)) != again
    assert train.stat().st_size < 3_000_000


@pytest.mark.parametrize(("shapes", "least"), [(1, 1), (5, 2)])
def test_no_held_out_picture_occurs_in_training(shapes: int, least: int) -> None:
    train, test = (list(islice(questions(split, 0, shapes), 300)) for split in ("train", "test"))
    assert not any(held_out(question.things) for question in train)
    assert all(held_out(question.things) for question in test)
    for question in train + test:
        assert question.about in question.things
        assert question.answer in choices(question)
        colours = [thing.colour for thing in question.things]
        assert least <= len(set(colours)) == len(colours) <= shapes
        assert (question.about.colour in question.text) == (shapes > 1)


@pytest.mark.parametrize(
    ("side", "right", "down"), [("left", -1, 0), ("right", 1, 0), ("top", 0, -1), ("bottom", 0, 1)]
)
def test_the_picture_shows_the_shape_and_its_dots_in_the_field(side: str, right: int, down: int) -> None:
    thing = Thing(row=1, column=2, colour="blue", shape="square", dots=1, dot_colour="pink", side=side, shift=(0, 0))
    pixels = np.asarray(draw((thing,)))
    x, y = round(2.5 * FIELD), round(1.5 * FIELD)
    assert tuple(pixels[y, x]) == COLOURS["blue"]
    dot = round(0.22 * FIELD)
    assert tuple(pixels[y + dot * down, x + dot * right]) == DOT_COLOURS["pink"]
    assert tuple(pixels[y - dot * down, x - dot * right]) == COLOURS["blue"]
    changed = np.argwhere((pixels != pixels[0, 0]).any(-1))
    assert changed.min(0).tolist() >= [FIELD, 2 * FIELD]
    assert changed.max(0).tolist() < [2 * FIELD, 3 * FIELD]


async def test_crop_shows_the_field_that_is_asked_for() -> None:
    question = next(questions("train", 5))
    picture, env = draw(question.things), load_environment("examples.geo3k_vlm.env:CropEnv").create()
    sample = sample_of(row(question)["prompt"])
    assert await env.reset(sample) == sample.prompt
    for at in range(GRID**2):
        outcome = await env.toolbox.run("crop", {"field": at + 1}, state=env)
        assert outcome.ok
        assert isinstance(outcome.content, list)
        (part,) = outcome.content
        left, top = at % GRID * FIELD, at // GRID * FIELD
        assert part["image"].tobytes() == picture.crop((left, top, left + FIELD, top + FIELD)).tobytes()
        empty = part["image"].tobytes() == cropped(draw(()), 1).tobytes()
        assert empty != (at + 1 == question.about.field)
    for outside in (0, GRID**2 + 1):
        refused = await env.toolbox.run("crop", {"field": outside}, state=env)
        assert not refused.ok
        assert "1 to 9" in refused.text


async def test_a_prompt_without_an_image_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="no image"):
        await CropEnv.create().reset(Sample(prompt=[{"role": "user", "content": "How many dots?"}]))


async def test_geo3k_says_if_an_answer_is_right() -> None:
    picture = draw(next(questions("train", 0)).things)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Find x."}]
    env = Geo3kEnv.create()
    messages = await env.reset(sample_of([{"role": "user", "content": content}], "2\\sqrt{3}"))
    assert [message["role"] for message in messages] == ["system", "user"]
    assert "right" in (await env.toolbox.run("check", {"answer": "\\sqrt{12}"}, state=env)).text
    assert "wrong" in (await env.toolbox.run("check", {"answer": "12"}, state=env)).text


async def answered(env: Environment, chat: Chat, question: Question, answer: str, look: bool) -> Sample:
    """Return the trajectory of a model that crops the right region, if it may crop, and gives this answer."""
    messages = list(row(question)["prompt"])
    await env.reset(sample_of(messages))
    if look:
        call = ToolCall(id="call_0", name="crop", arguments=json.dumps({"field": question.about.field}))
        step = await env.step(Turn(1, "", "", tool_calls=[call]))
        assert not step.done
        messages += [{"role": "assistant", "content": "", "tool_calls": [call.to_message()]}, *step.messages]
    assert (await env.step(Turn(2, answer, answer))).done
    sample = to_sample(chat, [*messages, {"role": "assistant", "content": answer}], env.toolbox.schemas)
    sample.label = question.answer
    return sample


@pytest.mark.slow
async def test_an_oracle_earns_everything_and_guesses_what_chance_gives(chat: Chat) -> None:
    rng, env = random.Random(7), CropEnv.create(ARGS)
    guessed: list[float] = []
    for question in islice(questions("test", 0), 40):
        sample = await answered(env, chat, question, question.answer, look=True)
        assert len(sample.images) == len(sample.image_spans) == 2
        assert await env.reward(sample) == 1.0
        blind = await answered(env, chat, question, rng.choice(choices(question)), look=False)
        assert len(blind.images) == len(blind.image_spans) == 1
        reward = await env.reward(blind)
        assert isinstance(reward, float)
        guessed.append(reward)
    assert 0.1 < np.mean(guessed) < 0.5


def test_a_guess_without_the_picture_stays_at_chance() -> None:
    """The best constant answer to each question, learned from 4,000 questions, is tested on 1,000 held-out ones."""
    seen = defaultdict[str, Counter[str]](Counter)
    for question in islice(questions("train", 0), 4000):
        seen[question.text][question.answer] += 1
    right: dict[str, list[bool]] = defaultdict(list)
    for question in islice(questions("test", 0), 1000):
        right[question.text.split()[0]].append(seen[question.text].most_common(1)[0][0] == question.answer)
    chance = {"How": 1 / 3, "What": 1 / 3, "On": 1 / 4}
    assert {form: float(np.mean(hits)) for form, hits in right.items()} == pytest.approx(chance, abs=0.07)


@pytest.mark.parametrize("name", ["cpu", "qwen2.5-vl-3b-8gpu"])
def test_the_settings_hold_together(name: str) -> None:
    settings = RunSettings.from_file(FOLDER / f"{name}.yaml")
    assert isinstance(settings.rollout.env, str)
    assert issubclass(load_environment(settings.rollout.env), Environment)
    assert settings.train.train_backend == "fsdp"
    if path := settings.rollout.chat_template_path:
        chat = Chat(make_tokenizer(), chat_template=Path(path).read_text())
        tools = CropEnv.create(ARGS).toolbox.schemas
        assert '"name": "crop"' in chat.decode(chat.render_ids([{"role": "user", "content": "Which side?"}], tools))
        assert unread_call(chat) is None
        assert chat.turn_parser.family.name == "hermes"


@pytest.mark.slow
async def test_lessons_show_what_the_environment_shows(tmp_path: Path) -> None:
    folder = make_model.create(tmp_path, 0)
    lessons, seen, env = make_model.Lessons(folder, 0), Chat.load(str(folder)), CropEnv.create(ARGS)
    question = next(questions("test", 0))
    sample = await answered(env, seen, question, question.answer, look=True)
    messages = make_model.conversation(question, question.about.field, question.answer)
    assert sample.tokens == to_sample(seen, messages, env.toolbox.schemas).tokens
    assert [span.end - span.start for span in sample.image_spans] == [9, 9]
    for right in (True, False):
        _, pixels = lessons.batch(float(right), tools=True)
        assert [torch.equal(crop, lessons.empty) for crop in pixels[1::2]] == [not right] * make_model.BATCH
    assert not any(torch.equal(picture, blank) for picture, blank in zip(pixels[::2], pixels[1::2], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "blank"), weekly([(0, False), (0, True), (1, False), (2, False)], 2))
def test_it_learns_if_it_sees_the_pictures(seed: int, blank: bool, tmp_path: Path) -> None:
    example = replace(EXAMPLE, write_data=partial(write_data, blank=blank))
    success = run_example(example, tmp_path / "run", seed=seed, say=print)
    assert success[0] <= 0.6
    assert success[-1] <= 0.45 if blank else success[-1] >= EXAMPLE.goal, success
