"""retrain's records, and their conversion to samples and back."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypedDict

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.envs import Turn
from agentrl.errors import DataError
from agentrl.sample import Message, Origin, Sample, Status

KEPT = "retrain"  # the key in a sample's metadata for data without a field in `Sample`
_CALL = re.compile(r"\n?<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)
_TOOL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


class LLMAction(TypedDict, total=False):
    """One turn of the model; `tool_call` is its first call: `{"tool_name": ..., "tool_input": {...}}`."""

    action_type: str
    text: str | None
    tool_call: dict[str, Any] | None
    raw_llm_output: str
    reasoning: str | None
    old_per_token_logps: list[float] | None


class RawRolloutData(TypedDict):
    """One episode as retrain's environments return it; the lists have one entry per turn of the model."""

    full_conversation_history: list[dict[str, str]]
    executed_llm_actions: list[LLMAction]
    intrinsic_rewards_per_turn: list[float]
    final_environment_observation: Any
    step_info_dicts_per_turn: list[dict[str, Any]]
    rollout_metadata: dict[str, Any]


Steps = list[tuple[LLMAction, list[dict[str, str]]]]  # each action, and the messages that answered it


def action_of(turn: Turn) -> LLMAction:
    """Return the model's turn in the form that retrain's environments get."""
    calls = [{"tool_name": call.name, "tool_input": call.arguments} for call in turn.tool_calls] or _tagged(turn.text)
    return {
        "action_type": "tool_call" if calls else "text_response",
        "text": None if calls else turn.content,
        "tool_call": calls[0] if calls else None,
        "raw_llm_output": turn.text,
        "reasoning": turn.reasoning,
        "old_per_token_logps": list((turn.sample.rollout_log_probs or [])[-len(turn.ids) :]) if turn.ids else None,
    }


def _tagged(text: str) -> list[dict[str, Any]]:
    """Return the call in retrain's own form, if there is one: `<tool>{"name": ..., "args": {...}}</tool>`."""
    found = _TOOL.search(text)
    try:
        call = json.loads(found[1]) if found else {}
    except ValueError:
        return []
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    return [{"tool_name": call["name"], "tool_input": call.get("args")}] if named else []


class DataFormatBridge:
    """Lossless conversion in both directions. `chat` renders messages as ids; only new samples need it."""

    def __init__(self, chat: Chat | None = None) -> None:
        self._chat = chat

    def messages_to_conversation(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Return messages with text fields only: tool calls are in the content, as Hermes models write them."""
        return list(map(_as_text, messages))

    def conversation_to_messages(self, conversation: Sequence[Mapping[str, str]]) -> list[Message]:
        """Return the inverse. Calls in a form that `messages_to_conversation` does not write stay text."""
        return list(map(_as_calls, conversation))

    def sample_to_rollout(self, sample: Sample) -> RawRolloutData:
        """Return the sample's episode. The sample itself is in `rollout_metadata["sample"]`."""
        kept: Mapping[str, Any] = sample.metadata.get(KEPT, {})
        prompt = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
        messages = sample.metadata.get("messages") or [*prompt, {"role": "assistant", "content": sample.response}]
        history = self.messages_to_conversation(messages)
        texts = [message["content"] for message in history if message["role"] == "assistant"]
        plain: LLMAction = {"action_type": "text_response", "tool_call": None, "reasoning": None}
        actions: list[LLMAction] = [{**plain, "text": text, "raw_llm_output": text} for text in texts]
        for action, own in zip(actions, kept.get("actions", ()), strict=False):
            action.update(own)
        for action, turn in zip(actions, _places(sample), strict=False):
            numbers = sample.rollout_log_probs
            action["old_per_token_logps"] = None if numbers is None else [numbers[at] for at in turn]
        turns, earned = len(actions), sample.metadata.get("step_rewards", [])
        infos = [dict(info) for info in kept.get("infos", ())]
        return {
            "full_conversation_history": history,
            "executed_llm_actions": actions,
            "intrinsic_rewards_per_turn": [r or 0.0 for r in [*earned, *[None] * (turns - len(earned))]],
            "final_environment_observation": kept.get("observation"),
            "step_info_dicts_per_turn": infos + [{} for _ in range(turns - len(infos))],
            "rollout_metadata": kept.get("rollout_metadata") or {"sample": sample.to_dict()},
        }

    def rollout_to_sample(self, rollout: RawRolloutData, index: int = 0) -> Sample:
        """Return the episode as a sample with tokens. The reward is the sum of the turns' rewards.

        Log-probs are those of the actions, if each has one per token of its turn; else the sample has none. Raises
        DataError: there is no chat, or the lists disagree in length. TemplateError: the template cannot render it."""
        if (carried := rollout["rollout_metadata"].get("sample")) is not None:
            return Sample.from_dict(carried)
        if self._chat is None:
            raise DataError("a rollout without tokens needs a chat to get some: DataFormatBridge(Chat.load(MODEL))")
        messages = self.conversation_to_messages(rollout["full_conversation_history"])
        actions, earned = rollout["executed_llm_actions"], rollout["intrinsic_rewards_per_turn"]
        written = sum(message["role"] == "assistant" for message in messages)
        if not written == len(actions) == len(earned):
            raise DataError(
                f"a rollout has {written} assistant messages in full_conversation_history, {len(actions)} "
                f"executed_llm_actions and {len(earned)} intrinsic_rewards_per_turn; it needs one of each for a turn"
            )
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        sample = to_sample(self._chat, messages[: last + 1], index=index)
        places, given = _places(sample), [action.get("old_per_token_logps") or [] for action in actions]
        flat = dict(zip(chain.from_iterable(places), chain.from_iterable(given), strict=False))
        whole = [len(turn) for turn in places] == [len(numbers) for numbers in given]
        sample.rollout_log_probs = [flat.get(at, 0.0) for at in range(sample.response_length)] if whole else None
        sample.reward, sample.status = math.fsum(earned), Status.COMPLETED
        kept = {"observation": rollout["final_environment_observation"], "actions": [dict(a) for a in actions]}
        kept |= {"infos": rollout["step_info_dicts_per_turn"], "rollout_metadata": rollout["rollout_metadata"]}
        sample.metadata |= {"messages": messages, "step_rewards": list(earned), KEPT: kept}
        return sample

    def sample_to_steps(self, sample: Sample) -> tuple[list[dict[str, str]], Steps]:
        """Return the prompt, and each action with the messages that answered it."""
        rollout = self.sample_to_rollout(sample)
        history, actions = rollout["full_conversation_history"], rollout["executed_llm_actions"]
        at = [i for i, message in enumerate(history) if message["role"] == "assistant"]
        shown = [history[here + 1 : there] for here, there in pairwise([*at, len(history)])]
        return history[: at[0]], list(zip(actions, shown, strict=True))

    def steps_to_sample(self, prompt: Sequence[Mapping[str, str]], steps: Steps, index: int = 0) -> Sample:
        """Return the inverse: a sample with loss mask 1 for the model's tokens and 0 for shown tokens; reward 0."""
        history = [dict(message) for message in prompt]
        for action, shown in steps:
            history += [{"role": "assistant", "content": action["raw_llm_output"]}, *map(dict, shown)]
        rollout: RawRolloutData = {
            "full_conversation_history": history,
            "executed_llm_actions": [action for action, _ in steps],
            "intrinsic_rewards_per_turn": [0.0] * len(steps),
            "final_environment_observation": None,
            "step_info_dicts_per_turn": [{} for _ in steps],
            "rollout_metadata": {},
        }
        return self.rollout_to_sample(rollout, index)


def _as_text(message: Message) -> dict[str, str]:
    flat = {key: value for key, value in message.items() if key != "tool_calls"}
    for call in message.get("tool_calls", ()):
        flat["content"] = flat["content"] or ""  # OpenAI's content may be null beside calls
        flat["content"] += f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return flat


def _as_calls(message: Mapping[str, str]) -> Message:
    """Return the message with calls at the content's end as `tool_calls`, if they render to the same text."""
    found: Message = dict(message)
    if message["role"] == "assistant" and (calls := list(_CALL.finditer(message["content"]))):
        try:
            read = [json.loads(call[1]) for call in calls]
        except ValueError:
            return found
        parsed: Message = {**found, "content": message["content"][: calls[0].start()], "tool_calls": read}
        if all("function" in call for call in read) and _as_text(parsed) == message:
            return parsed
    return found


def _places(sample: Sample) -> list[list[int]]:
    """Return the positions in the response of each turn of the model."""
    turns: dict[int, list[int]] = {}
    for segment in sample.segments:
        if segment.origin is Origin.MODEL:
            turns.setdefault(segment.turn, []).extend(range(segment.start, segment.end))
    return list(turns.values())
