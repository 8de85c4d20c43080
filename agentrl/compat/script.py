"""slime's launch scripts: the flags that a bash script gives to `train.py`, read without executing anything.

1. Read are variables, arrays, `source`, `${X:-default}`, `$((...))`, tests that can be decided, and of commands `seq`, `echo`,
   `pwd`, `dirname`, `basename` and `cd`. Nothing is started, and no file is read but those that the script sources.
2. What only running it would tell (what another command prints, what a loop makes) is a `Field` without text that says
   where and why; whoever needs its value refuses it.
3. The caller's environment counts only where the script reads a variable that it has not set.
"""

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.compat.shell import Command, Part, Word, commands, parts
from agentrl.errors import SettingsError

_TRAINERS = ("train.py", "train_async.py")
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(?:\[(\w+)\])?(\+?)=")
_NAME = re.compile(r"([A-Za-z_]\w*|[0-9@#?])(?:\[([@*]|\w+)\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_NUMBERS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
Known = bool | None
"""True, False, or not to be known without running the script."""


@dataclass(frozen=True, slots=True)
class Field:
    """A word of a command line, after expansion."""

    text: str | None
    """None where only running the script would tell."""
    where: str
    """`run.sh line 31`."""
    why: str = ""
    """What the text depends on, where it is None."""


@dataclass(slots=True)
class Launch:
    """What a script starts."""

    flags: list[Field] = field(default_factory=list)
    where: str = ""
    asynchronous: bool = False
    """Whether it is `train_async.py`."""
    notes: list[str] = field(default_factory=list)


def read_script(path: str | Path, environ: Mapping[str, str] | None = None) -> Launch:
    """The flags that the script would start slime's trainer with.

    Raises:
        SettingsError: no such file, no or several such commands, or the script itself stops before it.
    """
    file = Path(path).expanduser().resolve()
    shell = _Shell(os.environ if environ is None else environ)
    shell.run(file, f"--slime-script {path}")
    if not shell.launches:
        raise SettingsError(f"--slime-script {path}: it starts neither train.py nor train_async.py")
    if len(shell.launches) > 1:
        lines = " and ".join(launch.where for launch in shell.launches)
        raise SettingsError(f"--slime-script {path}: {lines} each start a training; keep one of them")
    shell.launches[0].notes = shell.notes
    return shell.launches[0]


@dataclass(slots=True)
class _Branch:
    live: Known = True
    taken: Known = False


def _both(a: Known, b: Known) -> Known:
    return False if a is False or b is False else None if a is None or b is None else True


def _not(a: Known) -> Known:
    return None if a is None else not a


class _Shell:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.values: dict[str, list[Field]] = {}
        self.launches: list[Launch] = []
        self.notes: list[str] = []
        self.files: list[Path] = []
        self.cwd = Path.cwd()
        self.said = ""

    def run(self, file: Path, asked: str) -> None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{asked}: cannot read {file} ({error})") from error
        if file in self.files:
            raise SettingsError(f"{asked}: {file} sources itself")
        self.files.append(file)
        branches: list[_Branch] = []
        status: Known = True
        before = ";"
        for command in commands(text, file.name):
            word = command.keyword()
            while word in (
                "if",
                "elif",
                "then",
                "else",
                "fi",
                "for",
                "while",
                "until",
                "case",
                "do",
                "done",
                "esac",
                "{",
                "}",
            ):
                status = self._block(word, branches, status, command)
                before = ";"
                word = "" if word in ("for", "case") else command.keyword()
            live: Known = True
            for branch in branches:
                live = _both(live, branch.live)
            if before in ("&&", "||"):
                live = _both(live, status if before == "&&" else _not(status))
            if command.words and live is not False:
                status = self._command(command, live)
            before = command.ends
        self.files.pop()

    def _block(self, word: str, branches: list[_Branch], status: Known, command: Command) -> Known:
        command.words.pop(0)
        if word in ("fi", "done", "esac", "}"):
            if branches:
                branches.pop()
        elif word in ("if", "{"):
            branches.append(_Branch())
        elif word in ("for", "while", "until", "case"):
            if word == "for" and command.words:
                self._unknown(command.words[0].plain(), command.where, "a loop sets it")
            branches.append(_Branch(live=None))
        elif word == "then" and branches:
            branches[-1].live = _both(branches[-1].live, status)
            branches[-1].taken = branches[-1].taken or branches[-1].live
        elif branches and word != "do":
            branches[-1].live = _not(branches[-1].taken)
        return True

    def _command(self, command: Command, live: Known) -> Known:
        words = command.words
        if words[0].plain() in ("export", "declare", "local", "readonly", "typeset"):
            words = [word for word in words[1:] if not word.plain().startswith("-")]
        assigned = 0
        while assigned < len(words) and _ASSIGNS.match(words[assigned].plain()):
            assigned += 1
        own = words[assigned:]
        name = own[0].plain() if own else ""
        if not own or name in ("source", "."):
            for word in words[:assigned]:
                self._assign(word, command.where, live)
        if not own:
            return True
        fields = [found for word in own for found in self._fields(word, command.where)]
        return self._known_command(name, fields, command, live)

    def _known_command(self, name: str, fields: list[Field], command: Command, live: Known) -> Known:
        texts = [found.text for found in fields]
        if name in ("source", ".") and len(fields) > 1:
            self._source(fields[1], command.where)
        elif name in ("[", "[[", "test"):
            return _decided([text for text in texts[1:] if text not in ("]", "]]")])
        elif name == "echo":
            self.said = " ".join(text or "?" for text in texts[1:])
        elif name == "exit" and live:
            raise SettingsError(f"{command.where}: the script stops here{self.said and ': '}{self.said}")
        elif name in ("printf", "read", "unset"):
            for text in texts[1:]:
                self._unknown(text or "", command.where, f"`{name}` sets it")
        elif name == "cd" and len(texts) > 1 and texts[-1]:
            self.cwd = self.cwd / texts[-1]
        elif at := next((n for n, text in enumerate(texts) if text and Path(text).name in _TRAINERS), None):
            self.launches.append(Launch(fields[at + 1 :], command.where, Path(str(texts[at])).name == _TRAINERS[1]))
        else:
            return True if name in ("cd", "true", ":", "set") else None
        return True

    def _source(self, wanted: Field, where: str) -> None:
        if wanted.text is None:
            raise SettingsError(f"{where}: which file it sources is not known: {wanted.why}")
        file = self.cwd / wanted.text
        if not file.is_file():
            # Scripts name the folder in their own container; what lies likewise around this script is meant.
            tails = [Path(*file.parts[n:]) for n in range(1, len(file.parts) - 1) if ".." not in file.parts[n:]]
            near = (parent / tail for tail in tails for parent in self.files[-1].parents)
            found = next((path for path in near if path.is_file()), None)
            if found is None:
                raise SettingsError(f"{where}: no file {file} to source")
            self.notes.append(f"{where}: there is no {file}; read {found}")
            file = found
        self.run(file.resolve(), where)

    def _unknown(self, name: str, where: str, why: str) -> None:
        self.values[name] = [Field(None, where, f"{where}: {why}")]

    def _assign(self, word: Word, where: str, live: Known) -> None:
        found = _ASSIGNS.match(word.plain())
        assert found is not None
        name, index, adds = found.groups()
        if word.array is not None:
            new = [one for element in word.array for one in self._fields(element, where)]
        else:
            rest = [Part("text", word.parts[0].text[found.end() :], quoted=True), *word.parts[1:]]
            new = [self._joined(rest, word.where or where)]
        if adds:
            old = self._lookup(name, where)
            new = [*old, *new] if word.array is not None else [_glued([*old[:1], *new], where)]
        elif index is not None:
            old = self._lookup(name, where)
            known = index.isdigit() and int(index) <= len(old)
            new = (
                [*old[: int(index)], *new, *old[int(index) + 1 :]]
                if known
                else [Field(None, where, f"{where}: [{index}]")]
            )
        if live is None and new != self.values.get(name):
            self._unknown(name, where, "whether this is reached depends on what the script runs")
        else:
            self.values[name] = new

    def _lookup(self, name: str, where: str) -> list[Field]:
        if name in ("BASH_SOURCE", "0"):
            return [Field(str(self.files[-1]), where)]
        if name in self.values:
            return self.values[name]
        return [Field(self.environ[name], where)] if name in self.environ else []

    def _fields(self, word: Word, where: str) -> list[Field]:
        """The word's expansion, split where the shell splits."""
        out: list[list[Field]] = []
        opened = False
        for part in word.parts:
            for number, found in enumerate(self._value(part, word.where or where)):
                pieces = [found]
                if not part.quoted and part.kind != "text" and found.text is not None:
                    pieces = [Field(text, found.where) for text in found.text.split()]
                    opened = opened and not found.text[:1].isspace()
                for at, piece in enumerate(pieces):
                    if opened and not number and not at:
                        out[-1].append(piece)
                    else:
                        out.append([piece])
                    opened = True
                opened = opened and not (found.text is not None and not part.quoted and found.text[-1:].isspace())
        return [_glued(field, where) for field in out]

    def _joined(self, inside: list[Part], where: str) -> Field:
        found = [one for part in inside for one in self._value(part, where)]
        return _glued(found, where)

    def _value(self, part: Part, where: str) -> list[Field]:
        match part.kind:
            case "text":
                return [Field(part.text, where)]
            case "sum":
                return [self._sum(part.text, where)]
            case "run":
                return [self._output(part.text, where)]
        read = _NAME.fullmatch(part.text)
        if read is None:
            return [Field(None, where, f"{where}: ${{{part.text}}} is not read without running it")]
        name, index, colon, action, word = read.groups()
        found = self._lookup(name, where)
        empty = not found or (bool(colon) and all(one.text == "" for one in found))
        if (action in ("-", "=") and empty) or (action == "+" and not empty):
            return [self._joined(parts(word), where)]
        if not found:
            return [] if index in ("@", "*") else [Field("", where)]
        return found if index in ("@", "*") else found[:1]

    def _sum(self, text: str, where: str) -> Field:
        try:
            return Field(str(self._number(ast.parse(text.replace("$", "").strip(), mode="eval").body, where)), where)
        except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError):
            return Field(None, where, f"{where}: $(({text})) is not known without running the script")

    def _number(self, node: ast.expr, where: str) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                found = self._lookup(name, where)
                return int(found[0].text or "") if found else 0
            case ast.BinOp(left=left, op=op, right=right):
                return _NUMBERS[type(op)](self._number(left, where), self._number(right, where))
        raise ValueError(ast.dump(node))

    def _output(self, text: str, where: str) -> Field:
        """What `$(...)` prints, of the few commands whose output is known."""
        cwd, printed = self.cwd, ""
        for command in commands(text, where):
            said = [one.text for word in command.words for one in self._fields(word, where) if one.text != "--"]
            if None in said or command.ends == "|":
                return Field(None, where, f"{where}: what `{text}` prints is not known without running it")
            name, *args = [one or "" for one in said]
            match name:
                case "cd" if args:
                    cwd = Path(os.path.normpath(cwd / args[0]))
                case "pwd":
                    printed = str(cwd)
                case "dirname" | "basename" if args:
                    printed = getattr(os.path, name)(args[0].rstrip("/")) or "."
                case "echo":
                    printed = " ".join(args)
                case "seq" if all(re.fullmatch(r"-?\d+", arg) for arg in args) and 1 <= len(args) <= 3:
                    first, step, last = (
                        (1, 1, *map(int, args))[-3:] if len(args) != 2 else (int(args[0]), 1, int(args[1]))
                    )
                    printed = " ".join(map(str, range(first, last + (1 if step > 0 else -1), step or 1)))
                case _:
                    return Field(None, where, f"{where}: what `{text}` prints is not known without running it")
        return Field(printed, where)


def _glued(found: list[Field], where: str) -> Field:
    unknown = next((one for one in found if one.text is None), None)
    return unknown or Field("".join(one.text or "" for one in found), found[0].where if found else where)


def _decided(args: list[str | None]) -> Known:
    """What a test answers; files are not looked at."""
    match args:
        case ["-z" | "-n" as asked, str(text)]:
            return (text == "") == (asked == "-z")
        case [str(left), "=" | "==" | "!=" as asked, str(right)]:
            return (left == right) == (asked != "!=")
        case [str(left), str(asked), str(right)] if asked in _COMPARED:
            return _COMPARED[asked](int(left), int(right)) if (left + right).isdigit() else None
    return None
