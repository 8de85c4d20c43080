"""Equal and unequal rewritings of LaTeX answers, made with sympy, to stress the math graders beyond numbers."""

import random
from collections.abc import Iterator
from typing import Any

import sympy
from sympy import Rational, latex, sqrt

Pair = tuple[str, str, str, bool]
"""(family, label, answer, true if they are equal)"""


def pairs(seed: int, count: int) -> Iterator[Pair]:
    """Yield `count` rounds over all families."""
    rng = random.Random(seed)
    for _ in range(count):
        for family in (
            _fractions,
            _surds,
            _intervals,
            _tuples,
            _sets,
            _polynomials,
            _factored,
            _matrices,
            _complex,
            _lines,
        ):
            yield from family(rng)


def _rational(rng: random.Random) -> Any:
    while True:
        value = Rational(rng.randint(-30, 30), rng.randint(2, 12))
        if value.q != 1:
            return value


def _fraction(value: Any, rng: random.Random) -> str:
    sign, p, q = ("-" if value < 0 else ""), abs(value.p), value.q
    k = rng.choice([1, 1, 2, 3])
    forms = [
        rf"{sign}\frac{{{p}}}{{{q}}}",
        rf"{sign}\dfrac{{{k * p}}}{{{k * q}}}",
        f"{sign}{p}/{q}",
        rf"\frac{{{sign}{p}}}{{{q}}}",
    ]
    if p > q and not sign:
        forms.append(rf"{p // q}\frac{{{p % q}}}{{{q}}}")
        forms.append(f"{p // q} {p % q}/{q}")
    return rng.choice(forms)


def _fractions(rng: random.Random) -> Iterator[Pair]:
    value = _rational(rng)
    other = rng.choice([-value, 1 / value, value + Rational(1, value.q), value + 1])
    yield "fraction", latex(value), _fraction(value, rng), True
    yield "fraction", latex(value), _fraction(other, rng) if other.q != 1 else str(other), bool(value == other)
    yield "fraction", latex(value), str(round(float(value), 2)), bool(Rational(str(round(float(value), 2))) == value)


def _surds(rng: random.Random) -> Iterator[Pair]:
    a, b, n = rng.randint(2, 9), rng.randint(1, 9), rng.choice([2, 3, 5, 6, 7])
    label = latex(b + a * sqrt(n))
    yield "surd", label, rf"{b} + \sqrt{{{a * a * n}}}", True
    yield "surd", label, f"{a}√{n}+{b}", True
    yield "surd", label, f"{a}*sqrt({n}) + {b}", True
    yield "surd", label, rf"{b} - {a}\sqrt{{{n}}}", False
    yield "surd", label, rf"{b} + {n}\sqrt{{{a}}}", bool(sympy.Eq(a * sqrt(n), n * sqrt(a)))
    yield "surd", label, rf"{b + a}\sqrt{{{n}}}", False
    yield "surd", latex(Rational(b, 1) / sqrt(n)), rf"\frac{{{b}\sqrt{{{n}}}}}{{{n}}}", True
    yield "surd", latex(a * sqrt(n)), f"{float(a * sqrt(n)):.2f}", False


def _intervals(rng: random.Random) -> Iterator[Pair]:
    low = rng.randint(-9, 4)
    high = low + rng.randint(1, 9)
    left, right = rng.choice("(["), rng.choice(")]")
    label = f"{left}{low},{high}{right}"
    yield "interval", label, rf"\left{left}{low}, {high}\right{right}", True
    yield "interval", label, rf"x \in {left}{low}, {high}{right}", True
    closed = (r"\le" if left == "[" else "<", r"\leq" if right == "]" else "<")
    yield "interval", label, f"{low} {closed[0]} x {closed[1]} {high}", True
    yield "interval", label, f"{'(' if left == '[' else '['}{low},{high}{right}", False
    yield "interval", label, f"{left}{low},{high + 1}{right}", False
    yield "interval", label, f"{left}{high},{low}{right}", False
    union = rf"(-\infty,{low}{']' if left == '(' else ')'} \cup [{high},\infty)"
    yield "interval", union, rf"[{high},\infty) \cup (-\infty,{low}{']' if left == '(' else ')'}", True
    yield "interval", union, rf"(-\infty,{low}{']' if left == '(' else ')'} \cup ({high},\infty)", False


def _tuples(rng: random.Random) -> Iterator[Pair]:
    a, b, c = rng.sample(range(-9, 10), 3)
    label = f"({a},{b},{c})"
    yield "tuple", label, rf"\left( {a},\, {b},\, {c} \right)", True
    yield "tuple", label, f"(x, y, z) = ({a}, {b}, {c})", True
    yield "tuple", label, f"x = {a}, y = {b}, z = {c}", True
    yield "tuple", label, f"({b},{a},{c})", False
    yield "tuple", label, f"({a},{b})", False
    yield "tuple", label, f"({a},{b},{-c if c else 1})", False


def _sets(rng: random.Random) -> Iterator[Pair]:
    a, b, c = rng.sample(range(-9, 10), 3)
    label = rf"\{{{a},{b},{c}\}}"
    yield "set", label, rf"\{{{c}, {a}, {b}\}}", True
    yield "set", label, f"{b}, {c}, {a}", True
    yield "set", label, f"{b}, {c} and {a}", True
    yield "set", label, f"x = {b}, x = {c}, x = {a}", True
    yield "set", label, rf"\{{{a}, {b}\}}", False
    yield "set", label, rf"\{{{a}, {b}, {c + 30}\}}", False
    yield "set", label, rf"\{{{a}, {b}, {c}, {c + 30}\}}", False
    yield "set", rf"{a} \pm \sqrt{{{b * b + 2}}}", rf"{a}+\sqrt{{{b * b + 2}}}, {a}-\sqrt{{{b * b + 2}}}", True
    yield "set", rf"{a} \pm \sqrt{{{b * b + 2}}}", rf"{a}+\sqrt{{{b * b + 2}}}", False


def _polynomials(rng: random.Random) -> Iterator[Pair]:
    x = sympy.Symbol("x")
    coefficients = [rng.randint(1, 9) * rng.choice([1, -1]) for _ in range(3)]
    value = sum(c * x**n for n, c in enumerate(coefficients))
    label = latex(value)
    terms = [latex(c * x**n) for n, c in enumerate(coefficients)]
    yield "polynomial", label, " + ".join(terms).replace("+ -", "- "), True
    yield "polynomial", label, str(value), True
    yield "polynomial", label, "y = " + label, True
    yield "polynomial", label, latex(value + rng.choice([1, -1, x])), False
    yield "polynomial", label, latex(value.subs(x, -x)), False


def _factored(rng: random.Random) -> Iterator[Pair]:
    x = sympy.Symbol("x")
    a, b = rng.randint(1, 9), rng.randint(-9, -1)
    value = (x + a) * (x + b)
    yield "factored", latex(value), latex(sympy.expand(value)), True
    yield "factored", latex(value), latex((x + b) * (x + a + 1)), False
    yield "factored", latex(sympy.expand(value)), f"(x{b})(x+{a})", True
    yield "factored", latex(sympy.expand(value)), f"(x+{-b})(x-{a})", bool(a == -b)


def _matrices(rng: random.Random) -> Iterator[Pair]:
    a, b, c, d = (rng.randint(-9, 9) for _ in range(4))
    label = rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}"
    yield "matrix", label, rf"\begin{{bmatrix}}{a}&{b}\\{c}&{d}\end{{bmatrix}}", True
    yield "matrix", label, rf"A = \left(\begin{{array}}{{cc}} {a} & {b} \\ {c} & {d} \end{{array}}\right)", True
    yield "matrix", label, rf"\begin{{pmatrix}} {a} & {c} \\ {b} & {d} \end{{pmatrix}}", b == c
    yield "matrix", label, rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d + 1} \end{{pmatrix}}", False
    yield "matrix", label, rf"\begin{{pmatrix}} {a} & {b} & {c} & {d} \end{{pmatrix}}", False


def _complex(rng: random.Random) -> Iterator[Pair]:
    a, b = rng.randint(1, 9), rng.randint(2, 9)
    yield "complex", f"{a}+{b}i", f"{b}i + {a}", True
    yield "complex", f"{a}+{b}i", rf"\frac{{{2 * a}+{2 * b}i}}{{2}}", True
    yield "complex", f"{a}+{b}i", f"{a}-{b}i", False
    yield "complex", f"{a}+{b}i", f"{a}+{b}", False
    yield "complex", f"{a}+{b}i", f"{b}+{a}i", a == b


def _lines(rng: random.Random) -> Iterator[Pair]:
    m, c = rng.randint(2, 9), rng.randint(1, 9)
    label = f"y={m}x+{c}"
    yield "line", label, f"y = {c} + {m}x", True
    yield "line", label, f"{m}x + {c}", True
    yield "line", label, f"y = {m}x - {c}", False
    yield "line", label, f"y = {c}x + {m}", m == c
    yield "line", f"{m}x+{c + 1}y=1", f"{c + 1}y + {m}x = 1", True
    yield "line", f"{m}x+{c + 1}y=1", f"{m}x-{c + 1}y=1", False
