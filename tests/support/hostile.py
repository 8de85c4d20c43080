"""Answers that try to hang, crash, bloat or subvert a grader."""

from collections.abc import Iterator
from pathlib import Path


def attacks(canary: Path, size: int = 1_000_000) -> Iterator[tuple[str, str]]:
    """Return (name, answer) pairs. `canary` must not exist afterwards; long answers have about `size` characters."""
    yield from _wrapped("power tower", "9^9^9^9")
    yield from _wrapped("power tower in TeX", "9^{9^{9^{9^{9}}}}")
    yield from _wrapped("power tower in Python", "9**9**9**9")
    yield from _wrapped("factorials", "((((999!)!)!)!)!")
    yield from _wrapped("binomial", r"\binom{10^{10}}{10^9}")
    yield from _wrapped("huge sum", r"\sum_{n=1}^{10^{12}} \frac{1}{n!}")
    yield from _wrapped("huge exponent", "10**10**6")
    yield from _wrapped("huge float", "1e999999999")
    yield from _wrapped("many digits", "9" * 100_000)
    yield from _wrapped("long expression", "x+" * 5_000 + "1")
    yield from _wrapped("big polynomial", "(a+b+c+d+e+f+g)^{99}")
    yield from _wrapped("nested roots", r"\sqrt{1+" * 300 + "1" + "}" * 300)
    yield from _wrapped("nested fractions", r"\frac{1}{1+" * 2_000 + "1" + "}" * 2_000)
    yield from _wrapped("parentheses", "(" * 5_000 + "1" + ")" * 5_000)
    for name, text in _programs(canary):
        yield from _wrapped(name, text)
    yield "braces, open", "{" * 100_000
    yield "braces, nested", r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_001
    yield "boxes, nested", r"\boxed{" * 20_000 + "1" + "}" * 20_000
    yield "boxes, never closed", r"\boxed{1 " * (size // 9)
    yield "brackets", "[" * 100_000 + "]" * 100_000
    yield "JSON, nested", '{"a":' * 100_000 + "1" + "}" * 100_000
    yield "calls, open", "<tool_call>" * (size // 11)
    yield "tags, open", "<answer>" * (size // 8)
    yield "think, open", "<think>" * (size // 7)
    yield "regex: a", "a" * size + "!"
    yield "regex: spaces", "answer is" + " " * size + "x"
    yield "regex: quotes", "\"'" * (size // 2)
    yield "regex: backslashes", "\\" * size
    yield "regex: dollars", "$" * size
    yield "regex: digits and commas", "1," * (size // 2)
    yield "regex: digits and spaces", "1 " * (size // 2)
    yield "regex: stars", "*" * size
    yield "regex: lines", "\n" * size
    yield "regex: hyphens", "-" * size
    yield "regex: dots", "a." * (size // 2)
    yield "markers", "#### 1\n" * (size // 7)
    yield "claims", "The answer is 1. " * (size // 17)
    yield "prose", "Let us think about the train that leaves at 7 and see what 12 times 8 gives. " * (size // 78)
    yield "letters", "(A) (B) (C) (D) " * (size // 16)
    yield "emoji", "é😀" * (size // 2)
    yield from _wrapped("null bytes", "1\x00\x00")
    yield "null bytes, long", "\x00" * size
    yield from _wrapped("lone surrogates", "\ud800 1 \udfff")
    yield "lone surrogates, long", "\udc80" * size
    yield "unicode digits", "٣" * 1000 + "²³¹" * 1000
    yield "bidi and zero width", "\u202e1\u200b2\ufeff" * 1000
    yield "empty", ""
    yield "white space", " \n\t\u2028\u00a0"


def _wrapped(name: str, text: str) -> Iterator[tuple[str, str]]:
    yield name, text
    yield (
        f"{name}, as an answer",
        f"We get {text}.\n#### {text}\nSo the answer is: {text}\n<answer>{text}</answer>\n"
        f'<tool_call>{{"name": "f", "arguments": {{"x": "{text}"}}}}</tool_call>\nAnswer: $\\boxed{{{text}}}$',
    )


def _programs(canary: Path) -> Iterator[tuple[str, str]]:
    touch = f"open('{canary}','w').close()"
    yield "import", f"__import__('os').system('touch {canary}')"
    yield "eval", f'eval("{touch}")'
    yield "exec", f'exec("{touch}")'
    yield "classes", f"().__class__.__base__.__subclasses__()[0].__init__.__globals__['os'].system('touch {canary}')"
    yield "lambda", f"(lambda: {touch})()"
    yield "sympify", f"Symbol('x').__class__.__init__.__globals__['__builtins__']['exec']('{touch}')"
    yield "format", "{0.__class__.__mro__}"
    yield "TeX", f"\\immediate\\openout\\file={canary}"
    yield "shell", f"$(touch {canary}) `touch {canary}` ; touch {canary}"
    yield "yaml", f"!!python/object/apply:os.system ['touch {canary}']"
