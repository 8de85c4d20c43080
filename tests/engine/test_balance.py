"""The choice of engines, without engines."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.balance import Balance, EngineState


def test_a_session_stays_and_new_ones_go_where_there_is_room() -> None:
    balance = Balance(["a", "b"])
    first = balance.choose("s", 0.0)
    second = balance.choose("t", 0.0)
    assert {first.url, second.url} == {"a", "b"}
    assert all(balance.choose("s", 0.0) is first for _ in range(10))
    assert balance.choose(None, 0.0) is second


def test_a_dead_engine_loses_its_sessions_and_comes_back_after_its_rest() -> None:
    balance = Balance(["a", "b"], rest=1.0)
    first = balance.choose("s", 0.0)
    balance.release(first)
    balance.failed(first, 0.0)
    other = balance.choose("s", 0.5)
    assert other is not first
    assert balance.choose(None, 1.5) is first
    balance.answered(first)
    assert balance.choose("s", 1.5) is other


def test_with_all_dead_the_first_to_come_back_is_tried() -> None:
    balance = Balance(["a", "b"])
    a, b = balance.engines
    balance.failed(a, 0.0)
    balance.failed(b, 0.5)
    assert not balance.any_usable(0.6)
    assert balance.choose(None, 0.6) is a


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["choose", "release", "dead", "alive"]), st.integers(0, 20)), max_size=200),
)
def test_loads_add_up_and_live_sessions_never_move(count: int, steps: list[tuple[str, int]]) -> None:
    balance = Balance([f"e{i}" for i in range(count)])
    held: list[EngineState] = []
    homes: dict[str, EngineState] = {}
    for now, (action, number) in enumerate(steps):
        engine = balance.engines[number % count]
        if action == "choose":
            session = f"s{number}"
            chosen = balance.choose(session, float(now))
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
        assert sum(e.in_flight for e in balance.engines) == len(held)


def test_the_longest_unused_session_is_forgotten_first() -> None:
    balance = Balance(["a", "b"], max_sessions=1)
    first = balance.choose("s", 0.0)
    balance.choose("t", 0.0)  # pushes "s" out
    balance.choose(None, 0.0)
    balance.choose(None, 0.0)
    balance.answered(first)
    other = next(engine for engine in balance.engines if engine is not first)
    balance.release(other)
    assert balance.choose("s", 0.0) is other
