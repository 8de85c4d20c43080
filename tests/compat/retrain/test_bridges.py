"""Records of retrain become samples, and converting back gives equal records."""

from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.compat.retrain import DataFormatBridge
from agentrl.errors import DataError
from agentrl.sample import Origin, Sample, Status

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 plus 2?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3"},
    {"role": "assistant", "content": "3"},
]


def action(text: str, log_probs: list[float] | None = None) -> Any:
    plain = {"action_type": "text_response", "text": text, "tool_call": None, "raw_llm_output": text, "reasoning": None}
    return {**plain, "old_per_token_logps": log_probs}


def rollout(chat: Chat, *, rewards: list[float], sampled: bool, last: str = "It is 3.") -> Any:
    texts = ["Let me see.", last]
    lengths = [len(chat.encode(text)) + 1 for text in texts]  # with the token that ends a turn
    return {
        "full_conversation_history": [
            {"role": "user", "content": "What is 1 plus 2?"},
            {"role": "assistant", "content": texts[0]},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": texts[1]},
        ],
        "executed_llm_actions": [
            action(text, [-0.5 - at - i / 64 for i in range(n)] if sampled else None)
            for at, (text, n) in enumerate(zip(texts, lengths, strict=True))
        ],
        "intrinsic_rewards_per_turn": rewards,
        "final_environment_observation": {"content": "over", "available_tools": []},
        "step_info_dicts_per_turn": [{"turn": 1}, {"turn": 2, "success": True}],
        "rollout_metadata": {"seed": 4},
    }


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.5, -2.0]])
def test_raw_rollout_data_survives_the_way_there_and_back(chat: Chat, rewards: list[float], sampled: bool) -> None:
    bridge, raw = DataFormatBridge(chat), rollout(chat, rewards=rewards, sampled=sampled)
    sample = bridge.rollout_to_sample(raw, index=3).validate()
    assert (sample.index, sample.reward, sample.status) == (3, sum(rewards), Status.COMPLETED)
    assert (sample.rollout_log_probs is not None) is sampled
    assert bridge.sample_to_rollout(Sample.from_dict(sample.to_dict())) == raw


def test_a_sample_of_a_run_survives_with_every_number(chat: Chat) -> None:
    bridge = DataFormatBridge(chat)
    sample = bridge.rollout_to_sample(rollout(chat, rewards=[1.0, 2.0], sampled=True))
    del sample.metadata["retrain"]
    sample.weight_versions, sample.reward = ["7"], 9.0
    back = DataFormatBridge().rollout_to_sample(bridge.sample_to_rollout(sample))
    assert back == sample


def test_lists_of_other_lengths_are_refused(chat: Chat) -> None:
    raw = rollout(chat, rewards=[1.0], sampled=False)
    with pytest.raises(DataError, match="2 assistant messages .* 2 executed_llm_actions and 1 intrinsic"):
        DataFormatBridge(chat).rollout_to_sample(raw)
    with pytest.raises(DataError, match="needs a chat"):
        DataFormatBridge().rollout_to_sample(raw)


def test_openais_null_beside_calls_is_no_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    [said] = DataFormatBridge().messages_to_conversation([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert said["content"].startswith("\n<tool_call>\n")


def test_a_conversation_survives_the_way_there_and_back(chat: Chat) -> None:
    bridge = DataFormatBridge(chat)
    conversation = bridge.messages_to_conversation(MESSAGES)
    assert all(isinstance(value, str) for message in conversation for value in message.values())
    assert conversation[2]["content"].startswith("I add.\n<tool_call>\n{")
    back = bridge.conversation_to_messages(conversation)
    assert back == MESSAGES
    assert chat.prompt_ids(back, None) == chat.prompt_ids(MESSAGES, None)
    for text in ('<tool_call>\n{"a": 1}\n</tool_call>', "<tool_call>\n{broken}\n</tool_call>", "x <tool_call>\n{}"):
        foreign = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        assert bridge.messages_to_conversation(bridge.conversation_to_messages(foreign)) == foreign


def test_the_cycle_survives_the_way_there_and_back(chat: Chat) -> None:
    bridge, prompt = DataFormatBridge(chat), [{"role": "user", "content": "Guess."}]
    steps = [(action("Five."), [{"role": "user", "content": "Higher."}]), (action("Seven."), [])]
    sample = bridge.steps_to_sample(prompt, steps, index=2)
    shown = sample.tokens[: sample.prompt_length]
    assert shown == chat.prompt_ids(prompt, None)
    assert sample.loss_mask is not None
    for segment in sample.segments:
        marks = set(sample.loss_mask[segment.start : segment.end])
        assert marks == {int(segment.origin is Origin.MODEL)}
    assert bridge.sample_to_steps(sample) == (prompt, steps)
