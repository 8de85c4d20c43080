"""Every spoiled run gets its cause, and no healthy run gets one: from recorded metrics, and (at night) new runs."""

from pathlib import Path

import pytest

from agentrl.observability.metrics import read_metrics
from agentrl.observability.verdict import CAUSES, judge
from tests.observability.verdicts.cases import CASES, HEALTHY, RECORDED, SPOILED, Case

BY_NAME = [pytest.param(case, id=case.name) for case in CASES.values()]


@pytest.mark.parametrize("case", BY_NAME)
def test_recorded_metrics(case: Case) -> None:
    check(case, RECORDED / f"{case.name}.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", BY_NAME)
def test_a_new_run(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = case.run(tmp_path / "run")
    check(case, folder / "metrics.jsonl")
    told = capfd.readouterr().err.splitlines()[-2 if case.cause else -1 :]
    assert "verdict: " in told[0]
    assert case.cause is None or f"likeliest cause: {case.cause}" in told[1]


def check(case: Case, metrics: Path) -> None:
    verdict = judge(read_metrics(metrics))
    assert verdict is not None
    assert verdict.cause == (case.cause or ""), verdict.lines
    assert (verdict.outcome in ("learned", "stayed high")) == (case.cause is None), verdict.lines


def test_the_list_is_long_enough() -> None:
    """Twelve spoiled runs, five healthy ones. Each expected cause exists. Recordings are small and of known cases."""
    assert len(SPOILED) >= 12
    assert len(HEALTHY) >= 5
    assert {case.cause for case in SPOILED} <= {cause.name for cause in CAUSES}
    assert {file.stem for file in RECORDED.iterdir()} == CASES.keys()
    assert all(file.stat().st_size < 40_000 for file in RECORDED.iterdir())
