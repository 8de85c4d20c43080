"""Launch scripts are read, not run: as bash would expand them, or with a note about values that only a run has."""

import os
import random
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.compat.script import read_script
from agentrl.errors import SettingsError


def flags(folder: Path, text: str, environ: dict[str, str] | None = None) -> list[str | None]:
    (folder / "run.sh").write_text(text)
    return [found.text for found in read_script(folder / "run.sh", environ or {}).flags]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "python train.py --lr 1e-6 --save '/a b' \\\n  --use-wandb # --no\n",
            ["--lr", "1e-6", "--save", "/a b", "--use-wandb"],
        ),
        (
            'A=(\n  --lr 1 # not 2\n  #--no\n\n  --b "c d"\n)\npython3 -u train.py ${A[@]}',
            ["--lr", "1", "--b", "c", "d"],
        ),
        ('A=(--b "c d")\nA+=(--e)\nray job submit -- python3 /x/train.py "${A[@]}"', ["--b", "c d", "--e"]),
        ('A=(x y z)\nA[1]=Y\npython train.py ${A[@]} ${A} "${A[0]}"', ["x", "Y", "z", "x", "x"]),
        ('N=${N:-4}; M=${N}0\npython train.py --n ${N} --m "$M"', ["--n", "4", "--m", "40"]),
        ('N=${N:-"${M:-7}"} && cd /tmp && python train.py --n $((N * 2 - 1))', ["--n", "13"]),
        (': "${N:=4}" ${M=5} ${N:=6}\npython train.py $N $M', ["4", "5"]),
        ("python train.py --sizes 1 $(seq 16 8 32) `basename /a/b`", ["--sizes", "1", "16", "24", "32", "b"]),
        ('if [ -z "$X" ]; then N=1; else N=2; fi\npython train.py $N', ["1"]),
        ('N=1\nif [ "$N" -gt 3 ] || [ "$N" = 1 ]; then N=5; elif true; then N=6; fi\npython train.py $N', ["5"]),
        ("f() {\n  N=3\n}\ncat > x <<EOF\npython train.py --no\nEOF\npython train.py --yes 2>&1 | tee log", ["--yes"]),
        ('E=\npython train.py --a $E --b "$E" x"$E"y', ["--a", "--b", "", "xy"]),
        ('python train.py --lr 1 "$@" $1', ["--lr", "1"]),
        ("N=16\n( N=8; M=9 )\npython train.py $N ${M:-1}", ["16", "1"]),
        ("(cd /tmp && python train.py --n 1)", ["--n", "1"]),
        ("python train.py --n 1 > >(tee log) 2>&1", ["--n", "1"]),
        ("usage() { echo no; exit 1; }\nclean()\n{\n  exit 2\n}\npython train.py --n 1", ["--n", "1"]),
        ('f() {\n  local n="$1"\n  python3 train.py --n $n "$@"\n}\nf a "b c"', ["--n", "a", "a", "b c"]),
        ("function g { N=$1; }\ng 2 && python train.py $N $1", ["2"]),
        ('f() { if [ "$1" = a ]; then return; fi; N=7; }\nN=1\nf a\npython train.py $N', ["1"]),
        (
            'if [ "$X" ]; then f() { N=1; }; else f() { N=2; }; fi\nX=1\nif [ -n "$X" ]; then\n  g() { N=3; }\nelse\n  g() { N=4; }\nfi\ng\npython train.py $N',
            ["3"],
        ),
        (
            'M=Qwen3-30B-A3B N=no\nif [[ $M == *30B* ]]; then N=1; else N=2; fi\n[[ "$M" != *"8B"?? ]] && N=${N}3\n'
            "[[ $M == '*30B*' ]] && N=${N}4\n[[ $M == \\*30B ]] && N=5\npython train.py $N",
            ["13"],
        ),
        ('if [[ a* == "a*" ]]; then N=1; else N=2; fi\n[ ab = "a*" ] && N=3\npython train.py $N', ["1"]),
        ("f() { { N=3; }; g() { N=4; M=$1; }; g x; }\nf y\npython train.py $N $M", ["4", "x"]),
        (
            "N=1 M=1\nf() { local -i N=2 M; M=3; declare K=4; declare -g G=5; H=$N; }\nf\npython train.py $N $M ${K:-6} $G $H",
            ["1", "1", "6", "5", "2"],
        ),
        ("f() { local N=2; g; echo $N; }\ng() { N=3; M=$N; }\nN=1\nf\npython train.py $N $M", ["1", "3"]),
        ("export N M=2\npython train.py $M", ["2"]),
        ("f() { return 1; }\nif f; then N=8; else N=2; fi\nf || M=3\npython train.py $N $M", ["2", "3"]),
        ("f() { false; return $1; }\nif f 0; then N=8; else N=2; fi\npython train.py $N", ["8"]),
        ('set -e -- --lr 5\npython3 train.py "$@" $2', ["--lr", "5", "5"]),
        ("f() { cd . || return 1; N=1; cd . || return 1; python3 train.py --n $N; }; f", ["--n", "1"]),
        (
            'N=1 A=(2 3)\ndeclare -x N\ndeclare -a A B\nB+=(4)\npython3 train.py $N "${A[@]}" "${B[@]}"',
            ["1", "2", "3", "4"],
        ),
        ('f() { local -a a; a+=(--n 1); local a; python3 train.py "${a[@]}"; }\nf', ["--n", "1"]),
        ('set -- --n "$@"\nf() { set -- x; }\nset -- "$@" 1\nf\npython3 train.py "$@"', ["--n", "1"]),
    ],
)
def test_words_are_those_of_bash(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert flags(tmp_path, text) == expected
    for name in ("python", "python3", "ray"):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/said\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}"}
    subprocess.run(["bash", "run.sh"], cwd=tmp_path, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=60)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[next(at for at, word in enumerate(said, 1) if word.endswith("train.py")) :] == expected


def test_what_the_caller_exports_counts_where_the_script_reads_it(tmp_path: Path) -> None:
    text = "export N=${N:-4}\nM=1\npython train.py $N $M"
    assert flags(tmp_path, text, {"N": "9", "M": "8", "PATH": "/x"}) == ["9", "1"]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("\nN=$(nvidia-smi -L | wc -l)\npython train.py --n $N", 2, "nvidia-smi"),
        ("for ((i=0; i<3; i++)); do\n  a+=($i)\ndone\npython train.py --n ${a[@]}", 2, "depends on"),
        ("if command -v x; then\n  N=1\nfi\npython train.py --n $N", 2, "depends on"),
        ("printf -v N '%s' 3\npython train.py --n $N", 1, "printf"),
        ("python train.py --n ${N##*/}", 1, "N##"),
        ('N=1\ncase "$M" in\n  8b | 9b) N=2 ;;\nesac\npython train.py --n $N', 3, "depends on"),
        ('N=1\ncase "$M" in 8b) N=2 ;; *) N=3 ;; esac\npython train.py --n $N', 2, "depends on"),
        ("N=1\n((N += 2))\npython train.py --n $N", 2, "sets it"),
        ('N=0 X=\nif [ "$X" -gt 1 ]; then N=1; fi\npython train.py --n $N', 2, "depends on"),
        ("N=0 P='a*'\nif [[ ab == $P ]]; then N=1; fi\npython train.py --n $N", 2, "depends on"),
        ("N=0\nif [[ ab == [a-c]b ]]; then N=1; fi\npython train.py --n $N", 2, "depends on"),
        ("f() {\n  x && return 1\n  N=1\n}\nf\npython train.py --n $N", 3, "depends on"),
        ("N=1\nf() { if x; then return 0; fi; false; }\nif f; then N=2; fi\npython train.py --n $N", 3, "depends on"),
        ("N=1\nf() { return $(x); }\nif f; then N=2; fi\npython train.py --n $N", 3, "depends on"),
        ("if x; then set -- --n 1; fi\npython train.py --n $1", 1, "set"),
        ("f() {\n  shift\n  python train.py --n $1\n}\nf a b", 2, "shift"),
        ("if x; then f() { N=1; }; fi\nif x; then f; fi\npython train.py --n ${N:-2}", 1, "depends on"),
    ],
)
def test_what_only_running_it_would_tell_is_named(tmp_path: Path, text: str, line: int, why: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    found = read_script(tmp_path / "run.sh", {}).flags[1]
    assert found.text is None
    assert f"run.sh line {line}" in found.why
    assert why in found.why


def test_sourced_files_are_read_where_they_are_and_where_they_must_be(tmp_path: Path) -> None:
    models = tmp_path / "slime" / "scripts" / "models"
    models.mkdir(parents=True)
    (models / "base.sh").write_text('ARGS=(--layers "${LAYERS:-3}")\n')
    (models / "five.sh").write_text('LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n')
    head = 'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for wanted in ("${HERE}/models/five.sh", "/container/slime/scripts/models/five.sh"):
        script = models.parent / "run.sh"
        script.write_text(f'{head}source "{wanted}"\npython train_async.py ${{ARGS[@]}}\n')
        launch = read_script(script, {})
        assert [(one.text, one.where) for one in launch.flags] == [
            ("--layers", "base.sh line 1"),
            ("5", "five.sh line 1"),
        ]
        assert launch.asynchronous
        assert [note for note in launch.notes if "/container" in note] == launch.notes[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "starts no train.py or train_async.py"),
        ("python train.py\npython train.py", "line 1 and run.sh line 2 each start"),
        (
            'if [ -z "${B}" ]; then\n  echo "B is not set"\n  exit 1\nfi\npython train.py',
            "line 3: the script stops here: B is",
        ),
        ("source nothing.sh\npython train.py", "line 1: no file"),
        ('source "${BASH_SOURCE[0]}"\npython train.py', "sources itself"),
        ("source $(x)\npython train.py", "not known"),
        ('python train.py "--lr', 'line 1: " is never closed'),
        ("A=(1 2\npython train.py", "line 1: ( is never closed"),
        ("python train.py ${A", "line 1: \\${ is never closed"),
        ("python train.py " + "$(" * 9000, "nested too deep"),
        ("python train.py $((" + "9" * 9000 + "))\nif [ " + "9" * 9000 + " -gt 1 ]; then :; fi", "numbers too long"),
        ("python train.py 'x", "line 1: ' is never closed"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said.replace("(", r"\(")):
        flags(tmp_path, text)


def test_a_script_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    for name, content in (("a.sh", None), ("b.sh", b"\xff\xfe")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingsError, match="cannot read"):
            read_script(tmp_path / name)


WHOLE = """set -ex
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
N=${N:-${M:-8}}
if [ -z "$N" ] || [ "$N" -le 0 ]; then N=8; else for ((i=0; i<3; i++)); do arr+=($i); done; fi
A=(--lr 1e-6 # the rate
  --n $((N * 2)) --sizes $(seq 1 3) 'a b' "c $N")
cat > x <<EOF
{"a": "${N}"}
EOF
ray job submit --x='{ "y": 1 }' -- python3 train.py ${A[@]} \\
  "${A[@]}" 2>&1 | tee log
"""
BITS = [
    "$(",
    "${",
    "((",
    "))",
    ")",
    "}",
    "'",
    '"',
    "`",
    "\\",
    "if",
    "fi",
    "then",
    "[",
    "<<EOF",
    "<",
    "|",
    "&&",
    "$",
    "#",
    "{",
]


def test_damaged_scripts_are_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(60):
        text = WHOLE
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice([*BITS, "\n", "\0"]) + text[at + draw.choice((0, 0, 1, 5, 50)) :]
        with suppress(SettingsError):
            flags(tmp_path, text)
