"""The same as `SearchR1Env`, as a custom loop: `--custom-generate-function-path examples/search_r1/generate.py`."""

from typing import Any

from agentrl import Sample
from agentrl.rollout.helpers import build_loss_mask, generate_single
from examples.search_r1.env import SEARCH, SearchR1Env


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Play one trajectory: the model's turn, the results of its search, and so on until a turn without a search."""
    assert isinstance(sample.prompt, list), "the rows of data.py are conversations"
    conversation = list(sample.prompt)
    searches = 0
    for _ in range(args.max_turns or SearchR1Env.max_turns):
        text = await generate_single(conversation)
        conversation.append({"role": "assistant", "content": text})
        query = SEARCH.search(text)
        if query is None:
            break
        searches += 1
        found = await SearchR1Env().find(sample, query[1])
        conversation.append({"role": "user", "content": f"<information>{found}</information>"})
    sample.metadata["counters"] = {"tool_calls": searches, "tool_ok": searches}
    sample.loss_mask = build_loss_mask(sample)
    return sample
