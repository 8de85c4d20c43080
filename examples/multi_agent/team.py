"""A team of one model in three roles, against a frozen opponent.

1. The solver answers a problem, and so does the opponent, a model that does not learn. The rewriter sees both answers and
   writes its own. The selector takes the rewriter's answer or the opponent's, which are shown in random order.
2. Every member is a sample of the same trajectory. All turns of a member have the number of its role. So with
   `turn_credit: returns` and `gamma: 0` it is compared with the members of its own role in the group, by its own reward.
3. A member earns 1 for a right answer, the selector for a right choice, and all earn `TEAM` if the choice is right.
"""

import json
import os
import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from agentrl import Message, Sample
from agentrl.demo.task import CalculatorEnv
from agentrl.rollout.helpers import build_loss_mask, execute_tool, extract_tool_call, generate_single
from examples.second_model import say

Role = Literal["solver", "rewriter", "selector"]
ROLES: tuple[Role, ...] = ("solver", "rewriter", "selector")
PROMPTS: dict[Role, str] = {
    "solver": "What is {}?",
    "rewriter": "Compute {}, others say {} or {}.",
    "selector": "Choose for {}: {} or {}.",
}
OPPONENT = "OPPONENT_URL"
"""The environment variable with the opponent's address."""
TEAM = 0.25
MAX_CALLS = 2

_ANSWER = re.compile(r"<answer>(-?\d{1,9})</answer>")


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Play one team; in an evaluation only the selector counts."""
    problem, lot = str(sample.prompt), random.Random(f"{sample.group_index} {sample.index}")
    solver = await member("solver", sample)
    theirs = await opponent(problem, lot.getrandbits(31))
    rewriter = await member("rewriter", sample, [said(solver), theirs])
    candidates = [said(rewriter), theirs]
    lot.shuffle(candidates)
    selector = await member("selector", sample, candidates)
    selector.reward = float(selector.reward == 1.0 and said(selector) in candidates)
    selector.metadata["opponent"] = theirs
    if evaluation:
        return [selector]
    won = TEAM * selector.reward
    for one in (team := [solver, rewriter, selector]):
        one.reward = float(one.reward == 1.0) + won
    return team


async def member(role: Role, sample: Sample, candidates: Sequence[str] = ()) -> Sample:
    """Play one member's conversation with the calculator. Returns its sample, with its own reward."""
    content = PROMPTS[role].format(sample.prompt, *candidates)
    talk: list[Message] = [{"role": "user", "content": content}]
    one = Sample(index=sample.index, prompt=talk, label=sample.label, metadata={"role": role})
    for calls in range(MAX_CALLS + 1):
        one.response = await generate_single(talk)
        call = extract_tool_call(one.response)
        if call is None or calls == MAX_CALLS:
            break
        talk.append({"role": "assistant", "content": one.response})
        talk.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": await execute_tool(call)})
    build_loss_mask(one)
    for segment in one.segments:
        segment.turn = ROLES.index(role) + 1
    one.reward = float(said(one) == sample.label)
    return one


async def opponent(problem: str, seed: int) -> str:
    """Return the opponent's answer, or nothing; it has the calculator too."""
    env = CalculatorEnv()
    talk: list[Message] = [{"role": "user", "content": PROMPTS["solver"].format(problem)}]
    for _ in range(MAX_CALLS + 1):
        message = await say(os.environ[OPPONENT], talk, tools=env.toolbox.schemas, seed=seed)
        if not (calls := message.get("tool_calls")):
            return _number(str(message["content"]))
        function, id = calls[0]["function"], calls[0]["id"]
        found = await env.toolbox.run(function["name"], json.loads(function["arguments"]), state=env)
        message = {"role": "assistant", "content": message["content"] or "", "tool_calls": calls[:1]}
        talk += [message, {"role": "tool", "tool_call_id": id, "name": function["name"], "content": found.text}]
    return ""


def said(one: Sample) -> str:
    """Return the number that a member answered with, or nothing."""
    return _number(one.response)


def _number(text: str) -> str:
    found = _ANSWER.findall(text)
    return str(found[0]) if len(found) == 1 else ""
