"""`code`: the text taken as the program, forms of tests, and a verdict that the submission cannot influence."""

import json
import time
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub.code import CodeGrader, same_output
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import find
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rm_hub.submissions.harness.forms import same_value
from agentrl.rm_hub.submissions.harness.standins import Held, Remote
from agentrl.rm_hub.submissions.harness.values import NotPlain, decode, encode
from agentrl.rm_hub.submissions.tests import Checks, Programs, extract_code, read_tests
from tests.engine.faults import until
from tests.support.nightly import nightly

PARTS = pytest.mark.parametrize(
    "part",
    [pytest.param(slice(0, None, 4), id="a quarter"), pytest.param(slice(None), id="all", marks=pytest.mark.slow)],
)
SQUARE = "def f(x):\n    return x * x"


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


async def graded(*items: tuple[str, object], **changes: Any) -> list[Grade]:
    """Return grades of (program, label) pairs in one sandbox."""
    settings = RmHubSettings(**{"code_test_timeout": 5.0, **changes})
    async with CodeGrader(settings) as grader:
        return [await grader.grade(fenced(code), label, {}) for code, label in items]


# ---- the program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (fenced(SQUARE), SQUARE),
        (f"~~~\n{SQUARE}\n~~~", SQUARE),
        (f"Text ```python\n{SQUARE}\n``` more", SQUARE + "\n``` more"),
        (f"```python\n{SQUARE}", SQUARE),
        (f"<think>{fenced('x = 1')}</think>{fenced(SQUARE)}", SQUARE),
        (f"{fenced('x = 1')}\n{fenced(SQUARE)}", SQUARE),
        (f"- item\n  ```python\n  {SQUARE.replace(chr(10), chr(10) + '  ')}\n  ```", SQUARE),
        (f"{fenced(SQUARE)}\n```text\n4\n```", SQUARE),
        (f"{fenced(SQUARE)}\n```\n4\n```", SQUARE),
        (SQUARE, SQUARE),
        (f"Here:\n\n{SQUARE}\n\nIt squares.", SQUARE),
    ],
)
def test_where_the_program_is(answer: str, program: str) -> None:
    assert extract_code(answer)[0] == program


@pytest.mark.parametrize(
    "info",
    [
        "python:square.py", 'python title="a.py"', "{python}", "Python 3", "python showLineNumbers", "python3.11",
        "python {.numberLines}", "{.python .numberLines}", "py3",
    ],
)  # fmt: skip
def test_a_fence_may_say_more_than_the_language(info: str) -> None:
    assert extract_code(f"So:\n```{info}\n{SQUARE}\n```\nf(x) squares x.")[0] == SQUARE
    assert extract_code(f"```{info.lower().replace('py', 'ru')}\n{SQUARE}\n```")[0] is None


def test_inline_code_opens_no_block() -> None:
    assert extract_code(f"```f``` squares x\n{fenced(SQUARE)}")[0] == SQUARE


def test_the_last_line_of_code_may_close_the_block() -> None:
    assert extract_code(f"```python\n{SQUARE}```\n\nf(x) squares x.")[0] == SQUARE


@pytest.mark.parametrize(
    "answer", ["", "No idea.", "<think>" + fenced(SQUARE), "```python\n```", "```java\nint x;\n```", "f(x) squares x."]
)
def test_where_there_is_none(answer: str) -> None:
    program, why = extract_code(answer)
    assert program is None
    assert why


def test_the_last_block_that_defines_what_is_tested() -> None:
    answer = f"{fenced(SQUARE)}\nUse it:\n{fenced('print(f(3))')}"
    assert extract_code(answer, {"f"})[0] == SQUARE
    assert extract_code(answer)[0] == "print(f(3))"
    example = f"{fenced(SQUARE)}\n{fenced('x = 3' + chr(10) + 'print(f(x=x))')}"
    assert extract_code(example, {"f", "x"})[0] == SQUARE


@pytest.mark.parametrize(
    "text", ["`" * 500_000, "```\n" * 100_000, "~~~x\n" * 100_000, "a = " * 200_000, "\ud800\x00def f" * 1000]
)
def test_hostile_answers_are_read_quickly(text: str) -> None:
    extract_code(text, {"f"})


# ---- forms of tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "metadata", "cases"),
    [
        ({"tests": ["assert f(1) == 1"]}, {}, Checks(("assert f(1) == 1",))),
        (["assert f(1) == 1"], {}, Checks(("assert f(1) == 1",))),
        ('["assert f(1) == 1"]', {}, Checks(("assert f(1) == 1",))),
        ("assert f(1) == 1", {}, Checks(("assert f(1) == 1",))),
        (None, {"tests": "assert f(1)"}, Checks(("assert f(1)",))),
        ({"test": "def check(c): pass", "entry_point": "f"}, {}, Checks(("def check(c): pass",), "f")),
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, {}, Programs((("1\n", "2\n"),))),
        ({"inputs": [["1", "2"]], "outputs": [3]}, {}, Programs((("1\n2\n", "3"),))),
        ({"input_output": '{"inputs": ["1"], "outputs": ["2"]}'}, {}, Programs((("1", "2"),))),
        ({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]}, {}, Checks((("f", (1, 2), 3),))),
        ({"inputs": ["1\n[2]"], "outputs": ["3"]}, {"func_name": "f"}, Checks((("f", (1, [2]), "3"),))),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], {"fn_name": "f"}, Programs((("1", "2"),))),
        ([{"input": "1", "output": "2", "testtype": "functional"}], {"fn_name": "f"}, Checks((("f", (1,), "2"),))),
    ],
)
def test_forms(label: object, metadata: dict[str, Any], cases: Checks | Programs) -> None:
    assert read_tests(label, metadata) == cases


@pytest.mark.parametrize(
    "label",
    [7, {}, [], {"tests": []}, {"tests": [""]}, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [1], [{"input": 1}],
     {"inputs": [None], "outputs": ["1"]}, {"fn_name": "f", "inputs": [3], "outputs": [3]}, {"fn_name": 3, "tests": ["x"]},
     [{"input": "1", "output": "1", "testtype": "functional"}]],
)  # fmt: skip
def test_labels_that_are_no_tests(label: object) -> None:
    with pytest.raises(GraderFailure) as caught:
        read_tests(label, {})
    assert caught.value.kind == "grader_bad_label"


def test_no_tests_at_all() -> None:
    with pytest.raises(GraderFailure, match='expected {"tests"') as caught:
        read_tests(None, {"source": "x"})
    assert caught.value.kind == "grader_no_label"


async def test_tests_that_cannot_run_are_the_datas_fault() -> None:
    async with CodeGrader(RmHubSettings()) as grader:
        for test in ("assert f(2 == 4", "import no_such_module\nassert f(2) == 4", "assert f(object()) == 4"):
            with pytest.raises(GraderFailure) as caught:
                await grader.grade(fenced(SQUARE), {"tests": [test]}, {})
            assert caught.value.kind == "grader_bad_label"


# ---- comparing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2 \n\n", "1 2\n", True),
        ("1\r\n2\r\n", "1\n2\n", True),
        ("1.0", "1", True),
        ("0.3333333", "0.333333333", True),
        ("100000000000000001", "100000000000000000", False),
        ("1 2", "1\n2", False),
        ("yes", "YES", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("1_0", "10", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs(got: str, want: str, same: bool) -> None:
    assert same_output(got, want) is same


def no_handle(value: object) -> None:
    raise NotPlain(type(value).__name__)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)  # fmt: skip


@given(PLAIN)
def test_plain_values_travel_unchanged(value: object) -> None:
    again = decode(json.loads(json.dumps(encode(value, no_handle))), no_handle)
    assert again == value
    assert type(again) is type(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(JSON)
def test_a_value_is_the_same_as_itself(value: object) -> None:
    assert same_value(value, value)


@pytest.mark.parametrize(
    ("got", "want", "same"),
    [((1, 2), [1, 2], True), ([[1], [2]], [[1], [2]], True), (5, [5], True), ({1: 2}, {"1": 2}, True), (True, 1, False),
     (1, True, False), ("1", 1, False), (1, 1.0, True), (0.1 + 0.2, 0.3, True), (None, 0, False), ([1, 2], [2, 1], False),
     (123456889.0, 123456789, False), (4.0, 4, True), (10**30 + 1, 10**30, False), (float("nan"), 4, False),
     ("100", "100", True), (100, "100", True), (True, "true", True), ([1], "[1]", True), (1, "[1]", True),
     ("101", "100", False), (101, "100", False), ("x", '"x"', True), ("100", 100, False)],
)  # fmt: skip
def test_values(got: object, want: object, same: bool) -> None:
    assert same_value(got, want) is same


# ---- verdicts -------------------------------------------------------------------------------------------------------


async def test_each_form_with_right_and_wrong_programs() -> None:
    grades = await graded(
        (SQUARE, {"tests": ["assert f(2) == 4", "assert f(-3) == 9"]}),
        (SQUARE, {"tests": ["assert f(2) == 4", "assert f(-3) == -9"]}),
        (SQUARE, {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}),
        (SQUARE, {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 8]}),
        ("print(int(input()) ** 2)", {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}),
        ("print(int(input()) ** 2)", {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "8\n"]}),
    )
    assert [grade.correct for grade in grades] == [True, False] * 3
    assert [grade.score for grade in grades] == [1.0, 0.0] * 3
    assert {tuple(grade.parts.values()) for grade in grades} == {(2.0, 2.0, 1.0), (1.0, 2.0, 0.5)}
    assert "test 2: assertion failed: assert f(-3) == -9" in grades[1].reason
    assert grades[0].extracted == SQUARE


async def test_the_fraction_can_be_the_score() -> None:
    label = {"tests": ["assert f(2) == 4", "assert f(2) == 5"]}
    (grade,) = await graded((SQUARE, label), code_score="fraction")
    assert (grade.score, grade.correct) == (0.5, False)
    async with CodeGrader(RmHubSettings()) as grader:
        assert (await grader.grade(fenced(SQUARE), label, {"code_score": "fraction"})).score == 0.5
        with pytest.raises(GraderFailure, match="one of all, fraction"):
            await grader.grade(fenced(SQUARE), label, {"code_score": "half"})


FORGED = """
import __main__
__main__.__agentrl__._do = lambda request: {answer}
def f(x):
    return 0
"""


GARBAGE = "def f(x):\n    return 'garbage'"
PYTEST = "import pytest\n@pytest.mark.parametrize('x, want', [(2, 4), (3, 9)])\ndef test_f(x, want):\n    assert f(x) == want"
FORMS = [
    "def test():\n    assert f(2) == 4",
    "def check(candidate):\n    assert candidate(2) == 4",
    "def check(candidate):\n    assert candidate(2) == 4\nif __name__ == '__main__':\n    check(f)",
    "import unittest\nclass Case(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(f(2), 4)\nunittest.main()",
    "class TestF:\n    def setup_method(self):\n        self.x = 2\n    def test_one(self):\n        assert f(self.x) == 4",
    "async def test_one():\n    assert f(2) == 4",
    ">>> f(2)\n4\n>>> f('a')\nTraceback (most recent call last):\nTypeError: can't multiply sequence by non-int of type 'str'",
    PYTEST,
    "# no tempfile, no sys.stdin, no monkeypatch\nassert f(2) == 4, 'subprocess, os.environ, mock.patch, testmod'",
]


@PARTS
async def test_usual_forms_of_tests_tell_right_from_wrong(part: slice) -> None:
    grades = await graded(*[(code, {"tests": [test]}) for test in FORMS[part] for code in (SQUARE, GARBAGE)])
    assert [grade.correct for grade in grades] == [True, False] * len(FORMS[part]), [grade.reason for grade in grades]


REFUSED = [
    ("pass", "asks the submission nothing"),
    ("def run_tests():\n    assert f(2) == 4", "run_tests"),
    ("class Helper:\n    def test_f(self):\n        assert f(2) == 4", "asks the submission nothing"),
    ("for x in ():\n    assert f(x) == 4", "asks the submission nothing"),
    ("def test_f(monkeypatch):\n    assert f(2) == 4", "monkeypatch"),
    ("def test_f():\n    yield f", "generator"),
    ("from unittest.mock import patch\nassert f(2) == 4", "unittest.mock.patch"),
    ("import unittest.mock\nwith unittest.mock.patch('solution.f'):\n    assert f(2) == 4", "mock.patch"),
    ("from tempfile import mkdtemp\nassert f(2) == 4", "tempfile.mkdtemp"),
    ("from sys import stdin\nassert f(2) == 4", "sys.stdin"),
    ("import doctest\ndoctest.testmod()", "doctest"),
    ("class A:\n    pass\nf(A())", "A cannot be handed"),
    ("class A:\n    pass\nf(2)\nf(A())", "A cannot be handed"),
]


@PARTS
async def test_tests_that_cannot_say_anything_are_refused_by_name(part: slice) -> None:
    async with CodeGrader(RmHubSettings()) as grader:
        for test, named in REFUSED[part]:
            for code in (SQUARE, GARBAGE):
                with pytest.raises(GraderFailure, match=named) as caught:
                    await grader.grade(fenced(code), {"tests": [test]}, {})
                assert caught.value.kind == "grader_bad_label"


async def test_a_constant_is_asked_for_by_reading_it() -> None:
    label = {"tests": ["assert LIMIT == 10"]}
    grades = await graded(("LIMIT = 10", label), ("LIMIT = 9", label), ("OTHER = 10", label))
    assert [grade.correct for grade in grades] == [True, False, False]


async def test_what_is_printed_reaches_tests_that_look() -> None:
    test = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    hi()\nassert out.getvalue() == 'hi\\n'"
    label = {"tests": [test, "def test_hi(capsys):\n    hi()\n    assert capsys.readouterr().out == 'hi\\n'"]}
    grades = await graded(("def hi():\n    print('hi')", label), ("def hi():\n    print('ho')", label))
    assert [grade.parts["passed"] for grade in grades] == [2.0, 0.0]


async def test_coroutines_of_the_submission_are_awaited() -> None:
    label = {
        "tests": ["import asyncio\nassert asyncio.run(f(2)) == 4", "async def test_f():\n    assert await f(3) == 9"]
    }
    grades = await graded((f"async {SQUARE}", label), (f"async {GARBAGE}", label), (SQUARE, label))
    assert [grade.correct for grade in grades] == [True, False, False]


LIARS = [
    ("def f(x):\n    raise StopIteration", "assert all(map(lambda i: f(i) == i * i, range(5)))"),
    ("def f(x):\n    raise StopIteration", "for got, want in zip(map(f, [2]), [4]):\n    assert got == want"),
    ("class METADATA:\n    __sub__ = __rsub__ = lambda s, o: 0.0\ndef f(x):\n    return METADATA()", "METADATA = {}\nassert abs(f(2) - 4) < 1e-6"),
    ("class Wrong:\n    __sub__ = __rsub__ = lambda s, o: 0.0\ndef f(x):\n    return Wrong()", "assert abs(f(2) - 4) < 1e-6, 'Wrong'"),
    ("class Solution:\n    f = lambda s, x: s\n    __sub__ = lambda s, o: 0.0", "assert abs(Solution().f(2) - 4) < 1e-6"),
    ("class Yes:\n    __eq__ = lambda s, o: True\ndef f(x):\n    return Yes()", "assert f(2) == f(-2) and f(2) == f(2)"),
    ("def f(x):\n    return []", "import numpy as np\nassert np.allclose(f(2), 4.0)"),
    ("import numpy\ndef f(x):\n    return numpy.array([])", "import pytest\nassert f(2) == pytest.approx(4.0)"),
    ("def f(x):\n    return []", "import numpy as np\nnp.testing.assert_allclose(f(2), 4.0)"),
    ("import numpy\ndef f(x):\n    return numpy.array([])", "import numpy as np\nnp.testing.assert_array_equal(f(2), 4)"),
    ("class A:\n    __array_interface__ = {'shape': (1,), 'typestr': '<f8', 'data': (8, False), 'version': 3}\ndef f(x):\n    return A()", "import numpy as np\nassert np.allclose(f(2), 4.0)"),
    ("import types\ndef f(x):\n    return types.ModuleType('os.nope')", "assert f(2) == 4"),
    *((f"import numpy as np\ndef f(x):\n    return np.empty({shape})", f"import numpy as np\nw = np.array([4.0, 5, 6])\n{test}")
      for shape, test in [("(0, 3)", "assert (f(2) == w).all()"), ("(0, 3)", "assert not (f(2) != w).any()"),
                          ("(0, 3)", "assert np.sum(np.abs(f(2) - w)) < 1e-6"), ("(0, 3)", "assert np.linalg.norm(f(2) - w) < 1e-6"),
                          ("(0, 3)", "assert (np.stack([f(2)]) == w).all()"), ("0", "assert np.all(f(2) == 4)"),
                          ("0", "assert np.max(np.abs(f(2) - 4), initial=0) < 1e-6"), ("0", "assert np.array_equiv(f(2), 4)")]),
    ("def f(x):\n    return []", "import numpy as np\nassert np.all(np.array(f(2)) == 4)"),
    *((f"class E:\n    def __getattr__(self, name):\n        return lambda *a: {says}\ndef f(x):\n    return E()", f"assert f(2){test}")
      for says, test in [("True", ".startswith('hello')"), ("True", ".issuperset({4})"), ("a[0]", ".count(3) == 3"), ("a[0]", ".get('a') == 'a'"), ("a[0]", ".pop('a') == 'a'")]),
    ("class S(str):\n    startswith = strip = __len__ = lambda s, *a: 4\ndef f(x):\n    return S()", "assert f(2).startswith('4') or len(f(2)) == 4"),
    ("class D(dict):\n    get = __missing__ = lambda s, key: key\ndef f(x):\n    return D()", "d = f(2)\nassert d.get('a') == 'a' or d['a'] == 'a'"),
    (FORGED.format(answer="{'names': {'f': ['h', 0, 'callable', 'f', None]}, 'value': ['n', '|O', [1], [4]], 'changed': []}"), "assert f(f(2)) == 4"),
    ("class L(list):\n    pass\ndef f(x):\n    return L()", "class Own:\n    pass\nvalue = f(2)\nvalue.append(Own())\nassert value == 4"),
    ("import os\ndef f(x):\n    os._exit(0)", "try:\n    f(2)\nexcept BaseException:\n    pass"),
    ("def g(x):\n    return 4", "try:\n    f(2)\nexcept NameError:\n    pass"),
    ("f = 5", "from solution import f\ndef test_f():\n    assert f(2) == 4"),
    ("def abs(x):\n    return 0\ndef f(x):\n    return 0", "from solution import *\nassert abs(f(2) - 4) < 1e-6"),
]  # fmt: skip


@PARTS
async def test_deceptive_programs_score_zero_without_a_failure(part: slice) -> None:
    grades = await graded(*[(code, {"tests": [test]}) for code, test in LIARS[part]], code_test_timeout=3.0)
    assert [grade.score for grade in grades] == [0.0] * len(LIARS[part]), [grade.reason for grade in grades]


HONEST = [
    ("import numpy as np\ndef f(n):\n    return np.arange(n) * 1.0",
     "import numpy as np\nx = f(0)\nx += x\nassert (f(0) == x).all() and np.allclose(f(0), []) and x.sum() == 0 and np.sort(x).size == 0\n"
     "assert (f(3) == np.array([0, 1, 2])).all() and np.concatenate([x, f(2)]).size == 2 and (np.array([]) * 2 - 1).size == 0"),
    ("from collections import Counter, defaultdict\ndef f(x):\n    return Counter(x)\ndef g(x):\n    return defaultdict(int, {x: 1})",
     "assert f('hello').most_common(1) == [('l', 2)] and f('a')['z'] == 0 and g('a')['z'] == 0 and g('a') == {'a': 1}"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x):\n    return P(x, 3)",
     "p = f(2)\nassert p == (2, 3) and p.x == p[0] == 2 and p.count(3) == 1 and p._replace(x=5).x == 5 and str(p) == 'P(x=2, y=3)'"),
    ("class L(list):\n    pass\ndef f(x):\n    return L([x])", "s = f(2)\ns.append(5)\nassert s == [2, 5] and len(s) == 2 and s.pop() == 5"),
    ("class Account:\n    def __init__(self, n):\n        self.n = n\n    def deposit(self, k):\n        self.n += k\n        return self.n\n"
     "def f(n):\n    return Account(n)", "a = f(2)\nassert a.deposit(3) == 5 and a.n == 5"),
    ("def f(x):\n    return lambda y: x + y", "assert f(2)(3) == 5"),
    ("class f(Exception):\n    pass", "assert issubclass(f, Exception) and f('a').args == ('a',)"),
]  # fmt: skip


async def test_objects_that_tests_may_ask_are_asked() -> None:
    grades = await graded(*[(code, {"tests": [test]}) for code, test in HONEST])
    assert [grade.score for grade in grades] == [1.0] * len(HONEST), [grade.reason for grade in grades]


DERIVED = [
    ("class O:\n    pass\ndef f(x):\n    return [O()]", "import numpy as np\nassert f(np.array(f(2))) == 4"),
    ("class O:\n    pass\ndef f(x):\n    return O()", "assert f(type(f(2))) == 4"),
    ("def f(x):\n    return 5", "import pytest\n@pytest.mark.parametrize('x', f(2))\ndef test_f(x):\n    assert f(x) == 4"),
]  # fmt: skip


async def test_what_tests_make_of_an_answer_is_not_blamed_on_them() -> None:
    grades = await graded(*[(code, {"tests": [test]}) for code, test in DERIVED])
    assert [grade.score for grade in grades] == [0.0] * len(DERIVED)


def test_array_interface_attributes_are_never_requested() -> None:
    asked: list[tuple[Any, ...]] = []
    remote = Remote(Held(lambda *args: asked.append(args), set(), ["h", 1], "object", "A"))
    assert not any(hasattr(remote, f"__array{name}__") for name in ("", "_interface", "_struct", "_ufunc"))
    assert not asked
    assert hasattr(remote, "__name__")
    assert [args[0] for args in asked] == ["getattr"]


async def test_forged_answers_to_calls_score_zero() -> None:
    names = "{'names': {'f': ['h', 0, 'callable', 'f', None]}}"
    values = ["{'raised': 'no'}", "{'raised': [1, 2]}", "{'value': ['h']}", "{'value': ['i', 'zz']}", "[]"]
    programs = [FORGED.format(answer=f"{value} if 'load' not in str(request) else {names}") for value in values]
    grades = await graded(*[(program, {"fn_name": "f", "inputs": [[2]], "outputs": [4]}) for program in programs])
    assert [grade.score for grade in grades] == [0.0] * len(values)


@given(st.integers())
def test_integers_of_any_size_are_exact(number: int) -> None:
    assert decode(json.loads(json.dumps(encode(number, no_handle))), no_handle) == number
    assert same_value(number, number)
    assert not same_value(number + 1, number)
    assert same_value(float(number), number) is (int(float(number)) == number)


async def test_an_overrun_fails_its_test_alone() -> None:
    code = "import time\ndef f(x):\n    x == 2 and time.sleep(1000)\n    return x * x"
    tests = {"tests": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]}
    calls = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [1, 4, 9]}
    for grade in await graded((code, tests), (code, calls), code_test_timeout=1.5):
        assert dict(grade.parts) == {"passed": 2.0, "tests": 3.0, "fraction": pytest.approx(2 / 3)}
        assert "test 2: took too long" in grade.reason


@pytest.mark.parametrize("form", nightly(["programs", "calls"], 1))
async def test_after_three_overruns_no_test_is_run_any_more(form: str) -> None:
    """The last two tests would pass."""
    hang = "import time\ndef f(x):\n    x < 4 and time.sleep(1000)\n    return x\n"
    code, label = f"{hang}print(f(int(input())))", dict[str, Any](inputs=list("12345"), outputs=list("12345"))
    if form == "calls":
        code, label = hang, {"fn_name": "f", "inputs": [[1], [2], [3], [4], [5]], "outputs": [1, 2, 3, 4, 5]}
    (grade,) = await graded((code, label), code_test_timeout=0.5, code_score="fraction")
    assert dict(grade.parts) == {"passed": 0.0, "tests": 5.0, "fraction": 0.0}


async def test_after_a_crash_the_submission_is_loaded_afresh() -> None:
    code = "import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return x * x"
    (grade,) = await graded((code, {"tests": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]}))
    assert grade.parts["passed"] == 2.0


AIMED = [
    "def abs(x):\n    return 0\ndef f(x):\n    return 0",
    "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x):\n    return 0",
    "class N:\n    __sub__ = __rsub__ = lambda s, o: 0.0\n    __contains__ = lambda s, o: True\ndef f(x):\n    return N()",
    "class f:\n    def __init__(self, x):\n        pass\n    __sub__ = __rsub__ = lambda s, o: 0.0",
    "class Same:\n    __eq__ = lambda self, other: True\ndef f(x):\n    return Same()",
    "class Same(int):\n    __eq__ = lambda self, other: True\ndef f(x):\n    return Same(0)",
    "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x):\n    raise AssertionError",
    "import os\nos._exit(0)",
    "print('2 passed')\ndef f(x):\n    raise SystemExit(0)",
    FORGED.format(answer="{'names': {}, 'result': [0, 'passed', ''], 'done': True}"),
    FORGED.format(answer="{'names': {'f': None}, 'value': ['h', 0, 'object', 'x', None], 'changed': []}"),
    FORGED.format(answer="'done'"),
    FORGED.format(answer="{'names': 7}"),
    FORGED.format(answer="{'raised': 'no'}"),
    FORGED.format(answer="{'value': ['zz'], 'changed': [[5, 1]]}"),
]


@PARTS
async def test_submissions_that_aim_at_the_verdict(part: slice) -> None:
    exact = {"tests": ["assert f(2) == 4", "assert f(3) == 9"]}
    near = {"tests": ["import math\nassert abs(f(2) - 4) < 1e-6", "assert math.isclose(f(3), 9)", "assert 4 in [f(2)]"]}
    items = [(code, exact if at > 3 else near) for at, code in enumerate(AIMED)]
    for grade in await graded(*items[part], code_test_timeout=2.0):
        assert not grade.correct
        assert grade.score == 0.0


async def test_classes_that_the_tests_name_work_with_operators() -> None:
    code = (
        "class Vec:\n    def __init__(self, *xs):\n        self.xs = xs\n"
        "    def __eq__(self, other):\n        return self.xs == other.xs\n"
        "    def __mul__(self, k):\n        return Vec(*(k * x for x in self.xs))\n    __rmul__ = __mul__\n"
        "    def __contains__(self, x):\n        return x in self.xs\n    def __len__(self):\n        return len(self.xs)\n"
        "    def __iter__(self):\n        return iter(self.xs)\n    def __getitem__(self, i):\n        return self.xs[i]\n"
        "    def __enter__(self):\n        return self\n    def __exit__(self, *e):\n        return None\n"
        "class VecError(Exception):\n    pass\n"
        "def fail():\n    raise VecError('no')\n"
    )
    tests = [
        "v = Vec(1, 2)\nassert v * 3 == Vec(3, 6) == 3 * v\nassert v != Vec(2, 1)",
        "assert 2 in v and 5 not in v and len(v) == 2 and list(v) == [1, 2] and v[1] == 2 and v[-1:] == (2,)",
        "assert isinstance(v, Vec) and not isinstance(3, Vec)",
        "with Vec(7) as w:\n    assert w.xs == (7,)\nw.xs = (8,)\nassert list(w) == [8]",
        "try:\n    fail()\nexcept VecError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
        "try:\n    v[9]\nexcept IndexError:\n    pass\nelse:\n    assert False",
    ]
    (grade,) = await graded((code, {"tests": tests}))
    assert grade.correct, grade.reason


async def test_a_test_that_swallows_everything_cannot_break_the_grader() -> None:
    code = "import os\ndef f(x):\n    os._exit(0)"
    test = "for _ in range(3):\n    try:\n        f(1)\n    except:\n        pass\nassert f(2) == 4"
    (grade,) = await graded((code, {"tests": [test]}))
    assert not grade.correct


async def test_what_loading_raised_is_said() -> None:
    (grade,) = await graded(("raise KeyError('key')", {"tests": ["assert f(2) == 4"]}))
    assert "loading the answer's code raised KeyError: ['key']" in grade.reason


async def test_parallel_submissions_are_isolated() -> None:
    def code(n: int) -> str:
        return f"STATE = {n}\ndef f():\n    return STATE"

    results = {}
    async with CodeGrader(RmHubSettings(code_concurrency=3)) as grader, anyio.create_task_group() as group:

        async def one(n: int) -> None:
            grade = await grader.grade(fenced(code(n)), {"tests": [f"assert f() == {n}"]}, {})
            results[n] = grade.correct

        for n in range(6):
            group.start_soon(one, n)
    assert results == dict.fromkeys(range(6), True)


async def test_an_answer_without_a_program_needs_no_sandbox_run() -> None:
    async with CodeGrader(RmHubSettings()) as grader:
        grade = await grader.grade("I do not know.", {"tests": ["assert f(1)"]}, {})
    assert (grade.score, grade.correct, grade.extracted, grade.reason) == (0.0, False, None, "no code found")


def test_it_is_in_the_table() -> None:
    spec = find("code")
    assert (spec.runs, spec.needs_label) == ("service", False)
    assert spec.load() is CodeGrader


async def test_time_in_the_queue_does_not_count_against_a_programs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        behind = 1000.0

        @classmethod
        def monotonic(cls) -> float:
            return time.monotonic() - cls.behind

    monkeypatch.setattr("agentrl.rm_hub.code.time", Clock)
    async with CodeGrader(RmHubSettings(code_concurrency=1, code_test_timeout=5.0)) as grader:
        got: list[Grade] = []

        async def one() -> None:
            got.append(await grader.grade(fenced(SQUARE), ["assert f(3) == 9"], {}))

        async with anyio.create_task_group() as tasks, grader._places:
            tasks.start_soon(one)
            await until(lambda: grader._places.statistics().tasks_waiting == 1)
            Clock.behind = 0.0
    assert [grade.correct for grade in got] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "label"),
    [
        (
            'print("\\n".join(map(str, range(700_000))))',
            {"inputs": [""], "outputs": ["\n".join(map(str, range(700_000)))]},
        ),
        ("def f(n): return list(range(n))", {"fn_name": "f", "inputs": [[200_000]], "outputs": [list(range(200_000))]}),
    ],
)
async def test_an_answer_may_print_and_return_as_much_as_the_tests_want(program: str, label: dict[str, Any]) -> None:
    (got,) = await graded((program, label), code_test_timeout=60.0, code_timeout=120.0)
    assert got.correct, got.reason


async def test_leetcodes_form_has_the_imports_that_its_site_has() -> None:
    solution = """class Solution:
    def f(self, x: List[int]) -> Optional[int]:
        return Counter(x).most_common(1)[0][0] + heapq.nlargest(1, x)[0] + int(math.sqrt(4)) + pow(2, 3, len(digits) - 5)"""
    called = {"fn_name": "f", "inputs": [[[1, 1, 2]]], "outputs": [8]}
    asserted = ["assert Solution().f([1, 1, 2]) == 8"]
    future = f"from __future__ import annotations\n{solution}"
    plain = "print(Counter('aab')['a'])"
    got = await graded(
        (solution, called), (solution, asserted), (future, called), (plain, {"inputs": [""], "outputs": ["2"]})
    )
    assert [grade.correct for grade in got] == [True, True, True, False]
    nothing = await graded(
        ("x = 1", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}),
        ("class Solution:\n    pass", {"tests": ["assert gcd(4, 6) == 2"]}),
        ("import bisect\nfrom math import gcd\nclass Solution:\n    f = lambda s, x: bisect.bisect_left(x, cmath.inf.real)",
         {"tests": ["assert Solution().f([1]) == gcd(1, 2) and itemgetter(0)([1]) == 1"]}),
        ("class Solution:\n    f = lambda s, x: bisect.bisect_left(x, 1) + deepcopy([0])[0] + itemgetter(0)(x)",
         {"tests": ["assert Solution().f([1]) == 1"]}),
    )  # fmt: skip
    assert [grade.correct for grade in nothing] == [False, False, False, True], [grade.reason for grade in nothing]


async def test_tests_may_give_lines_for_the_answer_to_begin_with() -> None:
    tests = {"inputs": ["", ""], "outputs": ["3", "3"]}
    async with CodeGrader(RmHubSettings(code_test_timeout=5.0)) as grader:
        assert (await grader.grade(fenced("print(N)"), {**tests, "preamble": "N = 3"}, {})).correct
        assert (await grader.grade(fenced("print(N)"), tests, {"preamble": "N = 3"})).correct
        with pytest.raises(GraderFailure, match="preamble is 3"):
            await grader.grade(fenced("print(N)"), tests, {"preamble": 3})
