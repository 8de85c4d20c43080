"""A fake engine that logs what it samples, and the audit of Samples against that log.

The engine is random: odd splits of text into tokens, broken calls, truncated turns, empty turns, invalid UTF-8, kept
sets, experts, and weight updates during a turn. Its samples depend on the prompt and the number of requests for it, not
on the order of requests; `order` shuffles that order.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.chat import Chat
from agentrl.engine.transport import Sink
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.sample import Origin, Sample
from tests.support.agent_clients import runs, words

Speech = Callable[[random.Random, list[int], SamplingParams], str | Exception]


@dataclass(frozen=True)
class Sampled:
    """One answer of the engine."""

    number: int
    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    versions: tuple[tuple[str, int, int], ...]
    kept: list[array[int]] | None
    params: SamplingParams


@dataclass
class LoggingEngine:
    """Samples what `speech` says.

    Attributes:
        damage: answers may be truncated, split oddly or invalid text. Else they are the encoded text and an end token.
        order: seed of the order in which waiting requests are answered; None answers them at once.
        gate: until this event is set, requests wait.
        asking: set by the first request.
    """

    chat: Chat
    speech: Speech
    damage: bool = True
    order: int | None = None
    gate: asyncio.Event | None = None
    log: list[Sampled] = field(default_factory=list)
    asking: asyncio.Event = field(default_factory=asyncio.Event)
    _repeats: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._pace = random.Random(self.order)
        added = self.chat.tokenizer.get_added_vocab().values()
        self._plain = range(1000, min(added))

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        images: Any = None,
        deadline: float | None = None,
        extra: Mapping[str, Any] | None = None,
        scored: int = 0,
        sink: Sink = None,
    ) -> Generation:
        prompt = list(input_ids)
        key = array("i", prompt).tobytes()
        self._repeats[key] += 1
        self.asking.set()
        rng = random.Random(zlib.crc32(key) + 7919 * self._repeats[key])
        for _ in range(self._pace.randrange(6) if self.order is not None else 0):
            await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        said = self.speech(rng, prompt, params)
        if isinstance(said, Exception):
            raise said
        ids, finish = self._ids(said, rng, params)
        sampled = self._sampled(prompt, ids, rng, params)
        self.log.append(sampled)
        start = params.routed_experts_start_len
        whole = [*prompt, *ids]
        return Generation(
            ids=list(ids),
            log_probs=list(sampled.log_probs),
            text=self.chat.decode(ids),
            finish_reason=finish,
            weight_version=sampled.versions[-1][0],
            weight_versions=sampled.versions,
            prompt_tokens=len(prompt),
            cached_tokens=0,
            meta_info={},
            kept=sampled.kept,
            routed=None if start is None else experts(whole, sampled.number, start, len(whole) - 1),
        )

    def _ids(self, said: str, rng: random.Random, params: SamplingParams) -> tuple[list[int], FinishReason]:
        stop = self.chat.stop_token_ids[0]
        ids: list[int] = []
        if not self.damage:
            ids = self.chat.encode(said)
        else:
            while said:
                step = rng.randint(1, 12)
                ids += self.chat.encode(said[:step])
                said = said[step:]
            if rng.random() < 0.05:
                at = rng.randint(0, len(ids))
                ids[at:at] = rng.choices(self._plain, k=rng.randint(1, 3))
        if self.damage and len(ids) > 1 and rng.random() < 0.06:
            return ids[: rng.randrange(1, len(ids))], FinishReason("length")
        ids = ids if ids and ids[-1] in self.chat.stop_ids else [*ids, stop]
        most = params.max_new_tokens or len(ids)
        return (ids[:most], FinishReason("length")) if len(ids) > most else (ids, FinishReason("stop", ids[-1]))

    def _sampled(self, prompt: list[int], ids: list[int], rng: random.Random, params: SamplingParams) -> Sampled:
        n = len(ids)
        versions: tuple[tuple[str, int, int], ...] = (("3", 0, n),)
        if n > 1 and rng.random() < 0.3:
            cut = rng.randrange(1, n)
            versions = (("3", 0, cut), ("4", cut, n))
        kept = None
        if params.return_sampling_mask:
            kept = [array("i", sorted({id_, *rng.choices(self._plain, k=rng.randint(0, 3))})) for id_ in ids]
        log_probs = [float(np.float32(-3 * rng.random())) for _ in ids]
        return Sampled(len(self.log), prompt, ids, log_probs, versions, kept, params)


def experts(tokens: Sequence[int], call: int, start: int, end: int) -> NDArray[np.int16]:
    """Return the experts of the tokens from `start` to `end`, as in the engine's answer `call`."""
    of = np.asarray(tokens[start:end], dtype=np.int64)
    rows = [(of * 31 + np.arange(start, max(start, end)) * 7) % 32749, np.full(len(of), call % 32749)]
    return np.stack(rows, axis=1).astype(np.int16)


# ---- speech ---------------------------------------------------------------------------------------------------


def hermes(
    reasoning: str | None = None, content: str = "", calls: Sequence[tuple[str, Any]] = (), *, spaces: int | None = None
) -> str:
    """Write a turn in the form of Qwen3's template."""
    said = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
    written = [
        json.dumps({"name": name, "arguments": arguments}, indent=spaces, ensure_ascii=False)
        for name, arguments in calls
    ]
    blocks = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    return said + content + ("\n" if content and blocks else "") + blocks


_VALUES: Sequence[Any] = (1.0, 2.5, 1000, True, None, [1.0, "é"], {"b": 1, "a": [2.0]}, "", "line\nline", "\\", '"')


def random_speech(rng: random.Random, prompt: list[int], params: SamplingParams) -> str:
    """Write a random turn: with reasoning or not, empty, with up to three calls, some of them broken."""
    reasoning = words(rng, 5).replace("<|im_end|>", "") if rng.random() < 0.4 else None
    content = words(rng, 6).replace("<|im_end|>", "").replace("<think>", "")
    calls: list[tuple[str, Any]] = []
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        more = {rng.choice("abc"): rng.choice(_VALUES) for _ in range(rng.randint(0, 2))}
        calls.append((rng.choice(["look", "run", "write"]), {"q": words(rng, 4), **more}))
    said = hermes(reasoning, content, calls, spaces=rng.choice([None, 1]))
    said = said.replace("<|im_end|>", "")
    if calls and rng.random() < 0.06:
        said = said[: -rng.randint(1, 30)]
    if calls and rng.random() < 0.03:
        said = said.replace('"q": "', '"q": "\\ud83d', 1)  # half of a surrogate pair
    return said


# ---- the audit ------------------------------------------------------------------------------------------------


@dataclass
class Audit:
    """Checks samples against an engine's log.

    Attributes:
        wrong: a message for each fault.
        trained: how often each answer of the engine trains.
    """

    log: Sequence[Sampled]
    wrong: list[str] = field(default_factory=list)
    trained: Counter[int] = field(default_factory=Counter)

    def add(self, sample: Sample, since: int = 0) -> None:
        """Check one sample of a session whose answers are in the log from `since` on."""
        tokens, mask, log_probs = list(sample.tokens), sample.loss_mask or [], sample.rollout_log_probs or []
        prompt = len(tokens) - sample.response_length
        path = self._path(tokens, since)
        chosen: dict[int, Sampled] = {}
        for start, end in runs(mask):
            turns = [turn for turn in path if (len(turn.prompt), len(turn.ids)) == (prompt + start, end - start)]
            if not turns:
                self.wrong.append(f"ids {start} to {end} train, and were not sampled there behind those ids")
                continue
            same = [turn for turn in turns if turn.log_probs == log_probs[start:end]]
            same.sort(key=lambda turn: self.trained[turn.number])
            if not same:
                self.wrong.append(f"log-probs of ids {start} to {end} are not those of their engine's answer")
                continue
            chosen[prompt + start] = same[0]
            self.trained[same[0].number] += 1
            if self.trained[same[0].number] > 1:
                self.wrong.append(f"answer {same[0].number} trains {self.trained[same[0].number]} times")
            self._versions(sample, start, end, same[0])
            self._kept(sample, start, end, same[0])
        if any(p for at, p in enumerate(log_probs) if not mask[at]):
            self.wrong.append("a token that does not train has a log-prob")
        path = [turn for turn in path if len(turn.prompt) >= sample.prompt_length]  # the others are rendered
        for turn in path:
            if not chosen.keys() & {len(turn.prompt)}:  # a turn that trains in another sample
                chosen[len(turn.prompt)] = turn
        by_start = Counter(len(turn.prompt) for turn in path)
        if all(count == 1 for count in by_start.values()):
            self._experts(sample, tokens, [chosen[start] for start in sorted(chosen)])

    def _path(self, tokens: list[int], since: int) -> list[Sampled]:
        """Return the engine's answers whose prompt and ids are at their places in these ids."""
        found = []
        for turn in self.log[since:]:
            start, end = len(turn.prompt), len(turn.prompt) + len(turn.ids)
            if end <= len(tokens) and tokens[start:end] == turn.ids and tokens[:start] == turn.prompt:
                found.append(turn)
        return found

    def _versions(self, sample: Sample, start: int, end: int, turn: Sampled) -> None:
        spans = tuple(
            (s.version, s.start - start, s.end - start)
            for s in sample.segments
            if s.origin is Origin.MODEL and start <= s.start < end
        )
        if spans != turn.versions:
            self.wrong.append(f"versions of ids {start} to {end} are {spans}, sampled were {turn.versions}")

    def _kept(self, sample: Sample, start: int, end: int, turn: Sampled) -> None:
        bounds, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
        if turn.kept is None:
            return
        if bounds is None or ids is None:
            self.wrong.append("the kept sets are missing")
            return
        rows = [list(ids[bounds[at] : bounds[at + 1]]) for at in range(start, end)]
        if rows != [list(row) for row in turn.kept]:
            self.wrong.append(f"kept sets of ids {start} to {end} are not those of their engine's answer")

    def _experts(self, sample: Sample, tokens: list[int], turns: Sequence[Sampled]) -> None:
        if not turns or turns[0].params.routed_experts_start_len is None:
            return
        expected = np.zeros((0, 2), np.int16)
        for turn in turns:
            end = len(turn.prompt) + len(turn.ids) - 1
            expected = np.concatenate([expected, experts(tokens, turn.number, len(expected), end)])
        rows = sample.routing()
        if rows is None or not np.array_equal(rows, expected):
            shape = None if rows is None else rows.shape
            self.wrong.append(f"experts: {shape} rows, expected {expected.shape}, or other values")


ROOTS = {"first", "compacted", "tools_changed", "new_agent", "template_rewrites"}
REASONS = {*ROOTS, "extend", "fork", "retry", "undelivered", "edited"}


def tree_faults(tree: dict[str, Any], counts: Mapping[str, int], samples: Sequence[Sample]) -> list[str]:
    """Return the inconsistencies in a session: its nodes, its roots, its counts, its samples."""
    wrong = []
    nodes = {node["number"]: node for node in tree["nodes"]}
    roots = {root["number"]: root for root in tree["roots"]}
    for number, node in nodes.items():
        reason, parent = node["reason"], node["parent"]
        if reason not in REASONS:
            wrong.append(f"node {number}: unknown reason {reason}")
        if parent is None and reason not in {*ROOTS, "edited", "retry", "undelivered"}:
            wrong.append(f"node {number}: a root by {reason}")
        if parent is not None and (reason in ROOTS or parent not in nodes or nodes[parent]["root"] != node["root"]):
            wrong.append(f"node {number}: {reason} behind {parent}")
        if node["root"] not in roots:
            wrong.append(f"node {number}: no root {node['root']}")
    for number, root in roots.items():
        if root["role"] not in ("main", "subagent", "side"):
            wrong.append(f"root {number}: role {root['role']}")
    if sum(root["role"] == "main" and root["reason"] in ("first", "new_agent") for root in roots.values()) > 1:
        wrong.append("two main conversations")
    dropped = {name: n for name, n in counts.items() if name.startswith("dropped/")}
    if counts.get("sampled", 0) != counts.get("trained", 0) + sum(dropped.values()):
        wrong.append(f"sampled is not trained + dropped: {dict(counts)}")
    if counts.get("sampled", 0) != sum(node["sampled_tokens"] for node in nodes.values()):
        wrong.append("sampled is not the sum of the nodes")
    if counts.get("trained", 0) != sum(sum(sample.loss_mask or ()) for sample in samples):
        wrong.append("trained is not the sum of the samples' masks")
    reasons = Counter(f"reason/{node['reason']}" for node in nodes.values())
    if reasons != {name: n for name, n in counts.items() if name.startswith("reason/") and n}:
        wrong.append(f"reasons of the nodes {dict(reasons)} are not those of {dict(counts)}")
    if set(dropped) - {"dropped/undelivered", "dropped/side", "dropped/unrewarded"}:
        wrong.append(f"unknown reasons to drop: {sorted(dropped)}")
    parents = {node["parent"] for node in nodes.values()}
    lost = [n for number, n in nodes.items() if number not in parents and not n["delivered"]]
    apart = [n for n in nodes.values() if roots.get(n["root"], {}).get("role") == "side"]
    expected = {node["number"]: node["sampled_tokens"] for node in [*lost, *apart]}
    if sum(dropped.values()) != sum(expected.values()) and not counts.get("dropped/unrewarded"):
        wrong.append(f"dropped are {dropped}, expected the turns {sorted(expected)}: {sum(expected.values())} tokens")
    return wrong
