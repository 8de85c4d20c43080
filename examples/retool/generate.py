"""The same as `RetoolEnv`, as a custom loop over messages and text. `--env` still provides the tool and its sandbox:

agentrl train --config examples/retool/cpu.yaml --custom-generate-function-path examples/retool/generate.py \\
    --custom-rm-path examples/retool/generate.py:reward_func ...
"""

from typing import Any

from agentrl import Sample, Status
from agentrl.rm_hub import async_rm
from agentrl.rollout.helpers import build_loss_mask, execute_tool, extract_tool_call, generate_single
from examples.retool.env import RetoolEnv, shaped


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Play one trajectory: the model's turn, the output of its code, and so on until a turn without a call."""
    assert isinstance(sample.prompt, list), "the rows of data.py are conversations"
    conversation = list(sample.prompt)
    for _ in range(args.max_turns or RetoolEnv.max_turns):
        text = await generate_single(conversation)
        call = extract_tool_call(text)
        if call is None:
            break
        conversation.append({"role": "assistant", "content": text})
        result = await execute_tool(call)
        conversation.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
    sample.loss_mask = build_loss_mask(sample)
    return sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Return the reward of `RetoolEnv`."""
    right = sample.status is not Status.TRUNCATED and await async_rm(args, sample) == 1.0
    return shaped(right, sample.metadata.get("counters", {}).get("tool_ok", 0))
