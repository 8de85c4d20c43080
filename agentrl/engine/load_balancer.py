"""The choice of an engine for a request: a pure state machine without tasks, clocks or sockets.

1. The last `max_sessions` sessions stay on their engines while these are usable. Other requests go to the least loaded.
2. An engine that fails rests for 1 s, doubled with every failure in a row up to 32 s. It then gets one request at a
   time until it succeeds. Failures during a rest do not count.
3. If no engine is usable, the one whose rest ends first is chosen, but never a `stale` engine."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar


@dataclass(slots=True, eq=False)
class EngineState:
    """State of one engine; `rests_until` is a time on the caller's clock, in seconds."""

    url: str
    in_flight: int = 0
    chosen: int = 0
    failures: int = 0
    rests_until: float = 0.0
    weights: Literal["current", "unknown", "stale"] = "current"

    def usable(self, now: float) -> bool:
        """Return true if the engine may get another request."""
        well = self.failures == 0 or (now >= self.rests_until and self.in_flight == 0)
        return well and self.weights == "current"


E = TypeVar("E", bound=EngineState)


class LoadBalancer(Generic[E]):
    """A chooser among `members`. Each engine that `choose` returns must be released exactly once."""

    def __init__(self, *members: E, max_sessions: int = 100_000) -> None:
        self.members, self._max_sessions = members, max_sessions
        self._sessions: OrderedDict[str, E] = OrderedDict()

    def add(self, engine: E) -> None:
        """Add an engine to the choice."""
        self.members += (engine,)

    def remove(self, engine: E) -> None:
        """Remove an engine from the choice. Its requests in flight must still be released."""
        self.members = tuple(member for member in self.members if member is not engine)
        self._sessions = OrderedDict((session, its) for session, its in self._sessions.items() if its is not engine)

    def choose(self, session_id: str | None, now: float) -> E | None:
        """Return the engine for a request and count the request as in flight; None if no engine may be chosen."""
        engine = None if session_id is None else self._sessions.get(session_id)
        if engine is None or not engine.usable(now):
            if (engine := self._least_loaded(now)) is None:
                return None
            engine.chosen += 1
        if session_id is not None:
            self._sessions[session_id] = engine
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        engine.in_flight += 1
        return engine

    def release(self, engine: E) -> None:
        """Record the end of a request, successful or not."""
        engine.in_flight -= 1

    def failed(self, engine: E, now: float, at_least: float = 0.0) -> None:
        """Record a failure: the engine rests for at least this many seconds, and its sessions may move."""
        if now < engine.rests_until:
            return
        engine.rests_until = now + max(at_least, 2.0 ** min(engine.failures, 5))
        engine.failures += 1

    def answered(self, engine: E) -> None:
        """Record a good answer: it ends the rest and the row of failures."""
        engine.failures, engine.rests_until = 0, 0.0

    def any_usable(self, now: float) -> bool:
        """Return true if any engine may be sent requests now."""
        return any(engine.usable(now) for engine in self.members)

    def _least_loaded(self, now: float) -> E | None:
        if usable := [engine for engine in self.members if engine.usable(now)]:
            return min(usable, key=lambda engine: (engine.in_flight, engine.chosen))
        left = [engine for engine in self.members if engine.weights != "stale"]
        return min(left, key=lambda engine: engine.rests_until, default=None)
