"""The order of a run, without anything running."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.run.schedule import Action, Cadence, Evaluate, Export, NextBatch, Save, Schedule, SendWeights, Train


def play(schedule: Schedule, data_ends_at: int | None = None) -> list[Action]:
    """Everything that the schedule asks for, where the data ends before step `data_ends_at`."""
    out: list[Action] = []
    while (action := schedule.next()) is not None:
        out.append(action)
        match action:
            case NextBatch(step) if step == data_ends_at:
                schedule.data_ended()
            case NextBatch(step):
                schedule.batch_ready(step)
            case Train(step):
                schedule.trained(step)
    return out


def short(actions: list[Action]) -> str:
    """`w1` weights of version 1, `b0` batch, `t0` train, `e-1` evaluate, `s0` save, `x` export."""
    letters = {SendWeights: "w", NextBatch: "b", Train: "t", Evaluate: "e", Save: "s", Export: "x"}
    return " ".join(
        letters[type(a)] + str(getattr(a, "version" if isinstance(a, SendWeights) else "step", "")) for a in actions
    )


def test_a_plain_run() -> None:
    assert short(play(Schedule(Cadence(steps=2)))) == "w0 b0 t0 w1 b1 t1 w2 s1 x"


def test_an_evaluation_has_the_newest_weights_and_comes_before_the_checkpoint() -> None:
    cadence = Cadence(steps=4, send=3, evaluate=2, evaluate_first=True, save=2)
    assert short(play(Schedule(cadence))) == "w0 e-1 b0 t0 b1 t1 w2 e1 s1 b2 t2 w3 b3 t3 w4 e3 s3 x"


def test_the_last_model_is_evaluated_and_saved_off_the_interval_too() -> None:
    assert short(play(Schedule(Cadence(steps=3, evaluate=2, save=2)))) == "w0 b0 t0 w1 b1 t1 w2 e1 s1 b2 t2 w3 e2 s2 x"


def test_data_that_ends_early_is_evaluated_and_saved() -> None:
    cadence = Cadence(steps=9, send=4, evaluate=4, save=4)
    assert short(play(Schedule(cadence), data_ends_at=2)) == "w0 b0 t0 b1 t1 b2 w2 e1 s1 x"


def test_a_resumed_run_goes_on_with_the_checkpoints_version_and_evaluates_nothing_first() -> None:
    assert short(play(Schedule(Cadence(steps=4, evaluate_first=True), first=3))) == "w3 b3 t3 w4 s3 x"


def test_a_finished_run_only_writes_its_model() -> None:
    assert short(play(Schedule(Cadence(steps=3, evaluate=1, save=1), first=3))) == "w3 x"


def test_data_that_ended_before_the_resume_changes_nothing() -> None:
    assert short(play(Schedule(Cadence(steps=5, evaluate=2), first=2), data_ends_at=2)) == "w2 b2 x"


def test_without_engines_nothing_is_sent() -> None:
    assert short(play(Schedule(Cadence(steps=2, send=None)))) == "b0 t0 b1 t1 s1 x"


interval = st.none() | st.integers(1, 5)


@given(
    st.builds(Cadence, st.integers(1, 12), interval, interval, st.booleans(), interval),
    st.integers(0, 12),
    st.none() | st.integers(0, 12),
)
def test_every_step_is_trained_once_in_order_and_covered_by_a_checkpoint(
    cadence: Cadence, first: int, ends: int | None
) -> None:
    actions = play(Schedule(cadence, first), ends)
    end = cadence.steps if ends is None or ends < first else min(ends, cadence.steps)
    trained = [a.step for a in actions if isinstance(a, Train)]
    assert trained == list(range(first, end))
    assert actions[-1] == Export()
    saved = [a.step for a in actions if isinstance(a, Save)]
    assert saved == sorted(set(saved))
    assert not trained or saved[-1] == trained[-1]
    for at, action in enumerate(actions):
        done = [a.step for a in actions[:at] if isinstance(a, Train)]
        newest = done[-1] if done else first - 1
        if isinstance(action, Save):
            assert action.step == newest
        if isinstance(action, SendWeights):
            assert action.version == newest + 1
        if isinstance(action, Evaluate) and cadence.send is not None:
            sent = [a.version for a in actions[:at] if isinstance(a, SendWeights)]
            assert sent[-1] == newest + 1
