"""Evaluation's numbers are of whole trajectories, also where one became several samples."""

from pathlib import Path

import pytest

from agentrl import Environment, Sample, Status, Step
from agentrl.chat import Chat
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.evaluate import evaluate
from tests.rollout.scripted import END, ScriptedEngine, Store, build, make_context
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
    return Chat.load(str(folder), chat_template=FORGETFUL, history_policy="split")


class Asking(Environment):
    max_turns = 3
    answer = "and then?"

    async def step(self, turn) -> Step:
        return Step([{"role": "user", "content": self.answer}], info={"tool_calls": 1, "tool_ok": 1})

    async def reward(self, sample: Sample) -> float:
        return 1.0


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
