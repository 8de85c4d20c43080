"""Evaluation metrics count whole trajectories, also if one became several samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import Environment, Sample, Status, Step
from agentrl.chat import Chat
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.envs import Turn
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from tests.rollout.scripted import END, ScriptedEngine, Store, build, make_context
from tests.support.evaluating import evaluate
from tests.support.tiny_models import make_tiny_model

FORGETFUL = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < messages|length - 1 %}{{ m.content.split('</think>')[-1] }}\
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Drops earlier reasoning from the history, as Qwen3's template does."""


@pytest.fixture(scope="module")
def splitting(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = Path(tmp_path_factory.mktemp("tiny"))
    make_tiny_model(folder)
    return Chat.load(str(folder), chat_template=FORGETFUL, template_rewrite_policy="split")


class Once(Environment):
    async def reward(self, sample: Sample) -> float:
        return 1.0


class Asking(Environment):
    max_turns = 3
    answer = "and then?"

    async def step(self, turn: Turn) -> Step:
        return Step([{"role": "user", "content": self.answer}], info={"tool_calls": 1, "tool_ok": 1})

    async def reward(self, sample: Sample) -> float:
        return 1.0


class Asked(ScriptedEngine):
    """Records the sampling parameters of its requests."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, [f"fine{END}"])
        self.params: list[SamplingParams] = []

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **more: Any) -> Generation:
        self.params.append(params)
        return await super().generate(input_ids, params, **more)


OWN = {"eval_temperature": 0.0, "eval_top_p": 0.9, "eval_top_k": 7, "eval_max_response_len": 9}


@pytest.mark.parametrize(
    "given", [(), *[(name,) for name in OWN], tuple(OWN)], ids=lambda given: "+".join(given) or "none"
)
async def test_evaluation_samples_by_its_own_settings_and_training_by_its_own(
    given: tuple[str, ...], chat: Chat
) -> None:
    engine = Asked(chat)
    training = {"temperature": 0.8, "top_p": 0.6, "top_k": 5, "max_response_len": 12}
    settings: dict[str, Any] = {f"rollout_{name}": value for name, value in training.items()}
    context = make_context(chat, engine, Once, **settings | {name: OWN[name] for name in given})
    runner = GroupPlayer(context, Grader(context.settings, context.args, None), None)
    await evaluate(runner, "held out", Store().lease(1, 0))
    await runner.group(Store().lease(1, 0)[0], evaluation=False)
    seen = [(p.temperature, p.top_p, p.top_k, p.max_new_tokens) for p in engine.params]
    evaluated = tuple(OWN[f"eval_{name}"] if f"eval_{name}" in given else value for name, value in training.items())
    assert seen == [evaluated] * 2 + [tuple(training.values())] * 2


async def test_a_split_trajectory_counts_once(splitting: Chat) -> None:
    thought = f"<think>hm</think>fine{END}"
    loop, _ = build(splitting, [thought], environment=Asking)
    result = await evaluate(loop.player, "held out", Store().lease(2, 0))
    assert [len(group) for group in result.groups] == [6, 6]
    assert result.metrics["samples"] == 4
    assert result.metrics["truncated"] == 1.0
    assert result.metrics["tool_calls"] == 3.0
    assert result.metrics["used_tool"] == 1.0
    assert result.metrics["response_length"] == 3 * len(splitting.encode(thought))


async def test_a_split_that_does_not_fit_leaves_no_sample_without_an_answer(splitting: Chat) -> None:
    class Long(Asking):
        answer = "and then? " * 30

    engine = ScriptedEngine(splitting, [f"<think>hm</think>fine{END}"])
    context = make_context(splitting, engine, Long, context_length=80)
    samples = await run_environment(context, Sample(prompt="go", index=0), context.params())
    assert [(s.status, s.response_length > 0) for s in samples] == [(Status.TRUNCATED, True)]
