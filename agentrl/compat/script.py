"""slime's launch scripts: the flags that a bash script gives to `train.py`, read without executing anything.

1. Known are variables, arrays, functions, `source`, `${X:-default}`, `$((...))`, decidable tests, and the commands
   `seq`, `echo`, `pwd`, `dirname`, `basename` and `cd`. Nothing is executed. Only sourced files are read.
2. A value that only a run of the script shows (another command's output, a loop's result) is a `Field` without text,
   with place and reason. A setting that needs the value is refused.
3. The caller's environment is used only for variables that the script reads but has not set."""

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path

from agentrl.compat.shell import Word, commands, ends_at
from agentrl.errors import SettingsError, raised_as

_TRAINERS = ("train.py", "train_async.py")
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(?:\[(\w+)\])?(\+?)=")
_NAME = re.compile(r"([A-Za-z_]\w*|[0-9@#?])(?:\[([@*]|\w+)\])?(?:(:?)([-=+])(.*))?", re.DOTALL)
_OPENS = ("if", "for", "while", "until", "case", "{")
_BLOCKS = (*_OPENS, "then", "elif", "else", "do", "fi", "done", "esac", "}")
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_PLACES = (*map(str, range(1, 10)), "@")  # a function's arguments
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.", re.DOTALL)
_PATTERN = re.compile(r"([\w./,:=%*?-]|\"[\w./,:=%-]*\")*")  # with the same meaning in Bash and `fnmatch`
Command = tuple[list[Word], str]
Known = bool | None  # None: unknown without running the script

Branch = tuple[Known, Known, str]  # whether the branch runs, whether an earlier one of its `if` ran, the opening word


@dataclass(frozen=True, slots=True)
class Field:
    """A word of a command line, after expansion."""

    text: str | None  # None if only a run of the script would show it
    where: str  # `run.sh line 31`
    why: str = ""  # the reason why there is no text


@dataclass(slots=True)
class Launch:
    """The program that a script starts."""

    flags: list[Field]
    where: str
    asynchronous: bool  # True if it is `train_async.py`
    notes: list[str]


def read_script(path: str | Path, environ: Mapping[str, str] | None = None) -> Launch:
    """Return the flags with which the script would start slime's trainer. Raises SettingsError: the file does not
    exist, it has no such command or several, or the script stops before the command."""
    shell = _Shell(os.environ if environ is None else environ)
    what = f"--slime-script {path}: nested too deep, or with numbers too long, to be read"
    with raised_as(SettingsError, what, RecursionError, ValueError, shown=""):
        shell.run(Path(os.path.abspath(os.path.expanduser(path))), f"--slime-script {path}")
    if len(shell.launches) != 1:
        lines = " and ".join(launch.where for launch in shell.launches)
        none, several = f"it starts no {' or '.join(_TRAINERS)}", f"{lines} each start a training; keep one of them"
        raise SettingsError(f"--slime-script {path}: {several if lines else none}")
    return shell.launches[0]


def _both(a: Known, b: Known) -> Known:
    return False if a is False or b is False else None if a is None or b is None else True


def _not(a: Known) -> Known:
    return None if a is None else not a


class _Shell:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.values: dict[str, list[Field]] = {}
        self.functions: dict[str, list[Command]] = {}
        self.outer: dict[str, list[Field]] = {}  # values that the current function's end restores
        self.launches: list[Launch] = []
        self.notes: list[str] = []
        self.files: list[Path] = []
        self.said = ""

    def run(self, file: Path, asked: str) -> None:
        with raised_as(SettingsError, f"{asked}: cannot read {file}", OSError, UnicodeDecodeError, shown=" ({})"):
            text = file.read_text(encoding="utf-8")
        if file in self.files:
            raise SettingsError(f"{asked}: {file} sources itself")
        self.files.append(file)
        self._run(list(commands(text, file.name)), True)
        self.files.pop()

    def _run(self, listed: list[Command], called: Known) -> Known:
        """Interpret commands that run if `called`. Return the status of the last command."""
        status: Known = True
        before, at, branches, outside = "", 0, list[Branch](), list[dict[str, list[Field]]]()
        returned: tuple[str, dict[str, list[Field]]] | None = (
            None  # place and variables of the first return that may run
        )
        while at < len(listed):
            words, ends = list(listed[at][0]), listed[at][1]
            at += 1
            while words and words[0].raw in _BLOCKS:
                self._block(words, branches, status)
                before = ""
            live = reduce(_both, (branch for branch, _, _ in branches), called)
            if before in ("&&", "||"):
                live = _both(live, status if before == "&&" else _not(status))
            before = ends
            if words and (words[0].raw == "function" or "()" in (word.raw for word in words[1:2])):
                name, body, at = _function(words, ends, listed, at)
                self.functions |= {} if live is False else {name: body}
                before = body[-1][1]
                continue
            pattern = ends == ")" and bool(branches) and branches[-1][2] == "case"
            if words and live is not False and not pattern:
                returns = words[0].raw == "return"
                status = self._command(words, live) if not returns or words[1:] else status
                if returns and live:
                    return status
                if returns and returned is None:
                    returned = words[0].where, self.values.copy()
            if ends == "(":
                branches.append((True, False, ends))
                outside.append(self.values.copy())
            elif ends == ")" and branches and branches[-1][2] == "(":
                branches.pop()
                self.values = outside.pop()  # a subshell's variables end with it
        if returned is not None:
            where, values = returned
            for name, value in [(name, value) for name, value in self.values.items() if values.get(name) != value]:
                why = "a return before it depends on what the script runs"
                self._unknown(name, value[0].where if value else where, why)
            return None
        return status

    def _block(self, words: list[Word], branches: list[Branch], status: Known) -> None:
        word = words.pop(0).raw
        if word in _OPENS:
            if word == "for" and words:
                self._unknown(words[0].raw.strip("(").partition("=")[0], words[0].where, "a loop sets it")
            if word in ("for", "case"):
                words.clear()
            branches.append((True if word in ("if", "{") else None, False, word))
        elif branches and word in ("fi", "done", "esac", "}"):
            branches.pop()
        elif branches and word != "do":
            live, taken, opened = branches.pop()
            live = _both(live, status) if word == "then" else _not(taken)
            branches.append((live, (taken or live) if word == "then" else taken, opened))

    def _call(self, name: str, given: list[Field], live: Known) -> Known:
        outer, self.outer = self.outer, {place: self.values.get(place, []) for place in _PLACES}
        self._pass(given)
        status = self._run(self.functions[name], live)
        self.values |= self.outer
        self.outer = outer
        return status

    def _pass(self, given: list[Field]) -> None:
        self.values |= {place: given[at : at + 1] for at, place in enumerate(_PLACES)} | {"@": given}

    def _command(self, words: list[Word], live: Known) -> Known:
        if (kind := words[0].raw) in ("export", "declare", "local", "readonly", "typeset"):
            if kind not in ("export", "readonly") and not any(re.match(r"-\w*g", word.raw) for word in words):
                bare = [(word.raw, word.where) for word in words[1:] if word.raw.isidentifier()]
                found = bare + [(hit[1], word.where) for word in words[1:] if (hit := _ASSIGNS.match(word.raw))]
                fresh = {name: list[Field]() for name, _ in bare if _PLACES[0] in self.outer and name not in self.outer}
                self.outer = {**{name: self._lookup(name, where) for name, where in found}, **self.outer}
                self.values |= fresh
            words = [word for word in words if _ASSIGNS.match(word.raw)]
        own = next((at for at, word in enumerate(words) if not _ASSIGNS.match(word.raw)), len(words))
        name, where = (words[own].raw, words[own].where) if own < len(words) else ("", "")
        if name in ("", "source", "."):
            for word in words[:own]:
                self._assign(word, live)
        fields = [found for word in words[own:] for found in self._fields(word)]
        texts = [found.text for found in fields]
        trainer = next((at for at, text in enumerate(texts) if text and Path(text).name in _TRAINERS), None)
        match name:
            case "source" | "." if len(fields) > 1:
                self._source(fields[1], where)
            case "[" | "[[" | "test":
                raw = words[-2].raw if name == "[[" else ""
                return _decided([text for text in texts[1:] if text not in ("]", "]]")], raw)
            case "echo":
                self.said = " ".join(text or "?" for text in texts[1:])
            case "exit" if live:
                raise SettingsError(f"{where}: the script stops here{self.said and ': '}{self.said}")
            case "set" if "--" in texts and live:
                self._pass(fields[texts.index("--") + 1 :])
            case "shift" | "set" if name == "shift" or "--" in texts:
                for place in _PLACES:
                    self._unknown(place, where, f"`{name}` changes it")
            case "return" if texts[1:]:
                return None if texts[1] is None else texts[1] == "0"
            case _ if name in self.functions:
                return self._call(name, fields[1:], live)
            case _ if name.startswith("(("):
                for changed in _CHANGED.findall(name):
                    self._unknown(changed, where, "`((...))` sets it")
            case "printf" | "read" | "unset":
                for text in texts[1:]:
                    self._unknown(text or "", where, f"`{name}` sets it")
            case _ if trainer is not None:
                asynchronous = str(texts[trainer]).endswith(_TRAINERS[1])
                self.launches.append(Launch(fields[trainer + 1 :], where, asynchronous, self.notes))
            case _:
                return True if name in ("", "cd", "true", ":", "set") else None
        return True

    def _source(self, wanted: Field, where: str) -> None:
        if wanted.text is None:
            raise SettingsError(f"{where}: which file it sources is not known: {wanted.why}")
        if not os.path.isfile(file := Path(wanted.text)):
            # Scripts name paths of their own container, so look for the end of the path around this script.
            tails = [Path(*file.parts[n:]) for n in range(1, len(file.parts) - 1) if ".." not in file.parts[n:]]
            near = (parent / tail for tail in tails for parent in self.files[-1].parents)
            if (found := next((path for path in near if os.path.isfile(path)), None)) is None:
                raise SettingsError(f"{where}: no file {file} to source")
            self.notes.append(f"{where}: there is no {file}; read {found}")
            file = found
        self.run(file.resolve(), where)

    def _unknown(self, name: str, where: str, why: str) -> None:
        self.values[name] = [Field(None, where, f"{where}: {why}")]

    def _assign(self, word: Word, live: Known) -> None:
        found = _ASSIGNS.match(word.raw)
        assert found is not None
        (name, index, adds), rest = found.groups(), word.raw[found.end() :]
        old, listed = self._lookup(name, word.where), rest.startswith("(")
        if listed:
            inner = [one for words, _ in commands(rest[1:-1], word.where) for one in words]
            new = [found for one in inner for found in self._fields(one)]
        else:
            new = [self._joined(rest, word.where)]
        if adds:
            new = [*old, *new] if listed else [_glued([*old[:1], *new], word.where)]
        elif index is not None:
            known = index.isdigit() and int(index) < len(old)
            new = [*old[: int(index)], *new, *old[int(index) + 1 :]] if known else []
        if (live is None and new != self.values.get(name)) or (index is not None and not new):
            self._unknown(name, word.where, f"what {name} is depends on what the script runs")
        else:
            self.values[name] = new

    def _lookup(self, name: str, where: str) -> list[Field]:
        if name in ("BASH_SOURCE", "0"):
            return [Field(str(self.files[-1]), where)]
        if name not in self.values and name in self.environ:
            return [Field(self.environ[name], where)]
        return self.values.get(name, [])

    def _fields(self, word: Word) -> list[Field]:
        """Return the word's expansion, split where the shell splits."""
        out, opened = list[list[Field]](), False
        for splits, values in self._pieces(word.raw, word.where):
            for number, found in enumerate(values):
                text = found.text if splits and found.text is not None else None
                pieces = [found] if text is None else [Field(piece, found.where) for piece in text.split()]
                opened = opened and not number and not (text or "x")[0].isspace()
                for piece in pieces:
                    if opened:
                        out[-1].append(piece)
                    else:
                        out.append([piece])
                    opened = text is None or piece is pieces[-1]
                opened = opened and not (text or "x")[-1].isspace()
        return [_glued(field, word.where) for field in out]

    def _joined(self, raw: str, where: str) -> Field:
        return _glued([one for _, values in self._pieces(raw, where) for one in values], where)

    def _pieces(self, raw: str, where: str, *, quoted: bool = False) -> Iterator[tuple[bool, list[Field]]]:
        """Yield for each part whether the shell splits it at spaces, and its values."""
        at = 0
        while at < len(raw):
            end = ends_at(raw, at, where, quoted=quoted)
            piece, at = raw[at:end], end
            if piece[0] == "$" and len(piece) == 1 and (found := re.compile(r"[A-Za-z_]\w*|[0-9@#?]").match(raw, at)):
                at = found.end()
                yield not quoted, self._value(found[0], where)
            elif piece[0] == "\\":
                yield False, [Field(piece if quoted and piece[1:] not in '$`"\\\n' else piece[1:].strip("\n"), where)]
            elif piece[0] == '"' and len(piece) > 1:
                yield from list(self._pieces(piece[1:-1], where, quoted=True)) or [(False, [Field("", where)])]
            elif piece[0] == "'" and len(piece) > 1:
                yield False, [Field(piece[1:-1], where)]
            elif piece.startswith("$(("):
                yield not quoted, [self._sum(piece[3:-2], where)]
            elif piece.startswith(("$(", "`")):
                yield not quoted, [self._output(piece[1 if piece[0] == "`" else 2 : -1], where)]
            elif piece.startswith("${"):
                yield not quoted, self._value(piece[2:-1], where)
            else:
                yield False, [Field(piece, where)]

    def _value(self, inside: str, where: str) -> list[Field]:
        if (read := _NAME.fullmatch(inside)) is None:
            return [Field(None, where, f"{where}: ${{{inside}}} is not read without running it")]
        name, index, colon, action, word = read.groups()
        found = self._lookup(name, where)
        empty = not found or (bool(colon) and all(one.text == "" for one in found))
        if action and empty == (action != "+"):
            instead = [self._joined(word, where)]
            self.values |= {name: instead} if action == "=" else {}
            return instead
        if index and index.isdigit():
            found = found[int(index) :]
        return found if index in ("@", "*") or name == "@" else found[:1] or [Field("", where)]

    def _sum(self, text: str, where: str) -> Field:
        def number(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int(value)):
                    return value
                case ast.Name(id=name):
                    return int(found[0].text or "") if (found := self._lookup(name, where)) else 0
                case ast.BinOp(left=left, op=op, right=right):
                    return _SUMS[type(op)](number(left), number(right))
            raise ValueError(text)

        try:
            return Field(str(number(ast.parse(text.replace("$", "").strip(), mode="eval").body)), where)
        except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError):
            return Field(None, where, f"{where}: $(({text})) is not known without running the script")

    def _output(self, text: str, where: str) -> Field:
        """Return the output of `$(...)`, which is known for a few commands."""
        cwd, printed = Path.cwd(), ""
        for words, ends in commands(text, where):
            said = [one.text for word in words for one in self._fields(word) if one.text != "--"]
            match said if None not in said and ends != "|" else []:
                case ["cd", str(folder)]:
                    cwd = Path(os.path.normpath(cwd / folder))
                case ["pwd"]:
                    printed = str(cwd)
                case ["dirname" | "basename" as name, str(path)]:
                    printed = getattr(os.path, name)(path.rstrip("/")) or "."
                case ["echo", *texts]:
                    printed = " ".join(map(str, texts))
                case ["seq", *texts] if 1 <= len(texts) <= 3 and all(str(one).isdigit() for one in texts):
                    first, step = int(str(texts[0])) if texts[1:] else 1, int(str(texts[1])) if texts[2:] else 1
                    printed = " ".join(map(str, range(first, int(str(texts[-1])) + 1, step or 1)[:10_000]))
                case _:
                    return Field(None, where, f"{where}: what `{text}` prints is not known without running it")
        return Field(printed, where)


def _function(words: list[Word], ends: str, listed: list[Command], at: int) -> tuple[str, list[Command], int]:
    """Return name and commands of a function that begins with `words`, and the index after it."""
    name = next((word.raw for word in words if word.raw not in ("function", "()")), "")
    opened = next((n for n, word in enumerate(words, 1) if word.raw == "{"), len(words))
    body, depth = [(words[opened:], ends)], 1
    while True:
        raws = [word.raw for word in body[-1][0]]
        depth += raws.count("{") - raws.count("}")
        if at == len(listed) or not depth:
            return name, body, at
        body.append(listed[at])
        at += 1


def _glued(found: list[Field], where: str) -> Field:
    unknown = next((one for one in found if one.text is None), None)
    return unknown or Field("".join(one.text or "" for one in found), found[0].where if found else where)


def _decided(args: list[str | None], raw: str) -> Known:
    """Return the result of a test; None if it is unknown, as for tests of files. `raw`: the last word as written in
    `[[`, where text outside quotes may be a pattern."""
    match args:
        case ["-z" | "-n" as asked, str(text)]:
            return (text == "") == (asked == "-z")
        case [str(left), "=" | "==" | "!=" as asked, str(right)]:
            if not (re.search(r"[*?[]", right) and re.search(r"[*?[$`]", _QUOTED.sub("", raw))):
                return (left == right) == (asked != "!=")
            return fnmatchcase(left, right) == (asked != "!=") if _PATTERN.fullmatch(raw) else None
        case [str(left), "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as asked, str(right)]:
            known = left.isdecimal() and right.isdecimal()
            return getattr(operator, asked[1:])(int(left), int(right)) if known else None
    return None
