"""The session of an agent: its limits, its turns with the engine, and its end."""

import secrets
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Protocol, TypeVar

import anyio
import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl.chat import Chat
from agentrl.engine.images import ImageInputs
from agentrl.engine.request_sampling import RequestSampling
from agentrl.engine.transport import Sink
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import (
    EngineFailure,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    EnvFailure,
    Failure,
    MediaError,
    TemplateError,
    first_error,
    raised_as,
)
from agentrl.gateway.contracts import AgentRequest, AgentTurn, Memo, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.record import SessionRecord
from agentrl.gateway.roles import Roles
from agentrl.gateway.tree import Reading, SessionTree, TurnNode
from agentrl.gateway.wires.common import in_order_of_calls
from agentrl.gateway.wires.responses import items_by_id
from agentrl.media import has_images, take_images
from agentrl.plugins import describe_error
from agentrl.sample import Message, Sample
from agentrl.serving.http import RequestError

S = TypeVar("S")
T = TypeVar("T")
_SAMPLING: Final = TypeAdapter(SamplingParams)
_NAMES: Final = {each.name for each in fields(SamplingParams)}
_MAX_IGNORED: Final = 100


WorkRunner = Callable[..., Awaitable[Any]]
"""`run(work, *args, size=None)` returns `work(*args)`. It uses a thread if tokenizing `size` characters is slow. `size`
defaults to the size of the request's body."""


class TurnSampler(Protocol):
    """The part of an engine pool that sessions need."""

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: ImageInputs | None = None,
        sink: Sink = None,
    ) -> Generation:
        """Sample a continuation of `input_ids`, which have placeholders for `images`. `sink` receives the engine's
        events during sampling. Each event has the whole text so far. Raises EngineFailure."""


class Limits(BaseModel):
    """Limits of one session. A request beyond a limit gets status 429 and the limit's name, or 400 for `images`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    requests: int = Field(2000, ge=1)
    """Requests in all."""
    parallel: int = Field(32, ge=1)
    """Requests at the same time."""
    sampled_tokens: int = Field(1_000_000, ge=1)
    """Tokens that the model samples in all. The turn that reaches the limit is still finished."""
    bytes: int = Field(256 << 20, ge=1)
    """Bytes of request bodies in all."""
    images: int = Field(64, ge=1)
    """Different images in all."""
    idle_seconds: float = Field(3600, ge=1)
    """Seconds without a request after which the session refuses further requests."""


def read_sampling(given: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Read a session's sampling parameters under SGLang's names. Raises Refusal: a name is unknown, a type is wrong, or
    SGLang refuses a value."""
    if unknown := sorted(given.keys() - _NAMES):
        known = ", ".join(sorted(_NAMES))
        raise Refusal(f"sampling.{unknown[0]}: there is no such parameter; the parameters are {known}")
    try:
        params = _SAMPLING.validate_json(orjson.dumps(given), strict=True)
        RequestSampling.decode(params.to_wire(), vocab_size=vocab_size)
    except ValidationError as error:
        raise _invalid("sampling", error) from None
    except RequestError as error:
        raise Refusal(f"sampling: {error}") from None
    if params.max_new_tokens == 0:
        raise Refusal("sampling.max_new_tokens: expected at least 1")
    return params


def read_limits(given: Mapping[str, Any]) -> Limits:
    """Read a session's limits. Raises Refusal: a limit is unknown, below 1 or of a wrong type."""
    try:
        return Limits.model_validate(given)
    except ValidationError as error:
        raise _invalid("limits", error) from None


def _invalid(what: str, error: ValidationError) -> Refusal:
    wrong = error.errors(include_input=False, include_url=False)[0]
    return Refusal(f"{what}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")


@dataclass(eq=False)
class Session:
    """One agent's trajectory in progress.

    Attributes:
        origin: the common fields of the session's Samples.
        sampling: sampling parameters of all turns, including stop ids.
        context_length: maximum number of tokens of a path through the tree.
        token: the secret in the agent's base URL.
        clock: returns seconds, for the idle limit.
        counts: numbers of requests and tokens, by name; `figures` adds the numbers of nodes.
        refusals: the last refusals of requests.
        refusal: the refusal of the last request; None if the request was answered.
        memo: the parts of earlier requests that the wire formats have read.
        record: after `close`, the tree in the form that a Sample keeps.
        failure: the failure of the last request if the agent did not cause it, or the gateway's end; else None."""

    chat: Chat
    engine: TurnSampler
    roles: Roles
    origin: Sample
    sampling: SamplingParams
    context_length: int
    limits: Limits = field(default_factory=Limits)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16), repr=False)
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tree = SessionTree(self.chat, self.roles)
        self.tree.images |= self.origin.images
        self._route, self._last, self._closed = uuid.uuid4().hex, self.clock(), False
        self._lock, self._scopes = anyio.Lock(fast_acquire=True), set[anyio.CancelScope]()
        self._histories = dict[str, list[Message]]()
        self._known = dict[TurnNode | None, tuple[int, bytes]]()  # `Prompt.known` of the last turns
        self.refusals: deque[Refusal] = deque(maxlen=20)
        self.memo, self.record = Memo(), dict[str, Any]()
        self.failure: Failure | None = None
        self.refusal: Refusal | None = None

    async def turn(
        self, request: AgentRequest, size: int, run: WorkRunner, live: LiveTurn | None = None
    ) -> tuple[TurnNode, AgentTurn]:
        """Have the model answer a request of `size` bytes.

        Args:
            run: calls slow functions.
            live: begins when the request has a node. After that, the request's content cannot cause a refusal.

        Raises Refusal: the session is closed or at a limit, the template cannot render the prompt, the prompt does not
        fit, or the engines failed."""
        with self._admitted(size):
            self._count_ignored(request)
            request = self._whole(await self._with_references(request, size, run))
            async with self._lock:
                # Reading takes about a sixteenth of the time of tokenizing.
                reading: Reading = await run(self._blamed, self.tree.read, request, size=size // 16)
                node = await run(self._blamed, self.tree.place, reading, size=reading.new_characters)
                self._add(node)
            begun = AgentTurn(id=uuid.uuid4().hex, created=int(time.time()), prompt_tokens=node.length)
            if live is not None:
                live.begin(begun, node.chat.parser)
            try:
                got = await self._generate(node, request, None if live is None else live.sink)
                turn = self._answered(node, request, got, begun)
                if live is not None:
                    live.finish(turn)
                return node, turn
            finally:
                if not node.finish:
                    self.tree.discard(node)

    async def measure(self, request: AgentRequest, size: int, run: WorkRunner) -> int:
        """Return the number of prompt tokens of a request. Raises Refusal: the session is closed or at a limit, or the
        template cannot render the prompt."""
        with self._admitted(size, requests=0):
            request = self._whole(await self._with_references(request, size, run))
            async with self._lock:
                tokens: int = await run(self._blamed, self.tree.measure, request, size=size)
        return tokens

    def refused(self, refusal: Refusal) -> None:
        """Count a refusal, and clear the memo of parts: the byte limit may not have counted the request."""
        self.memo.parts.clear()
        self.memo.last.clear()
        self.counts[f"refused/{refusal.reason or refusal.kind}"] += 1
        self.refusals.append(refusal)
        self.refusal = refusal

    def refusal_of(self, error: Exception) -> Refusal | None:
        """Return the last refusal whose message an agent's error contains, or else `refusal`."""
        said = str(first_error(error))
        return next((refusal for refusal in reversed(self.refusals) if str(refusal) in said), self.refusal)

    def figures(self) -> dict[str, int]:
        """Return `counts`, and the number of nodes for each reason."""
        return {**self.counts, **Counter(f"reason/{node.reason}" for node in self.tree.nodes.values())}

    def close(self, rewards: Mapping[int, float] | float | None = None) -> list[Sample]:
        """End the session, cancel its requests in flight, and return its Samples. `rewards`: one reward for all roots
        except side conversations, or a mapping from a root's number to its reward. With None the caller sets the
        rewards later."""
        self._end()
        if not isinstance(rewards, Mapping):
            given = {root.number: rewards for root, role in self.tree.roots().items() if role != "side"}
        else:
            given = dict(rewards)
        samples, tokens = self.tree.samples(self.origin, given)
        self.counts = Counter({**self.counts, **tokens})
        self.record = SessionRecord.of(self.tree, given, [*map(str, self.refusals)]).model_dump(exclude_defaults=True)
        return samples

    @property
    def abandoned(self) -> bool:
        """True if no request came for 24 times the idle limit. The gateway forgets such a session."""
        return not self._scopes and self.clock() - self._last > 24 * self.limits.idle_seconds

    def fail(self, failure: EngineFailure) -> None:
        """End the session with a failure, and cancel its requests in flight. The owner still calls `close`."""
        self.failure = failure
        self._end()

    def _end(self) -> None:
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def _admitted(self, size: int, requests: int = 1) -> Iterator[None]:
        """Count a request. Raises Refusal: the session is at a limit, is closed, or is closed during the request."""
        limits, counts, now = self.limits, self.counts, self.clock()
        beyond = {
            "idle_seconds": not self._scopes and now - self._last > limits.idle_seconds,
            "requests": counts["requests"] >= limits.requests,
            "parallel": len(self._scopes) >= limits.parallel,
            "sampled_tokens": counts["sampled"] >= limits.sampled_tokens,
            "bytes": counts["bytes"] + size > limits.bytes,
        }
        if self._closed:
            raise Refusal("there is no such session", "not_found")
        if reason := next((name for name, holds in beyond.items() if holds), ""):
            raise Refusal(f"the request exceeds a session limit: {reason}={getattr(limits, reason)}", "limit", reason)
        self._last = now
        counts.update(requests=requests, bytes=size)
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
                self._last = self.clock()
        if scope.cancelled_caught:
            raise Refusal("there is no such session: it was closed", "not_found")

    def _count_ignored(self, request: AgentRequest) -> None:
        """Count fields without effect. The number of names is limited, because the agent chooses them."""
        for name in (f"ignored/{name:.80}" for name in request.ignored):
            if name in self.counts or sum(known.startswith("ignored/") for known in self.counts) < _MAX_IGNORED:
                self.counts[name] += 1

    async def _with_references(self, request: AgentRequest, size: int, run: WorkRunner) -> AgentRequest:
        """Return `request` with a reference in place of each image; the session keeps the images. Raises Refusal: an
        image is invalid, or the model takes no images."""
        if not has_images(request.messages):
            return request
        if self.chat.placeholders is None:
            raise Refusal("messages: this model sees no images; send text only")
        limits = replace(self.chat.image_limits, count=self.limits.images, root=None)
        with raised_as(Refusal, "messages", MediaError):
            messages, new = await run(take_images, request.messages, self.tree.images, limits, size=size)
        self.tree.images |= new
        return replace(request, messages=messages)

    def _whole(self, request: AgentRequest) -> AgentRequest:
        """Return `request` with the history of `previous_response_id` inserted before its new messages."""
        if not request.previous:
            return request
        if (before := self._histories.get(request.previous)) is None:
            raise Refusal(f"previous_response_id: {request.previous!r:.80} is not known in this session", "not_found")
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        return replace(request, messages=list(in_order_of_calls([*own, *before, *new])))

    def _add(self, node: TurnNode) -> None:
        """Add a node to the tree. `place` does not add it, because others read the tree while a thread runs `place`."""
        most = self.context_length - 2
        if node.length > most:
            self.tree.overflowed(node)
            raise Refusal(f"prompt is too long: {node.length} tokens > {most} maximum", "context")
        self.tree.add(node)

    def _blamed(self, work: Callable[[S], T], given: S) -> T:
        try:
            return work(given)
        except TemplateError as error:
            raise Refusal(str(error)) from error

    async def _generate(self, node: TurnNode, request: AgentRequest, sink: Sink) -> Generation:
        base, room = self.sampling, self.context_length - node.length - 1
        own = (base.stop,) if isinstance(base.stop, str) else base.stop or ()
        most = min(room, base.max_new_tokens or room, request.max_tokens or room)
        params = replace(
            base,
            max_new_tokens=most,
            min_new_tokens=None if base.min_new_tokens is None else min(base.min_new_tokens, most),
            stop=(*own, *request.stop) or None,
            sampling_seed=None if base.sampling_seed is None else (base.sampling_seed + node.number) % 2**31,
            routed_experts_start_len=None if base.routed_experts_start_len is None else node.rows,
        )
        try:
            session = f"{self._route}-{node.root.number}"
            images = ImageInputs.of(self.tree.images, node.image_spans()) if self.tree.images else None
            prompt = node.prompt()
            prompt.known = self._known.pop(node.parent, prompt.known)
            got = await self.engine.generate(prompt, params, session_id=session, images=images, sink=sink)
            self._known[node] = prompt.known
            if got.finish_reason.type == "abort":
                raise EngineRejected("the engine aborted the request", kind="aborted")
        except EngineFailure as error:
            refusal = _refusal(error)
            if refusal.kind == "context":
                self.tree.overflowed(node)
            elif refusal.kind != "invalid":
                self.failure = refusal.failure = error
            raise refusal from error
        return got

    def _answered(self, node: TurnNode, request: AgentRequest, got: Generation, begun: AgentTurn) -> AgentTurn:
        stop = matched if (matched := got.finish_reason.matched) in request.stop else None
        assert stop is None or isinstance(stop, str)
        try:
            told, self.failure, self.refusal = self.tree.sampled(node, got, stop), None, None
        except Exception as error:
            said = f"the parser of the model's turns raised {describe_error(error)}"
            self.failure = EnvFailure(said, kind="env_raised")
            raise Refusal(str(self.failure), "failed") from error
        self.counts["sampled"] += len(got.ids)
        counted = replace(begun, cached_tokens=got.cached_tokens, completion_tokens=len(got.ids))
        turn = replace(counted, parsed=told, finish=node.finish or "stop", stop=stop)
        if request.stored:
            self._histories[turn.id] = [*request.messages[request.instructions :], told.to_message()]
            self.memo.items.update(items_by_id(request, turn))
        return turn


def _refusal(error: EngineFailure) -> Refusal:
    if isinstance(error, EngineUnreachable | EngineTimeout):
        return Refusal(str(error), "overloaded")
    if isinstance(error, EngineRejected) and error.kind == "context_overflow":
        return Refusal(f"prompt is too long: {error}", "context")
    if isinstance(error, EngineRejected) and error.status == 400:
        return Refusal(str(error))  # the engine refuses what the request asks for
    return Refusal(str(error), "failed")
