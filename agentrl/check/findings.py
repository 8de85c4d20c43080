"""Findings of a check: pure functions from played episodes to findings."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.buffer.codec import encode_group
from agentrl.chat import Chat
from agentrl.chat.probe import common
from agentrl.check.harness import Episode
from agentrl.check.policy import Exchange
from agentrl.check.script import ANSWERS, WRONG
from agentrl.errors import SampleError
from agentrl.sample import Message, Sample
from agentrl.tools import Tool

_PLACE = re.compile(r"^(group|sample|turn) \d+(, (sample|turn) \d+)*: ")
_CODE = re.compile(
    r"Error: (NameError|AttributeError|TypeError|ImportError|ModuleNotFoundError|UnboundLocalError|`\S+` returned)"
)
"""Matches the answer of a tool with an error in its code, whatever its arguments are."""
_REMEDY = (
    "draw chance from the sample, as random.Random(f'{sample.group_index}'), and keep what changes on the instance, not on "
    "the class or in the module"
)
_VARYING = re.compile(r": .*(?= at \S+:\d+)|(?<=index=)\d+|, got .*")
"""Matches the parts that differ between episodes: the text of an exception, the sample's number, a value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem (a run fails, trains on wrong data, or learns nothing), or a note. `what`: the problem, its place and
    its remedy. `detail`: more about it. `episode`: the episode in which it was found."""

    what: str
    detail: str = ""
    episode: str = ""
    note: bool = False


def summed(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """Return each distinct finding once with the number of its repeats; problems first."""
    seen: dict[tuple[bool, str], list[Finding]] = {}
    for found in findings:
        seen.setdefault((found.note, _VARYING.sub("", found.what)), []).append(found)
    return [(same[0], len(same)) for _, same in sorted(seen.items(), key=lambda entry: entry[0][0])]


@dataclass(frozen=True, slots=True)
class Prover:
    """Checks of played episodes."""

    chat: Chat
    user: str  # the environment's class or the generate function, as messages name it
    methods: bool  # true for a class
    grades: str  # what gives the reward, as messages name it
    patience: float  # seconds that an environment may take between two turns
    reward_key: str | None = None  # the entry of dict rewards that is trained

    def where(self, method: str) -> str:
        return f"{self.user}.{method}" if self.methods else self.user

    def of_episode(self, episode: Episode) -> Iterator[Finding]:
        """Yield failures, samples that cannot be stored, unsampled ids, unseen messages, and tool errors."""
        said = [_PLACE.sub("", failure) for failure in episode.failures]
        if any(sample.label is None for sample in episode.samples):
            said = [f"{s}; the sample has no label: set --label-key if it should" if "reward" in s else s for s in said]
        if episode.stuck:
            remedy = "give what it awaits a deadline, or the check more --seconds"
            said.append(f"{episode.stuck} takes longer than {self.patience:.2g} s: {remedy}")
        if episode.lost:
            said.append(f"{episode.lost} does not end when its trajectory is cancelled: let CancelledError through")
        for sample in episode.samples:
            if "failure" not in sample.metadata:
                turns = [turn for exchanges in episode.policy.asked.values() for turn in exchanges]
                said += [*wrong_ids(self.chat, self.user, sample, turns), *self._messages(sample)]
        try:
            encode_group(episode.samples)
        except SampleError as error:
            said.append(str(error))
        return (Finding(what, episode=episode.name) for what in said)

    def _messages(self, sample: Sample) -> Iterator[str]:
        messages = _messages(sample)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        seen = _squeezed(self.chat.decode(sample.tokens))
        for at, message in enumerate(messages[: turns[-1] if turns else 0]):
            content = message.get("content")
            text = _squeezed(content) if isinstance(content, str) else ""
            if message["role"] != "assistant" and text not in seen and repr(text)[1:-1] not in seen:
                method = self.where("reset" if at < turns[0] else "step")
                yield f"{method} gives a message of role {message['role']!r} that the chat template does not show to the model"
        for at, after in zip(turns, [*turns[1:], len(messages)], strict=True):
            calls = [call["id"] for call in messages[at].get("tool_calls") or ()]
            results = [message for message in messages[at + 1 : after] if message["role"] == "tool"]
            answered, step = [m.get("tool_call_id") for m in results], self.where("step")
            if results and len(results) != len(calls):
                yield f"{step} answers {len(calls)} tool calls with {len(results)} tool messages: give one a call, in their order"
            elif len(calls) > 1 and None in answered:
                yield f"{step} answers several tool calls without a tool_call_id: take that of each call (call.id)"
            elif {*answered} - {*calls, None}:
                yield f"{step} answers with a tool_call_id that none of the model's calls has"
            for message in results:
                content, name = str(message.get("content")), message.get("name")
                if _CODE.match(content):
                    yield f"tool `{name}` does not work: {content.removeprefix('Error: '):.300}"
                elif found := re.search(r"<.{1,200}? at 0x[0-9a-f]+>", content):
                    yield f"tool `{name}` shows the model an object's address, {found[0]!r}: return text or a JSON value"

    def of_tools(self, tools: Sequence[Tool]) -> Iterator[Finding]:
        """Yield findings on tools whose docstrings describe parameters that do not exist."""
        for tool in tools:
            if tool.stray:
                names = ", ".join(tool.schema["function"]["parameters"]["properties"]) or "none"
                yield Finding(f"tool `{tool.name}`: its docstring describes {tool.stray[0]!r}; its parameters: {names}")

    def of_pair(self, first: Episode, second: Episode, how: str) -> Iterator[Finding]:
        """Yield a finding if two episodes of one sample and policy differ. `how`: how the second was played."""
        again = f"differs in a second episode of the same sample, played {how}: {_REMEDY}"
        for one, two in zip(first.policy.asked.values(), second.policy.asked.values(), strict=False):
            differ = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a.given != b.given), None)
            if differ is not None:
                said = difference(self.chat, one[differ].given, two[differ].given, "once", "then")
                who = self._culprit(first, second) if differ else self.where("reset")
                yield Finding(f"{who} {again}", said, first.name)
                return
            if len(one) != len(two):
                yield Finding(f"{self.where('step')} {again}", f"once {len(one)} turns, then {len(two)}", first.name)
                return
        rewards = [[_rounded(sample) for sample in episode.samples] for episode in (first, second)]
        if rewards[0] != rewards[1]:
            yield Finding(f"{self.grades} {again}", f"once {rewards[0]}, then {rewards[1]}", first.name)

    def _culprit(self, first: Episode, second: Episode) -> str:
        """Return the tool, or else `step`, whose messages differ between the episodes."""
        pairs = zip(*(_messages(e.samples[0]) if e.samples else [] for e in (first, second)), strict=False)
        name = next((one.get("name") for one, two in pairs if one != two and one["role"] == "tool"), None)
        return f"tool `{name}`" if name else self.where("step")

    def of_group(self, episode: Episode) -> Iterator[Finding]:
        """Yield a finding if samples of one group begin with different prompts."""
        begun = [exchanges[0].given for exchanges in episode.policy.asked.values() if exchanges]
        if any(other != begun[0] for other in begun[1:]):
            yield Finding(
                f"{self.where('reset')} begins the samples of one group with different prompts, whose rewards are compared with "
                "each other: take what varies from sample.group_index or the row, not from sample.index",
                difference(self.chat, begun[0], begun[1], "one", "the other"),
            )

    def of_rewards(self, episodes: Sequence[Episode]) -> Iterator[Finding]:
        """Yield findings on rewards that are equal for all answers, or lower for a right answer."""
        graded = [
            (e.name, s) for e in episodes for s in e.samples if "failure" not in s.metadata and s.reward is not None
        ]
        earned = [(name, round(sample.get_reward_value(self.reward_key), 9)) for name, sample in graded]
        by_name = {name: reward for name, reward in reversed(earned)}
        if WRONG in by_name and len(by_name) > 2 and all(reward == earned[0][1] for _, reward in earned):
            zero = earned[0][1] == 0
            why = "fine if none of them solves the task" if zero else "nothing can be learned from it"
            what = f"{self.grades} gives the same reward, {earned[0][1]}, to whatever the policy does: {why}"
            yield Finding(what, f"tried: {'; '.join(by_name)}", note=zero)
        right = [by_name[name] for name in ANSWERS if name in by_name]
        if right and (wrong := by_name.get(WRONG)) is not None and max(right) < wrong:
            said = f"{max(right):g} against {wrong:g}"
            yield Finding(f"{self.grades} gives the label as the answer less than 'I do not know': a wrong sign?", said)


def wrong_ids(chat: Chat, user: str, sample: Sample, turns: Sequence[Exchange], split: bool = False) -> Iterator[str]:
    """Yield an error if the sample's tokens are not the ids that the policy read and wrote, or the mask is not 1 for
    exactly the written ids. `user`: the code of the sample. `split`: a turn may train in another sample."""
    tokens, start = list(sample.tokens), sample.prompt_length
    best = max((t.given + t.wrote for t in turns), key=lambda ids: (common(ids, tokens), -len(ids)), default=tokens)
    if best != tokens:
        said = difference(chat, best, tokens, "the model read and wrote", "the sample has")
        yield f"{user} leaves other tokens in the sample than the model's: {said}; append ids, never text"
        return
    wrote = [0] * len(tokens)
    for turn in turns:
        begin, end = len(turn.given), len(turn.given) + len(turn.wrote)
        if tokens[:end] == turn.given + turn.wrote:
            wrote[begin:end] = [1] * len(turn.wrote)
    mask, expected = list(sample.loss_mask or ()), wrote[start:]
    if split:
        expected = [min(pair) for pair in zip(mask, expected, strict=True)]
    if (at := common(mask, expected)) < len(mask):
        text = chat.decode([tokens[start + at]])
        who = "the model wrote" if wrote[start + at] else "the model did not write"
        yield f"{user} leaves loss mask {mask[at]} at token {start + at} ({text!r}), which {who}"


def difference(chat: Chat, a: Sequence[int], b: Sequence[int], one: str, other: str) -> str:
    """Describe the first token in which two sequences differ, with the text around it."""
    at = common(a, b)
    before, *texts = (chat.decode(ids) for ids in (a[max(0, at - 12) : at], a[at : at + 12], b[at : at + 12]))
    return f"from token {at} on, behind {before!r}, {one} {texts[0]!r}, {other} {texts[1]!r}"


def _messages(sample: Sample) -> list[Message]:
    return sample.metadata.get("messages") or []


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _rounded(sample: Sample) -> object:
    return round(sample.reward, 9) if isinstance(sample.reward, float) else sample.reward
