"""The time of a grade does not depend on the size of a number in the answer."""

import signal
import time
from itertools import product
from types import FrameType

import pytest

from agentrl.rm_hub import grade
from tests.support.nightly import nightly

CPU_S = 10.0
NINES = "9" * 300
MANY = ",".join(rf"\sqrt{{{n}}}" for n in range(100, 140))

ANSWERS = {
    "tower": "9^{9^{9^{9}}}",
    "tower to the left": "((9^9)^9)^{9^9}",
    "tower of groups": "{{{9^{9}}^{9}}^{9}}^{9}",
    "tower of stars": "9**9**9**9",
    "tower of carets": "2^3^4^5^6",
    "long chain of powers": "((((((2^{40})^{40})^{40})^{40})^{40})^{40})",
    "power of a variable": "(x^{40}+1)^{40}",
    "product of powers": "(x+y+z+w)^{40}",
    "power of a root": r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7})^{40}",
    "exponent": "10^{10^{9}}",
    "negative exponent": "10^{-4000}",
    "large negative exponent": "10^{-999999999}",
    "scientific": "1e999999999",
    "scientific, small": r"1.5 \times 10^{-999999999}",
    "scientific, three digits": r"1.5 \times 10^{999}",
    "base of six digits": "999999^{9999}",
    "power of a power": "(2^{2000})^{2000}",
    "root of a large degree": r"\sqrt[10^9]{2}",
    "root of a named degree": r"\sqrt[999999999]{2}",
    "root of a large number": rf"\sqrt{{{NINES}}}",
    "root of forty digits": rf"\sqrt{{{'7' * 40}}}",
    "product of large primes": r"\sqrt{1000000000000000000000000000057 \cdot 1000000000000000000000000000099}",
    "nested roots": r"\sqrt{2+" * 10 + "2" + "}" * 10,
    "nested fractions": r"\frac{1}{1+" * 10 + "1" + "}" * 10,
    "deep fractions": r"\frac{1}{1+" * 300 + "1" + "}" * 300,
    "factorial": "1000000!",
    "factorial of a factorial": "((9!)!)!",
    "double factorial": "99999!!",
    "quotient of factorials": r"\frac{1000000!}{999999!}",
    "gamma": r"\Gamma(1000000)",
    "binomial": r"\binom{10^9}{3}",
    "binomial, half": r"\binom{1000000}{500000}",
    "binomial, chosen": "C(1000000, 500000)",
    "binomial, choose": r"{999999 \choose 500000}",
    "period": rf"0.\overline{{{NINES}}}",
    "decimals": f"3.{NINES}",
    "decimals without end": "3." + "14" * 900,
    "digits": "9" * 1900,
    "words": " thousand ".join(["nine hundred"] * 60),
    "sum": r"\sum_{n=1}^{10^9} n^2",
    "product": r"\prod_{n=1}^{10^9} n",
    "integral": r"\int_0^{10^9} e^{-x^2} dx",
    "limit": r"\lim_{n \to \infty} (1+1/n)^n",
    "remainder": r"7^{999999999} \bmod 13",
    "common divisor": r"\gcd(10^{2000}, 10^{1999})",
    "logarithm": r"\log_{2}(2^{2000})",
    "sine of a large number": r"\sin(10^{2000})",
    "modulus": rf"3 \pmod{{{NINES}}}",
    "base": f"{NINES}_{{7}}",
    "ratio": "999999999:999999998:999999997",
    "set": rf"\{{{MANY}\}}",
    "nested set": r"\{" * 12 + "1" + r"\}" * 12,
    "list of sums": " or ".join(rf"\sqrt{{{n}}}+\sqrt{{{n + 1}}}" for n in range(30)),
    "both signs": r"\pm 10^{2000}",
    "interval": r"(10^{-2000}, 10^{2000})",
    "matrix": r"\begin{pmatrix} 10^{2000} & 2^{2000} \\ 3^{2000} & 7^{2000} \end{pmatrix}",
    "removed points": r"\mathbb{R} \setminus \{" + ", ".join(rf"2^{{{n}00}}" for n in range(1, 10)) + r"\}",
}
LABELS = {
    "a number": "271828",
    "a root": r"\frac{\sqrt{17}}{3}",
    "a polynomial": "x^2 + 3x + 1",
    "a list": ",".join(rf"\sqrt{{{n}}}" for n in range(140, 180)),
}


class _TooLong(BaseException):
    """Not an Exception, because a computer-algebra system would catch that."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what a first grade needs, so that it does not count."""
    for label in LABELS.values():
        grade("math", r"\boxed{\frac{\sqrt{19}}{3}}", label)


PAIRS = list(product(ANSWERS, LABELS))


@pytest.mark.parametrize(("answer", "label"), nightly(PAIRS, 15))
def test_what_an_answer_names_takes_no_time(answer: str, label: str) -> None:
    before = signal.signal(signal.SIGPROF, _stop)
    started = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 2 * CPU_S)
    try:
        verdict = grade("math", rf"\boxed{{{ANSWERS[answer]}}}", LABELS[label])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert not verdict.correct
    assert time.process_time() - started < CPU_S
