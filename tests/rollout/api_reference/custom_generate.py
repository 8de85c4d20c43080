# The reference's example; only the imports differ from it.
from agentrl import Sample
from agentrl.rollout.helpers import build_loss_mask, execute_tool, extract_tool_call, generate_single


def compute_reward(sample: Sample) -> float:
    return 1.0 if sample.response == "42" else 0.0


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        conversation = (
            sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
        )
        for turn in range(args.max_turns):
            # Generate response
            response = await generate_single(conversation)
            # Check for tool call
            tool_call = extract_tool_call(response)
            if tool_call:
                # Execute tool
                tool_result = await execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                # Final response
                sample.response = response
                break
        # Compute reward
        sample.reward = compute_reward(sample)
        # Set loss mask (1 for model tokens, 0 for tool responses)
        sample.loss_mask = build_loss_mask(sample)
    return samples
