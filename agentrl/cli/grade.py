"""`agentrl grade`."""

import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import click

from agentrl.cli.results import Summary, Write, writing
from agentrl.errors import DataError, GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import BOXED, GRADERS, GraderSpec, check_rm_type
from agentrl.rm_hub.running.runner import GraderRunner, each, settings_of
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rowfiles import RowFile, json_type, open_rows
from agentrl.settings import flag_of

Outcome = Grade | GraderFailure
_EXPLAIN = "Show N answers with what was read and why: failures and wrong ones first."
_READ_BY = {"rm": "remote_rm", "judge": "llm_judge", "code": "code"}
"""By the first word of settings that only one grader reads, the name of the grader."""
_READER = "Rule that finds answers in a text, for rows whose metadata name none. [default: strict]"


def _grader_settings(function: Any) -> Any:
    """Add a flag for every setting of the graders, under the name of the setting."""
    for name, info in reversed(RmHubSettings.model_fields.items()):
        choices = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is Literal else ()
        kind, metavar = (click.Choice(choices), None) if choices else (None, "VALUE")
        shown = "" if info.default is None else f" [default: {info.default}]"
        function = click.option(flag_of(name), type=kind, metavar=metavar, help=f"{info.description}{shown}")(function)
    return function


def _key(name: str, what: str) -> Callable[[Any], Any]:
    return click.option(f"--{name}-key", metavar="KEY", help=f"{what} [default: {name}, if there is one]")


@click.command(
    "grade",
    epilog="Exit status: 0 if every answer was graded (right or wrong), 1 if some could not be graded (they are "
    "counted by kind), 2 if the command could not run, 130 if it was interrupted.",
)
@click.argument("answers", metavar="ANSWERS")
@click.option("--rm-type", required=True, metavar="NAME", help=f"Grader: {', '.join(GRADERS)}; or boxed_ and a name.")
@click.option("--response-key", default="response", show_default=True, metavar="KEY", help="Field with the answer.")
@_key("label", "Field with the right answer.")
@_key("metadata", "Field with an object of what the grader needs besides.")
@_key("prompt", "Field with the question, for judges and reward servers.")
@click.option("--out", metavar="FILE", help="Write one result per answer: NAME.jsonl or NAME.parquet.")
@click.option("--explain", type=click.IntRange(0), default=0, metavar="N", help=_EXPLAIN)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Grade only the first N answers.")
@click.option("--reader", type=click.Choice(("strict", "lenient")), help=_READER)
@_grader_settings
def command(answers: str, rm_type: str, out: str | None, **options: Any) -> int:
    """Grade the answers in a file: how many are right, and why not.

    ANSWERS is a .jsonl or .parquet file with one answer a row.

    \b
        agentrl grade --rm-type math answers.jsonl --label-key gold --explain 5
        agentrl grade --rm-type llm_judge answers.parquet \\
            --judge-url http://localhost:30000 --out graded.parquet"""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & RmHubSettings.model_fields.keys() if ":" not in rm_type else ():
        if rm_type != (grader := _READ_BY.get(name.partition("_")[0], rm_type)):
            raise click.UsageError(f"{flag_of(name)} has no effect without --rm-type {grader}; leave it out")
    if options["reader"] and ":" not in rm_type and rm_type.removeprefix(BOXED) not in ("math", "gsm8k", "gpqa"):
        raise click.UsageError(f"--reader has no effect with --rm-type {rm_type}; leave it out")
    settings = settings_of(SimpleNamespace(**given))
    spec = check_rm_type(rm_type, settings)
    idle = [name for name in given if name.startswith("grader_") and name != "grader_total_timeout"]
    if idle and spec.runs != "process":
        raise click.UsageError(f"{flag_of(idle[0])} has no effect with --rm-type {rm_type}; leave it out")
    rows = open_rows(answers, "answers", json.loads)  # not stricter: texts of models have lone surrogates
    with writing(out, answers) as write:
        report = Report(rows, options["explain"], write)
        anyio.run(_grade_all, rm_type, spec, options, settings, report)
    report.show(out)
    return 1 if report.summary.failures else 0


def _item(row: Mapping[str, Any], spec: GraderSpec, options: Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Return a row's response, label and metadata. Raises DataError: a field is missing or of the wrong type."""
    key = options["response_key"]
    if not isinstance(response := _field(row, key, key), str):
        raise DataError(f"field {key!r} is {json_type(response)}, expected text")
    label = _field(row, options["label_key"], "label", spec.needs_label)
    metadata = _field(row, options["metadata_key"], "metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise DataError(f"field {options['metadata_key'] or 'metadata'!r} is {json_type(metadata)}, expected an object")
    known = {"prompt": _field(row, options["prompt_key"], "prompt"), "reader": options["reader"]}
    return response, label, {**{name: value for name, value in known.items() if value is not None}, **(metadata or {})}


def _field(row: Mapping[str, Any], key: str | None, usual: str, needed: bool = False) -> Any:
    """Return the value under `key`, or under `usual` if `key` is None; None if an optional value is missing."""
    if (name := key or usual) not in row and (key or needed):
        raise DataError(f"no field {name!r}; its fields are {', '.join(row) or 'none'}")
    return row.get(name)


@dataclass(slots=True)
class Report:
    """Takes outcomes in any order, writes them in the order of the rows, and keeps some to show."""

    rows: RowFile
    explain: int
    write: Write
    summary: Summary = field(default_factory=Summary)
    _next: int = 0
    _waiting: dict[int, tuple[Mapping[str, Any], Outcome]] = field(default_factory=dict)
    _shown: dict[str, list[tuple[int, str, Any, Outcome]]] = field(default_factory=dict)
    _first_failures: dict[str, tuple[int, GraderFailure]] = field(default_factory=dict)

    def add(self, at: int, row: Mapping[str, Any], response: str, label: Any, outcome: Outcome) -> None:
        self.summary.add(outcome)
        if isinstance(outcome, GraderFailure):
            self._first_failures.setdefault(outcome.kind, (at, outcome))
        if len(kept := self._shown.setdefault(_sort(outcome), [])) < self.explain:
            kept.append((at, response, label, outcome))
        self._waiting[at] = (row, outcome)
        while self._next in self._waiting:
            self.write(_result(self._next, *self._waiting.pop(self._next)))
            self._next += 1

    def show(self, out: str | None) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False, soft_wrap=True)
        order = [item for sort in ("not graded", "wrong", "right") for item in self._shown.get(sort, ())]
        for at, response, label, outcome in order[: self.explain]:
            colour = {"right": "green", "wrong": "yellow"}.get(_sort(outcome), "red")
            console.print(f"[bold {colour}]{_sort(outcome)}[/]  {escape(self.rows.where(at))}")
            for name, value in _explanation(response, label, outcome):
                console.print(f"  {name:9s} {escape(_clean(value))}")
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in self.summary.lines():
            table.add_row(name, value)
        console.print(table)
        for at, failure in self._first_failures.values():
            where = escape(self.rows.where(at))
            console.print(f"[red]{failure.kind}[/], first at {where}: {escape(_clean(str(failure)[:500]))}")
        if histogram := self.summary.histogram():
            most, width = max(count for _, count in histogram), max(len(label) for label, _ in histogram)
            console.print("scores")
            for label, count in histogram:
                bar = "#" * (max(1, round(40 * count / most)) if count else 0)
                console.print(f"  {label:>{width}s}  {bar} {count}")
        if out is not None:
            console.print(f"results: {escape(out)}")


def _sort(outcome: Outcome) -> str:
    if isinstance(outcome, GraderFailure):
        return "not graded"
    return "right" if outcome.correct else "wrong"


def _explanation(response: str, label: Any, outcome: Outcome) -> Iterator[tuple[str, str]]:
    if label is not None:
        yield "label", str(label)[:300]
    if isinstance(outcome, GraderFailure):
        yield "failure", outcome.kind
        yield "reason", str(outcome)[:500]
    else:
        yield "read", "nothing" if outcome.extracted is None else outcome.extracted[:300]
        yield "score", f"{outcome.score:g}" + "".join(f", {k} {v:g}" for k, v in outcome.parts.items())
        yield "reason", outcome.reason[:500]
    yield "answer", ("..." if len(response) > 300 else "") + response[-300:]


def _clean(text: str) -> str:
    """Return the text printable and on one line: models' answers may contain terminal control characters."""
    shown = "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\ufffd" for c in text)
    return shown.encode(errors="replace").decode()


def _result(at: int, row: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    known = {"row": at, **({"id": row["id"]} if "id" in row else {}), "input": row}
    if isinstance(outcome, GraderFailure):
        nothing = dict.fromkeys(("score", "correct", "extracted"))
        return {**known, **nothing, "reason": str(outcome), "parts": {}, "unjudged": "", "failure": outcome.kind}
    return {**known, **outcome.as_dict(), "failure": None}


async def _grade_all(
    rm_type: str, spec: GraderSpec, options: Mapping[str, Any], settings: RmHubSettings, report: Report
) -> None:
    async with GraderRunner(settings, preload=[rm_type]) as runner:
        width = {"remote_rm": settings.rm_concurrency, "llm_judge": settings.judge_concurrency}
        tasks = width.get(rm_type, 2 * runner.pool.processes if spec.runs == "process" else settings.code_concurrency)
        rows = report.rows

        async def one(at: int, _: int) -> None:
            outcome: Outcome
            row, response, label, where = dict[str, Any](), "", None, rows.where(at)
            try:
                row = rows.read(at)
                response, label, metadata = _item(row, spec, options)
                outcome = await runner.grade(rm_type, response, label, metadata)
            except GraderFailure as failure:
                outcome = failure
            except DataError as error:
                said = str(error).removeprefix(where).lstrip(": ")
                if at == 0:  # the wrong key or the wrong file, most likely: all rows are like this one
                    raise DataError(f"{where}: {said}") from error
                outcome = GraderFailure(said, kind="bad_row")
            report.add(at, row, response, label, outcome)

        chosen = range(len(rows))[: options["limit"]]
        with click.progressbar(chosen, label="grading", show_pos=True, file=sys.stderr) as bar:
            await each(bar, one, tasks)
