"""The order of a run's actions, without a run."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.run.schedule import Action, Cadence, Do, actions


def play(cadence: Cadence, first: int = 0, data_ends_at: int | None = None) -> list[Action]:
    """Return all actions if the data ends before step `data_ends_at`."""
    out: list[Action] = []

    def data_ended() -> bool:
        assert out[-1].do is Do.NEXT_BATCH
        return out[-1].step == data_ends_at

    for action in actions(cadence, first, data_ended):
        out.append(action)
    return out


def short(actions: list[Action]) -> str:
    """Abbreviate: `w1` weights of version 1, `b0` batch, `t0` train, `e-1` evaluate, `s0` save, `x` export."""
    letters = {Do.SEND: "w", Do.NEXT_BATCH: "b", Do.TRAIN: "t", Do.EVALUATE: "e", Do.SAVE: "s"}
    return " ".join("x" if a.do is Do.EXPORT else f"{letters[a.do]}{a.step}" for a in actions)


def steps(actions: list[Action], do: Do) -> list[int]:
    return [action.step for action in actions if action.do is do]


def test_a_plain_run() -> None:
    assert short(play(Cadence(steps=2))) == "w0 b0 t0 w1 b1 t1 w2 s1 x"


def test_an_evaluation_has_the_newest_weights_and_comes_before_the_checkpoint() -> None:
    cadence = Cadence(steps=4, send=3, evaluate=2, evaluate_first=True, save=2)
    assert short(play(cadence)) == "w0 e-1 b0 t0 b1 t1 w2 e1 s1 b2 t2 w3 b3 t3 w4 e3 s3 x"


def test_the_last_model_is_evaluated_and_saved_off_the_interval_too() -> None:
    assert short(play(Cadence(steps=3, evaluate=2, save=2))) == "w0 b0 t0 w1 b1 t1 w2 e1 s1 b2 t2 w3 e2 s2 x"


def test_data_that_ends_early_is_evaluated_and_saved() -> None:
    cadence = Cadence(steps=9, send=4, evaluate=4, save=4)
    assert short(play(cadence, data_ends_at=2)) == "w0 b0 t0 b1 t1 b2 w2 e1 s1 x"


def test_a_resumed_run_goes_on_with_the_checkpoints_version_and_evaluates_nothing_first() -> None:
    assert short(play(Cadence(steps=4, evaluate_first=True), first=3)) == "w3 b3 t3 w4 s3 x"


def test_a_finished_run_only_writes_its_model() -> None:
    assert short(play(Cadence(steps=3, evaluate=1, save=1), first=3)) == "w3 x"


def test_data_that_ended_before_the_resume_changes_nothing() -> None:
    assert short(play(Cadence(steps=5, evaluate=2), first=2, data_ends_at=2)) == "w2 b2 x"


def test_without_engines_nothing_is_sent() -> None:
    assert short(play(Cadence(steps=2, send=None))) == "b0 t0 b1 t1 s1 x"


interval = st.none() | st.integers(1, 5)


@given(
    st.builds(Cadence, st.integers(1, 12), interval, interval, st.booleans(), interval),
    st.integers(0, 12),
    st.none() | st.integers(0, 12),
)
def test_every_step_is_trained_once_in_order_and_covered_by_a_checkpoint(
    cadence: Cadence, first: int, ends: int | None
) -> None:
    found = play(cadence, first, ends)
    end = cadence.steps if ends is None or ends < first else min(ends, cadence.steps)
    trained = steps(found, Do.TRAIN)
    assert trained == list(range(first, end))
    assert found[-1].do is Do.EXPORT
    saved = steps(found, Do.SAVE)
    assert saved == sorted(set(saved))
    assert not trained or saved[-1] == trained[-1]
    for at, action in enumerate(found):
        newest = [first - 1, *steps(found[:at], Do.TRAIN)][-1]
        if action.do is Do.SAVE:
            assert action.step == newest
        if action.do is Do.SEND:
            assert action.step == newest + 1
        if action.do is Do.EVALUATE and cadence.send is not None:
            assert steps(found[:at], Do.SEND)[-1] == newest + 1
