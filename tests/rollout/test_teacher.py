"""A teacher that scores the sampled tokens of a group."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from aiohttp import web

from agentrl import Sample
from agentrl.chat import Chat
from agentrl.engine.pool import EnginePool
from agentrl.errors import ContextOverflow, EngineRejected, EngineUnreachable, SampleError, SettingsError
from agentrl.rollout.teacher import check_teacher, probe_text, same_vocabulary, seen_by_teacher
from tests.engine.faults import FAST, FaultyServer, Reply, answer, serving, status
from tests.rollout.scripted import END, EchoEnv, Store, build, make_context


class Teacher:
    """Returns -1/k for the k-th requested token. The first `failing` requests get no answer."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.asked: list[tuple[list[int], int, str | None]] = []

    async def log_probs(
        self, ids: Sequence[int], count: int, *, session_id: str | None = None, images: Any = None
    ) -> list[float]:
        if self.failing:
            self.failing -= 1
            raise EngineUnreachable("gone", kind="engine_lost")
        self.asked.append((list(ids), count, session_id))
        return [-1 / (k + 1) for k in range(count)]


async def test_every_kept_trajectory_has_the_teachers_numbers(chat: Chat) -> None:
    teacher = Teacher()
    loop, _ = build(chat, [f"hello{END}"], teacher=teacher)
    groups = (await loop.run(0)).groups
    for sample in (sample for group in groups for sample in group):
        assert sample.teacher_log_probs == [-1 / (k + 1) for k in range(sample.response_length)]
        assert (list(sample.tokens), sample.response_length, str(sample.group_index)) in teacher.asked
    assert len(teacher.asked) == 6


async def test_it_is_not_asked_about_what_is_known_dropped_or_masked(chat: Chat) -> None:
    class Odd(EchoEnv):
        async def reward(self, sample: Sample) -> float:
            if sample.group_index == 1:
                sample.teacher_log_probs = [-7.0] * sample.response_length
            sample.remove_sample = sample.group_index == 2 and sample.index == 4
            return await super().reward(sample)

    def keep(args: object, samples: list[Sample]) -> bool:
        return samples[0].group_index != 0

    teacher = Teacher()
    loop, _ = build(chat, [f"hello{END}"], environment=Odd, group_filter=keep, teacher=teacher)
    groups = (await loop.run(0)).groups
    assert [group[0].group_index for group in groups] == [1, 2, 3]
    assert groups[0][0].teacher_log_probs == [-7.0] * groups[0][0].response_length
    assert groups[1][0].teacher_log_probs is None
    assert sorted(session or "" for *_, session in teacher.asked) == ["2", "3", "3"]


async def test_a_privileged_message_is_put_after_the_prompt(chat: Chat) -> None:
    class Solved(EchoEnv):
        async def reset(self, sample: Sample) -> list[dict[str, Any]]:
            sample.metadata["solution"] = f"it is {sample.group_index}"
            return list(await super().reset(sample))

    teacher = Teacher()
    given: dict[str, Any] = {"opd_privileged_key": "solution", "opd_privileged_prompt": "Psst: {text}."}
    loop, _ = build(chat, [f"hello{END}"], environment=Solved, teacher=teacher, **given)
    for sample in (sample for group in (await loop.run(0)).groups for sample in group):
        first = sample.metadata["messages"][0]
        secret = {"role": "user", "content": f"Psst: it is {sample.group_index}."}
        response = list(sample.tokens[sample.prompt_length :])
        ids = chat.render_ids([first, secret]) + response
        assert (ids, sample.response_length, str(sample.group_index)) in teacher.asked
        assert sample.teacher_log_probs == [-1 / (k + 1) for k in range(sample.response_length)]


async def test_a_sample_that_does_not_fit_with_its_privileged_message_is_not_trained(chat: Chat) -> None:
    class Solved(EchoEnv):
        async def reset(self, sample: Sample) -> list[dict[str, Any]]:
            sample.metadata["solution"] = "so " * (3000 if sample.index == 0 else 1)
            return list(await super().reset(sample))

    class Small(Teacher):
        async def log_probs(self, ids: Sequence[int], count: int, **more: Any) -> list[float]:
            if len(ids) > 2048:
                raise ContextOverflow("the input is longer than the context", kind="engine_context_overflow")
            return await super().log_probs(ids, count, **more)

    teacher = Small()
    loop, _ = build(chat, [f"hello{END}"], environment=Solved, teacher=teacher, opd_privileged_key="solution")
    result = await loop.run(0)
    samples = [sample for group in result.groups for sample in group]
    assert [sample.index for sample in samples if sample.remove_sample] == [0]
    assert len(teacher.asked) == len(samples) - 1
    assert result.stats.failures == {"engine/teacher_overflow": 1}
    assert "sample index=0 is not trained" in result.stats.last_failure


async def test_a_privileged_message_must_exist_and_fit_the_template(chat: Chat) -> None:
    loop, _ = build(chat, [f"hello{END}"], teacher=Teacher(), opd_privileged_key="solution")
    with pytest.raises(SampleError, match=r"metadata\['solution'\] must be a text"):
        await loop.run(0)
    context = make_context(chat, cast(Any, None), None, opd_privileged_key="label")
    sample = Sample(label="4", tokens=[5, 6, 7, 8], response_length=1)
    with pytest.raises(SettingsError, match="does not end with the template's generation prompt"):
        seen_by_teacher(sample, context)


async def test_a_teacher_that_fails_ends_the_run_or_drops_the_group(chat: Chat) -> None:
    store = Store()
    loop, _ = build(chat, [f"hello{END}"], store=store, teacher=Teacher(failing=1))
    with pytest.raises(EngineUnreachable, match="the teacher: gone"):
        await loop.run(0)
    assert "completed" not in store.fate.values() or len(store.completed) < 3
    store = Store()
    policy = {"engine": "drop_group"}
    loop, _ = build(chat, [f"hello{END}"], store=store, teacher=Teacher(failing=1), failure_policy=policy)
    result = await loop.run(0)
    assert len(result.groups) == 3
    assert [fate for fate in store.fate.values() if fate != "completed"] == ["dropped:teacher/engine_lost"]
    assert result.stats.failures["engine/engine_lost"] == 1


def test_a_probe_holds_every_kind_of_token(chat: Chat) -> None:
    text = probe_text(chat.tokenizer)
    ids = chat.tokenizer(text)["input_ids"]
    assert set(chat.tokenizer.get_added_vocab().values()) <= set(ids)
    assert len(set(ids)) > 100
    same_vocabulary(chat.tokenizer, text, ids, "me")
    with pytest.raises(SettingsError, match="me has another vocabulary .* choose one of the same family"):
        same_vocabulary(chat.tokenizer, text, [*ids[:5], 3, *ids[6:]], "me")
    with pytest.raises(SettingsError, match="me has another vocabulary"):
        same_vocabulary(chat.tokenizer, text, ids[:-1], "me")


def tokenized(ids: list[int]) -> Reply:
    """Tokenizes every text as these ids."""

    async def reply(_: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        assert body["text"]
        return web.json_response(answer([], input_token_logprobs=[[None, i, None] for i in ids]))

    return reply


async def test_a_server_must_read_ids_as_the_student_does(chat: Chat) -> None:
    own = chat.tokenizer(probe_text(chat.tokenizer))["input_ids"]
    async with serving(tokenized(own)) as server, EnginePool([server.url], FAST, vocab_size=None) as pool:
        server.info = {"context_length": 64}
        await check_teacher(pool, chat.tokenizer, 64)
        with pytest.raises(SettingsError, match=r"reads fewer than 64 tokens.* set --rollout-max-context-len 63"):
            await check_teacher(pool, chat.tokenizer, 65)
        server.script = [tokenized([7, *own])]
        with pytest.raises(SettingsError, match=rf"--opd-teacher-url {server.url} has another vocabulary"):
            await check_teacher(pool, chat.tokenizer, None)
        server.script = [status(200, b"{}")]
        with pytest.raises(EngineRejected, match="is no SGLang server: /generate should answer a text"):
            await check_teacher(pool, chat.tokenizer, None)
    async with EnginePool([server.url], FAST, vocab_size=None) as gone:
        with pytest.raises(EngineUnreachable, match="--opd-teacher-url: cannot connect"):
            await check_teacher(gone, chat.tokenizer, None)
