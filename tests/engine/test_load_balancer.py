"""The choice of engines, without engines."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.load_balancer import EngineState, LoadBalancer


def of(*urls: str, max_sessions: int = 100) -> LoadBalancer[EngineState]:
    return LoadBalancer(*map(EngineState, urls), max_sessions=max_sessions)


def choose(balance: LoadBalancer[EngineState], session: str | None, now: float) -> EngineState:
    engine = balance.choose(session, now)
    assert engine is not None
    return engine


def test_a_session_stays_and_new_ones_go_where_there_is_room() -> None:
    balance = of("a", "b")
    first = choose(balance, "s", 0.0)
    second = choose(balance, "t", 0.0)
    assert {first.url, second.url} == {"a", "b"}
    assert all(choose(balance, "s", 0.0) is first for _ in range(10))
    assert choose(balance, None, 0.0) is second


def test_a_dead_engine_loses_its_sessions_and_comes_back_after_its_rest() -> None:
    balance = of("a", "b")
    first = choose(balance, "s", 0.0)
    balance.release(first)
    balance.failed(first, 0.0)
    other = choose(balance, "s", 0.5)
    assert other is not first
    assert choose(balance, None, 1.5) is first
    balance.answered(first)
    assert choose(balance, "s", 1.5) is other


def test_with_all_dead_the_first_to_come_back_is_tried() -> None:
    balance = of("a", "b")
    a, b = balance.members
    balance.failed(a, 0.0)
    balance.failed(b, 0.5)
    assert not balance.any_usable(0.6)
    assert choose(balance, None, 0.6) is a


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["choose", "release", "dead", "alive"]), st.integers(0, 20)), max_size=200),
)
def test_loads_add_up_and_live_sessions_never_move(count: int, steps: list[tuple[str, int]]) -> None:
    balance = of(*map(str, range(count)))
    held: list[EngineState] = []
    homes: dict[str, EngineState] = {}
    for now, (action, number) in enumerate(steps):
        engine = balance.members[number % count]
        if action == "choose":
            session = f"s{number}"
            chosen = choose(balance, session, float(now))
            if session in homes and homes[session].usable(float(now)):
                assert chosen is homes[session]
            homes[session] = chosen
            held.append(chosen)
        elif action == "release" and held:
            balance.release(held.pop(number % len(held)))
        elif action == "dead":
            balance.failed(engine, float(now))
        elif action == "alive":
            balance.answered(engine)
        assert sum(e.in_flight for e in balance.members) == len(held)


def test_the_longest_unused_session_is_forgotten_first() -> None:
    balance = of("a", "b", max_sessions=1)
    first = choose(balance, "s", 0.0)
    choose(balance, "t", 0.0)  # evicts "s"
    choose(balance, None, 0.0)
    choose(balance, None, 0.0)
    balance.answered(first)
    other = next(engine for engine in balance.members if engine is not first)
    balance.release(other)
    assert choose(balance, "s", 0.0) is other


def test_an_idle_engine_is_chosen_however_often_it_was_chosen_before() -> None:
    balance = of("a", "b")
    busy, idle = choose(balance, None, 0.0), choose(balance, None, 0.0)
    for _ in range(3):
        balance.release(idle)
        assert choose(balance, None, 0.0) is idle
    assert (busy.in_flight, busy.chosen, idle.chosen) == (1, 1, 4)


def test_an_engine_that_failed_gets_one_request_a_rest_until_it_answers_well() -> None:
    balance = of("a", "b")
    sick = balance.members[0]
    balance.failed(sick, 0.0)
    for _ in range(5):  # those in flight count once
        balance.failed(sick, 0.5)
    assert (sick.failures, sick.rests_until) == (1, 1.0)
    assert [choose(balance, None, 1.5) is sick for _ in range(4)] == [True, False, False, False]
    balance.failed(sick, 1.5)
    assert sick.rests_until == 3.5
    balance.release(sick)
    balance.answered(sick)
    assert choose(balance, None, 1.6) is sick


def test_an_engine_rests_as_long_as_it_says() -> None:
    balance = of("a")
    balance.failed(balance.members[0], 0.0, at_least=60.0)
    assert balance.members[0].rests_until == 60.0


def test_stale_weights_are_never_chosen_unknown_ones_only_when_nothing_else_is_left() -> None:
    balance = of("a", "b")
    a, b = balance.members
    a.weights = "unknown"
    assert [choose(balance, None, 0.0) for _ in range(3)] == [b, b, b]
    b.weights = "stale"
    assert choose(balance, None, 0.0) is a
    a.weights = "stale"
    assert balance.choose(None, 0.0) is None


def test_engines_come_and_go() -> None:
    balance = of("a")
    first = choose(balance, "s", 0.0)
    balance.add(second := EngineState("b"))
    balance.remove(first)
    assert choose(balance, "s", 0.0) is second
    balance.release(first)
    assert [engine.url for engine in balance.members] == ["b"]
