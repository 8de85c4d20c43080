"""The order in which `make test` distributes tests among its processes."""

from pathlib import Path

from tests.support.order import read_seconds, unit_of

ROOT = Path(__file__).parents[1]


def test_every_line_names_tests_that_are_there() -> None:
    for name in read_seconds(slow=True):
        file, _, test = name.partition("::")
        if file.startswith("tests/compat/") and not (ROOT / "tests" / "compat").is_dir():
            continue  # scripts/without_compat.sh
        assert (ROOT / file).is_file(), f"tests/seconds*.tsv: no file {file}"
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), (
            f"tests/seconds*.tsv: {name}"
        )


def test_a_test_with_a_line_of_its_own_is_dealt_alone() -> None:
    seconds = {"a.py": 3.0, "a.py::slow[x]": 9.0}
    assert unit_of("a.py::slow[x]", seconds) == "a.py::slow[x]"
    assert unit_of("a.py::slow[y]", seconds) == unit_of("a.py::quick", seconds) == "a.py"
    assert unit_of("b.py::quick", seconds) == "b.py"
