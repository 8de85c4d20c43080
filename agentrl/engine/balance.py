"""Which engine answers which request: a pure state machine without tasks, clocks or sockets.

1. A session stays on its engine, so that the engine's prefix cache serves every turn; it moves only when the
   engine is marked dead. A request without a session goes to the least loaded engine, and so does a new session.
2. Load is the number of requests chosen and not yet released; ties go to the engine with fewer sessions so far.
3. A dead engine is chosen again only after its rest, which doubles with every failure in a row, or when nothing
   else is left. One answered request makes it alive.
4. At most `max_sessions` sessions are remembered; the longest unused one is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class EngineState:
    """What is known of one engine; `dead_until` is a time on the caller's clock, in seconds."""

    url: str
    in_flight: int = 0
    chosen: int = 0
    failures: int = 0
    dead_until: float = 0.0

    def usable(self, now: float) -> bool:
        """Whether requests may be sent there."""
        return self.failures == 0 or now >= self.dead_until


class Balance:
    """Chooses engines; every `choose` is followed by exactly one `release` of the same engine."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        rest: float = 1.0,
        max_rest: float = 30.0,
        max_sessions: int = 100_000,
    ) -> None:
        if not urls:
            raise ValueError("expected at least one engine address, got none")
        self.engines = [EngineState(url) for url in urls]
        self._rest, self._max_rest, self._max_sessions = rest, max_rest, max_sessions
        self._sessions: OrderedDict[str, EngineState] = OrderedDict()

    def choose(self, session_id: str | None, now: float) -> EngineState:
        """The engine for a request; counts it as in flight there."""
        engine = None if session_id is None else self._sessions.get(session_id)
        if engine is None or not engine.usable(now):
            engine = self._least_loaded(now)
            engine.chosen += 1
        if session_id is not None:
            self._sessions[session_id] = engine
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)
        engine.in_flight += 1
        return engine

    def release(self, engine: EngineState) -> None:
        """The request is over, however it ended."""
        engine.in_flight -= 1

    def mark_dead(self, engine: EngineState, now: float) -> None:
        """No answer came from there: rest it and let its sessions move."""
        engine.dead_until = now + min(self._rest * 2.0 ** min(engine.failures, 30), self._max_rest)
        engine.failures += 1

    def mark_alive(self, engine: EngineState) -> None:
        """An answer came from there."""
        engine.failures = 0

    def any_usable(self, now: float) -> bool:
        """Whether any engine may be sent requests now."""
        return any(engine.usable(now) for engine in self.engines)

    def _least_loaded(self, now: float) -> EngineState:
        usable = [engine for engine in self.engines if engine.usable(now)]
        if not usable:  # all dead: the one whose rest ends first
            return min(self.engines, key=lambda engine: engine.dead_until)
        return min(usable, key=lambda engine: (engine.in_flight, engine.chosen))
