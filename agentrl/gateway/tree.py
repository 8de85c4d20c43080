"""The tree of a session's model turns: `SessionTree` finds the turn that a request continues, and makes the Samples.

1. Pure code. `read` finds the node that a request extends, `place` makes a pending node, and `add` adds it. A session
   calls them under one lock, to keep the order of arrival. `sampled` completes the node; `discard` removes it.
2. Messages are compared by a chain of hashes over their normal form. The form leaves out what a client may change: ids
   of calls, reasoning, the spelling of arguments, and white space around an assistant's text.
3. Each leaf becomes a Sample. The leaves below a node share its sampled tokens; only the first leaf trains them."""

from __future__ import annotations

import copy
import hashlib
import operator
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Literal

import orjson

from agentrl.chat import Chat, ChatSession, ParsedTurn
from agentrl.chat.messages import normalise_messages, normalise_tools
from agentrl.engine.wire import Generation, Prompt
from agentrl.gateway.contracts import AgentRequest, Refusal
from agentrl.gateway.roles import Roles
from agentrl.media import Image, ImageSpan
from agentrl.sample import Message, Origin, Sample, SpecInfo, VersionSpan, content_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Reason = Literal[
    "first", "extend", "fork", "retry", "undelivered", "edited", "compacted", "tools_changed", "new_agent",
    "template_rewrites",
]  # fmt: skip
Role = Literal["main", "subagent", "side"]
Key = bytes

_CALL_ID = re.compile(r"(?s)(.*)_(\d+)")
"""The id of a tool call as the agent gets it: the parser's id, "_", and the number of the node with the call."""


@dataclass(eq=False, slots=True)
class TurnNode:
    """One model turn.

    Attributes:
        number: running number in the session, in the order of requests.
        family: for a root that an edit or a compaction opened, the first root of its conversation.
        close, env: ids between the parent's sampled ids and this turn's: `close` ends the parent's turn, `env` has the
            new messages. A root's whole prompt is `env`.
        spans: places of images in `env`.
        length: number of tokens of the prompt, including all nodes above.
        keys: the keys of all prefixes of the history before the turn; after `sampled`, only the whole history's key.
        rows: number of rows of routed experts that the nodes above have.
        chat: the conversation's state before the turn; after `sampled`, the state after the turn.
        delivered: the answer reached the agent: it was sent, or the agent repeated it.
        children: numbers of the nodes below; no objects, so that a session is freed without garbage collection."""

    number: int
    parent: TurnNode | None
    reason: Reason
    close: array[int]
    env: array[int]
    length: int
    chat: ChatSession
    tools: Key = b""
    has_tools: bool = False
    keys: tuple[Key, ...] = ()
    agent: str = ""
    family: TurnNode | None = None
    rows: int = 0
    spans: list[ImageSpan] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    versions: tuple[VersionSpan, ...] = ()
    kept: list[array[int]] | None = None
    routed: NDArray[np.int16] | None = field(default=None, repr=False)
    finish: Literal["", "stop", "calls", "length"] = ""
    text: str = ""
    calls: tuple[str, ...] = ()
    delivered: bool = False
    children: list[int] = field(default_factory=list)

    def path(self) -> list[TurnNode]:
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def root(self) -> TurnNode:
        return self.path()[0]

    @property
    def family_root(self) -> TurnNode:
        return self.root.family or self.root

    def prompt(self) -> Prompt:
        ids = Prompt("i")
        for node in self.path():
            ids += node.close + node.env
            if node is not self:
                ids += node.ids
        return ids

    def image_spans(self) -> list[ImageSpan]:
        spans, length = list[ImageSpan](), 0
        for node in self.path():
            spans += [span.moved(length + len(node.close)) for span in node.spans]
            length += len(node.close) + len(node.env) + len(node.ids)
        return spans

    def shown(self) -> dict[str, Any]:
        """Return the turn's place and size as plain values."""
        above = None if self.parent is None else self.parent.number
        sizes = {"prompt_tokens": self.length, "sampled_tokens": len(self.ids), "finish": self.finish}
        return {"number": self.number, "parent": above, "reason": self.reason, **sizes}

    @property
    def live(self) -> bool:
        """True if the turn is complete and reached the agent."""
        return bool(self.finish) and self.delivered


@dataclass(frozen=True, slots=True)
class Reading:
    """A request in the normal form.

    Attributes:
        messages: the messages, in roles that the chat template supports.
        keys: a key for each prefix of the messages.
        tools, digest: the tools and their key.
        agent: the agent's name.
        found: the node that the request continues, and the number of repeated messages; None: no node."""

    messages: list[Message]
    keys: tuple[Key, ...]
    tools: Any
    digest: Key
    agent: str
    found: tuple[TurnNode, int] | None

    @property
    def new_characters(self) -> int | None:
        """Number of characters that the request adds to the node that it continues; None for a new root."""
        if self.found is None:
            return None
        return sum(len(content_text(message["content"])) for message in self.messages[self.found[1] :])


class SessionTree:
    """The model turns of one session; not safe for concurrent tasks. `images`: the images of all messages, by hash."""

    def __init__(self, chat: Chat, roles: Roles) -> None:
        self._chat, self._roles = chat, roles
        self.nodes: dict[int, TurnNode] = {}
        self.images: dict[str, Image] = {}
        self._count = 0
        self._answers: defaultdict[Key, list[TurnNode]] = defaultdict(list)
        self._asked: defaultdict[tuple[Key, Key], list[TurnNode]] = defaultdict(list)
        self._begun: dict[tuple[str, Key], TurnNode] = {}
        self._said: dict[tuple[str, Key], TurnNode] = {}
        self._full: dict[TurnNode, TurnNode] = {}
        self._normal: dict[Key, Message] = {}
        self._last: tuple[list[Message], list[Message]] = [], []
        self._chained: tuple[list[Message], list[Key]] = [], [b""]
        self._digests: dict[int, Key] = {}
        self._tools: dict[bytes, tuple[Any, Key]] = {}
        self._last_tools: tuple[list[dict[str, Any]], tuple[Any, Key]] = [], (None, b"")

    def read(self, request: AgentRequest) -> Reading:
        """Convert `request` to the normal form, and find the node that it continues. Raises Refusal: the last message
        is the assistant's. TemplateError: the chat template cannot render the messages."""
        messages = self._roles.fold(self._normalised(request.messages))
        if not messages or messages[-1]["role"] == "assistant":
            raise Refusal("messages: the last message must be of a user or a tool; a prefill is not supported")
        tools, digest = self._read_tools(request.tools)
        keys = self._chain(messages)
        return Reading(messages, keys, tools, digest, request.agent, self._known(messages, keys, digest))

    def place(self, reading: Reading) -> TurnNode:
        """Return a pending node for a request; `add` adds the node. Raises TemplateError: see `read`."""
        messages, keys, found = reading.messages, reading.keys, reading.found
        extended = self._extended(found, messages, keys) if found else None
        placed = extended or self._root(messages, reading.tools, *self._reason(reading))
        placed.tools, placed.has_tools, placed.keys = reading.digest, bool(reading.tools), keys
        placed.agent = reading.agent
        return placed

    def measure(self, request: AgentRequest) -> int:
        """Return the number of prompt tokens that a request would have. The tree stores nothing of the request."""
        other = copy.copy(self)
        other._normal, other._digests = self._normal.copy(), self._digests.copy()
        other._tools = self._tools.copy()
        return other.place(other.read(request)).length

    def _normalised(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages` in the normal form. Equal messages are converted once per session. The objects with which the
        last request began are not hashed again."""
        before, known = self._last
        found = known[: _shared(before, messages)]
        for message in messages[len(found) :]:
            if (key := _hash(b"", orjson.dumps(message))) not in self._normal:
                self._normal[key] = normal = normalise_messages([message])[0]
                self._digests[id(normal)] = _digest(normal)
            found.append(self._normal[key])
        self._last = list(messages), found
        return found

    def _chain(self, messages: list[Message]) -> tuple[Key, ...]:
        """Return a key for each prefix of `messages`, the empty prefix first."""
        before, known = self._chained
        keys, places = known[: 1 + (shared := _shared(before, messages))], dict[Any, int]()
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                places = {call.get("id"): at for at, call in enumerate(message.get("tool_calls", ()))}
            if at >= shared:
                place = places.get(message.get("tool_call_id"), 0) if message["role"] == "tool" else 0
                keys.append(_hash(keys[-1], self._digests.get(id(message)) or _digest(message), place))
        self._chained = messages, keys
        return tuple(keys)

    def _read_tools(self, tools: list[dict[str, Any]]) -> tuple[Any, Key]:
        """Return `tools` in the normal form, and their key. A session converts equal tools once."""
        before, found = self._last_tools
        if not len(before) == len(tools) == _shared(before, tools):
            if (key := orjson.dumps(tools)) not in self._tools:
                normal = normalise_tools(tools)
                digest = _hash(b"", orjson.dumps(normal, option=orjson.OPT_SORT_KEYS)) if normal else b""
                self._tools[key] = normal, digest
            found = self._tools[key]
        self._last_tools = tools, found
        return found

    def _known(self, messages: list[Message], keys: tuple[Key, ...], tools: Key) -> tuple[TurnNode, int] | None:
        """Find the node with the longest history that `messages` repeat, and the number of repeated messages."""
        for end in range(len(messages) - 1, 0, -1):
            answers = self._answers.get(keys[end], ()) if messages[end - 1]["role"] == "assistant" else ()
            if same := [node for node in answers if node.tools == tools]:
                return _meant(same, messages[end - 1]), end
        return None

    def _extended(self, found: tuple[TurnNode, int], messages: list[Message], keys: tuple[Key, ...]) -> TurnNode | None:
        """Return a child of the node in `found`; None if the request needs a new root: the template would rewrite
        the node's history, or new assistant messages have calls or need another form for the template."""
        node, end = found
        new = messages[end:]
        node.delivered = True
        edited = any(message["role"] == "assistant" for message in new)
        if any("tool_calls" in message for message in new) or (edited and self._roles.retold):
            return None
        chat = node.chat.fork()
        delta = chat.extend(_with_own_ids(new, messages[end - 1], node))
        if delta.restart is not None:
            return None
        earlier = [other for other in self._asked.get((keys[-1], node.tools), ()) if other.parent is node]
        reason: Reason = "fork" if node.children else "extend"
        if edited:
            reason = "edited"
        elif earlier:
            reason = "retry" if any(other.live or not other.finish for other in earlier) else "undelivered"
        close, env = array("i", delta.close), array("i", delta.env)
        length = node.length + len(node.ids) + len(close) + len(env)
        rows = node.rows + (0 if node.routed is None else len(node.routed))
        spans = self._chat.image_spans(env, delta.new)
        return TurnNode(self._count, node, reason, close, env, length, chat, rows=rows, spans=spans)

    def _root(self, messages: list[Message], tools: Any, reason: Reason, family: TurnNode | None) -> TurnNode:
        chat = ChatSession(self._chat, self._roles.show(_renumbered(messages)), tools)
        ids, chat.prompt_ids = chat.prompt_ids, []
        spans = self._chat.image_spans(ids, chat.messages)
        root = TurnNode(self._count, None, reason, array("i"), array("i", ids), len(ids), chat, spans=spans)
        root.family = None if family is None else family.family_root
        return root

    def _reason(self, reading: Reading) -> tuple[Reason, TurnNode | None]:
        """Return the reason for a new root, and a root of the conversation that it continues, if any. A named agent
        continues its own conversations only."""
        messages, keys, agent = reading.messages, reading.keys, reading.agent
        asked = self._asked.get((keys[-1], reading.digest), ())
        if earlier := [node for node in asked if node.agent == agent]:
            return ("retry" if any(n.live or not n.finish for n in earlier) else "undelivered"), earlier[0].root
        if not self.nodes:
            return "first", None
        if reading.found is not None:
            node, end = reading.found
            edited = any(message["role"] == "assistant" for message in messages[end:])
            return ("edited" if edited else "template_rewrites"), node.root
        for key in reversed(keys):
            answers = (node for node in self._answers.get(key, ()) if node.agent == agent)
            if other := next((node for node in answers if node.tools != reading.digest), None):
                return "tools_changed", other.root
        spoken = [message for message in messages if message["role"] == "assistant"]
        shared = max((at for at, key in enumerate(keys) if (agent, key) in self._begun), default=0)
        if any(message["role"] == "user" for message in messages[:shared]):
            return ("edited" if spoken else "compacted"), self._begun[agent, keys[shared]].root
        known = (self._said.get((agent, _digest(message))) for message in spoken)
        if other := next((node for node in known if node is not None), None):
            same_instructions = self._begun.get((agent, keys[1])) if messages[0]["role"] == "system" else None
            return "edited", (same_instructions or other).root
        return "new_agent", None

    def add(self, node: TurnNode) -> None:
        """Add the node that was placed last."""
        self.nodes[node.number] = node
        self._count += 1
        self._asked[node.keys[-1], node.tools].append(node)
        if node.parent is not None:
            node.parent.children.append(node.number)

    def overflowed(self, node: TurnNode) -> None:
        """Note that a pending node's prompt does not fit. If no later turn is sampled, the Sample of its parent, or of the
        last turn of a root's conversation, ends with `context`."""
        family = node.family_root
        before = (other for other in reversed(self.nodes.values()) if other.live and other.family_root is family)
        if (last := node.parent or next(before, None)) is not None:
            self._full[family] = last

    def discard(self, node: TurnNode) -> None:
        """Remove a pending node whose request failed or was cancelled."""
        del self.nodes[node.number]
        self._asked[node.keys[-1], node.tools].remove(node)
        if node.parent is not None:
            node.parent.children.remove(node.number)

    def sampled(self, node: TurnNode, got: Generation, stop: str | None = None) -> ParsedTurn:
        """Complete `node` with the engine's answer, and return the turn. Broken calls become text. `stop`: the stop
        string that ended the turn; the returned content ends before `stop`."""
        self._full.pop(node.family_root, None)
        own = parsed = node.chat.append_model_turn(got.ids)
        node.ids, node.log_probs = array("i", got.ids), array("d", got.log_probs)
        node.versions, node.kept, node.routed = got.weight_versions, got.kept, got.routed
        node.text = got.text if got.parts == 1 else self._chat.decode(got.ids)
        if parsed.broken or not all(isinstance(call.arguments, dict) for call in parsed.tool_calls):
            parsed = self._without_calls(node, got.ids)
        node.calls = tuple(call.id for call in parsed.tool_calls)
        told = replace(parsed, tool_calls=tuple(replace(c, id=f"{c.id}_{node.number}") for c in parsed.tool_calls))
        if stop is not None:
            before, found, _ = told.content.rpartition(stop)
            # The edges of the content have lost their white space, and so has a stop string there.
            told = replace(told, content=(before if found else told.content.removesuffix(stop.strip())).rstrip())
        cut = got.finish_reason.type == "length"
        node.finish = "length" if cut else "calls" if node.calls else "stop"
        same = parsed is own and stop is None
        digest = _digest(node.chat.messages[-1] if same else normalise_messages([told.to_message()])[0])
        self._answers[_hash(node.keys[-1], digest)].append(node)
        self._said.setdefault((node.agent, digest), node)
        for known in node.keys[1:]:
            self._begun.setdefault((node.agent, known), node)
        node.keys = node.keys[-1:]
        return told

    def _without_calls(self, node: TurnNode, ids: Sequence[int]) -> ParsedTurn:
        """Return a turn with its calls as text."""
        text = self._chat.decode(takewhile(lambda id_: id_ not in self._chat.stop_ids, ids))
        parsed = node.chat.parser.without_calls().parse(text)
        return ParsedTurn(text.strip()) if parsed.broken or parsed.tool_calls else parsed

    def roots(self) -> dict[TurnNode, Role]:
        """Return the roots in order, with their roles."""
        roots = [node for node in self.nodes.values() if node.parent is None]
        first = {root.family_root: root for root in reversed(roots)}  # a family's own root may have failed
        equipped = {root.family_root for root in roots if root.has_tools}  # a conversation may get its tools later
        own = [root.family_root for root in roots if not first[root.family_root].agent]
        main = next((family for family in own if family in equipped or not equipped), None)
        helps = equipped | {family for family, root in first.items() if root.agent}
        kinds: dict[TurnNode, Role] = {f: "main" if f is main else "subagent" if f in helps else "side" for f in first}
        return {root: kinds[root.family_root] for root in roots}

    def samples(self, origin: Sample, rewards: Mapping[int, float | None]) -> tuple[list[Sample], Counter[str]]:
        """Return the leaves as Samples, and the numbers of sampled, trained and dropped tokens.

        Args:
            origin: the common fields of all Samples; each Sample is a changed copy.
            rewards: number of a root -> its reward, or None to set the reward later. Other roots are dropped."""
        counts, trained = Counter[str](), set[TurnNode]()
        roles, found = self.roots(), list[Sample]()
        for node, reason in self.dropped(rewards).items():
            counts["sampled"] += len(node.ids)
            counts[f"dropped/{reason}" if reason else "trained"] += len(node.ids)
            if not reason and not any(self.nodes[child].live for child in node.children):
                root = node.root
                sample = _as_sample(node, origin, rewards[root.number], roles[root], trained)
                sample.images = {span.hash: self.images[span.hash] for span in sample.image_spans}
                if self._full.get(node.family_root) is node:
                    sample.stop("context")
                found.append(sample)
        return found, +counts

    def dropped(self, rewarded: Container[int]) -> dict[TurnNode, str]:
        """Return for each node why it is not trained, or "" (docs/gateway.md). `rewarded`: numbers of rewarded roots."""
        reasons = {root: "side" if role == "side" else "unrewarded" for root, role in self.roots().items()}
        reasons = {root: "" if root.number in rewarded else reason for root, reason in reasons.items()}
        for node in self.nodes.values():
            if node.parent is not None:
                reasons[node] = reasons[node.parent]
        return {node: reasons[node] if node.live else "undelivered" for node in self.nodes.values()}

    def shown(self) -> dict[str, Any]:
        """Return the tree as plain values; see docs/gateway.md."""
        nodes = [
            node.shown()
            | {"root": node.root.number, "delivered": node.delivered, "agent": node.agent, "text": node.text}
            for node in self.nodes.values()
        ]
        roots = [{"number": r.number, "role": role, "reason": r.reason} for r, role in self.roots().items()]
        return {"nodes": nodes, "roots": roots}


def _as_sample(leaf: TurnNode, origin: Sample, reward: float | None, role: Role, trained: set[TurnNode]) -> Sample:
    """Return the path to `leaf` as a Sample. Turns in `trained` get loss mask 0; other turns are added to it."""
    path = leaf.path()
    sample = replace(origin, reward=reward, metadata=dict(origin.metadata), spec_info=SpecInfo())
    sample.set_prompt_tokens(path[0].env, path[0].spans)
    for turn, node in enumerate(path, 1):
        if node.parent is not None:
            sample.append_observation(node.close, turn=turn - 1, origin=Origin.CLOSE)
            sample.append_observation(node.env, turn=turn - 1, spans=node.spans)
        start = sample.response_length
        kept = None if node in trained else node.kept
        sample.append_model(
            node.ids, node.log_probs, node.versions, text=node.text, turn=turn, kept=kept, routed=node.routed
        )
        if node in trained and sample.loss_mask is not None and sample.rollout_log_probs is not None:
            sample.loss_mask[start:] = [0] * len(node.ids)
            sample.rollout_log_probs[start:] = [0.0] * len(node.ids)
        trained.add(node)
    sample.stop("length" if leaf.finish == "length" else "done")
    sample.metadata["messages"] = leaf.chat.messages
    sample.metadata["gateway"] = {
        "root": path[0].number,
        "role": role,
        "agent": path[0].agent,
        "nodes": [node.number for node in path],
        "reasons": [node.reason for node in path],
    }
    return sample


def _shared(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return the number of objects with which both begin: the same objects, not only equal ones."""
    return sum(takewhile(bool, map(operator.is_, before, now)))


def _hash(before: Key, part: bytes, result: int = 0) -> Key:
    """Return the key of a prefix and its next part. `result`: for a tool's result, its call's position in the turn."""
    return hashlib.blake2b(b"%d %b%b" % (result, before, part), digest_size=16).digest()


def _digest(message: Message) -> Key:
    """Return a hash of the parts of a message that are compared."""
    calls = [
        [c["function"]["name"], _canonical(_unwrapped(c["function"]["arguments"]))]
        for c in message.get("tool_calls", ())
    ]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return _hash(b"", orjson.dumps([message["role"], content, calls], option=orjson.OPT_SORT_KEYS))


def _unwrapped(arguments: Any) -> Any:
    """Return the object in a custom tool's text: in this form an agent repeats a call with other arguments than a text."""
    if isinstance(arguments, dict) and arguments.keys() == {"input"} and isinstance(text := arguments["input"], str):
        with suppress(ValueError):
            return inner if isinstance(inner := orjson.loads(text), dict) else arguments
    return arguments


def _canonical(value: Any) -> Any:
    """Return `value` with whole numbers as int, because many programs write 1.0 as 1. Whole numbers from 2**53 on
    become float, because JavaScript rounds them."""
    if type(value) is int and abs(value) >= 2**53:
        return float(str(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list) else value


def _meant(same: Sequence[TurnNode], told: Message) -> TurnNode:
    """Choose among nodes with the same history and answer: the node whose call ids the agent repeats, else the last
    delivered node, else the last node."""
    for call in told.get("tool_calls", ()):
        if match := _CALL_ID.fullmatch(call.get("id", "")):
            for node in same:
                if str(node.number) == match[2] and match[1] in node.calls:
                    return node
    return next((node for node in reversed(same) if node.delivered), same[-1])


def _with_own_ids(new: Sequence[Message], told: Message, node: TurnNode) -> list[Message]:
    """Return `new` with the parser's call ids instead of the agent's. Calls are matched by position."""
    own = dict(zip((call.get("id") for call in told.get("tool_calls", ())), node.calls, strict=False))
    return [
        {**message, "tool_call_id": own[given]} if (given := message.get("tool_call_id")) in own else message
        for message in new
    ]


def _renumbered(messages: Sequence[Message]) -> list[Message]:
    """Return a history with call ids of nine letters and digits, and with the function's name in each result: some
    templates require both."""
    results, numbers = dict[Any, Message](), count(1)
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            for call in calls:
                results[call["id"]] = {"tool_call_id": f"call{next(numbers):05d}", "name": call["function"]["name"]}
            message = {**message, "tool_calls": [{**call, "id": results[call["id"]]["tool_call_id"]} for call in calls]}
        found.append({**message, **results.get(message.get("tool_call_id"), {})})
    return found
