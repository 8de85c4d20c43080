"""`agentrl grade`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import anyio
import click

from agentrl.cli.main import debug_option
from agentrl.errors import DataError, GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import GRADERS, GraderSpec, find
from agentrl.rm_hub.running.answer_files import Row, Writer, read_rows, writing
from agentrl.rm_hub.running.summary import Summary
from agentrl.rm_hub.settings import RmHubSettings

_OWN = ("grader_processes", "grader_timeout")
Outcome = Grade | GraderFailure


def _grader_settings(function: Any) -> Any:
    """A flag for every other setting of the graders, under its own name."""
    for name, info in reversed(RmHubSettings.model_fields.items()):
        if name in _OWN:
            continue
        choices = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is Literal else ()
        kind = click.Choice(choices) if choices else None
        shown = "" if info.default is None else f" [default: {info.default}]"
        flag = "--" + name.replace("_", "-")
        metavar = None if choices else "VALUE"
        function = click.option(flag, name, type=kind, metavar=metavar, help=f"{info.description}{shown}")(function)
    return function


@click.command(
    "grade",
    context_settings={"max_content_width": 100},
    epilog="Exit status: 0 if every answer was graded (right or wrong), 1 if some could not be graded (they are "
    "counted by kind), 2 if the command could not run, 130 if it was interrupted.",
)
@click.argument("answers", metavar="ANSWERS")
@click.option(
    "--rm-type", required=True, metavar="NAME", help=f"The grader: {', '.join(GRADERS)}; or boxed_ and a name."
)
@click.option("--response-key", default="response", show_default=True, metavar="KEY", help="Field with the answer.")
@click.option("--label-key", metavar="KEY", help="Field with the right answer. [default: label, if there is one]")
@click.option(
    "--metadata-key",
    metavar="KEY",
    help="Field with an object of what the grader needs besides. [default: metadata, if there is one]",
)
@click.option(
    "--prompt-key",
    metavar="KEY",
    help="Field with the question, for judges and reward servers. [default: prompt, if there is one]",
)
@click.option("--out", metavar="FILE", help="Write one result per answer: NAME.jsonl or NAME.parquet.")
@click.option(
    "--explain",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Show N answers with what was read and why: failures and wrong ones first.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Grade only the first N answers.")
@click.option(
    "--processes", type=click.IntRange(1), metavar="N", help="Worker processes. [default: one a core, at most 8]"
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Most time for one answer.",
)
@_grader_settings
@debug_option
def command(answers: str, rm_type: str, out: str | None, **options: Any) -> int:
    """Grade the answers in a file: how many are right, and why not.

    ANSWERS is a .jsonl or .parquet file with one answer a row, or - for JSONL from standard input. Keys may reach into
    objects and lists: choices.0.message.content.

    \b
        agentrl grade --rm-type math answers.jsonl --label-key gold --explain 5
        agentrl grade --rm-type llm_judge answers.parquet \\
            --judge-url http://localhost:30000 --out graded.parquet
    """
    settings = _settings(options)
    spec = _checked(rm_type, settings)
    keys = Keys(options["response_key"], options["label_key"], options["metadata_key"], options["prompt_key"])
    rows = islice(read_rows(answers), options["limit"])
    report = Report(options["explain"])
    with writing(out, answers) as writer, _progress() as progress:
        report.writer, report.progress = writer, progress
        anyio.run(_grade_all, rm_type, spec, rows, keys, settings, report)
        if not report.summary.total:
            raise DataError(f"{answers} has no rows; expected one answer a row")
    report.show(out)
    return 1 if report.summary.failures else 0


@dataclass(frozen=True, slots=True)
class Keys:
    """Which fields of a row are what; None where the default is taken if it is there."""

    response: str
    label: str | None
    metadata: str | None
    prompt: str | None

    def read(self, row: Row, spec: GraderSpec) -> tuple[str, Any, dict[str, Any]]:
        """Response, label and metadata of a row.

        Raises:
            DataError: a field is missing or of the wrong type.
        """
        response = row.get(self.response)
        if not isinstance(response, str):
            raise DataError(f"{row.where}: field {self.response!r} is {type(response).__name__}, expected text")
        label = row.get(self.label or "label") if self.label or spec.needs_label else row.find("label")
        metadata = row.get(self.metadata) if self.metadata else row.find("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            name = self.metadata or "metadata"
            raise DataError(f"{row.where}: field {name!r} is {type(metadata).__name__}, expected an object")
        prompt = row.get(self.prompt) if self.prompt else row.find("prompt")
        known = {} if prompt is None else {"prompt": prompt}
        return response, label, {**known, **(metadata or {})}


@dataclass(slots=True)
class Report:
    """Takes outcomes in any order, writes them in the order of the rows, and keeps some to show."""

    explain: int
    summary: Summary = field(default_factory=Summary)
    writer: Writer | None = None
    progress: Callable[[int, float | None], None] = lambda count, done: None
    _next: int = 0
    _waiting: dict[int, tuple[Row, Outcome]] = field(default_factory=dict)
    _shown: dict[str, list[tuple[Row, str, Any, Outcome]]] = field(default_factory=dict)
    _first_failures: dict[str, tuple[Row, GraderFailure]] = field(default_factory=dict)

    def add(self, at: int, row: Row, response: str, label: Any, outcome: Outcome) -> None:
        """Note the outcome of answer number `at`."""
        self.summary.add(outcome)
        if isinstance(outcome, GraderFailure):
            self._first_failures.setdefault(outcome.kind, (row, outcome))
        kept = self._shown.setdefault(_sort(outcome), [])
        if len(kept) < self.explain:
            kept.append((row, response, label, outcome))
        self._waiting[at] = (row, outcome)
        while self._next in self._waiting:
            done, its = self._waiting.pop(self._next)
            self._next += 1
            if self.writer is not None:
                self.writer.write(_result(done, its))
            self.progress(self._next, done.done)

    def show(self, out: str | None) -> None:
        """Print the explanations and the summary."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(highlight=False, soft_wrap=True)
        order = [item for sort in ("not graded", "wrong", "right") for item in self._shown.get(sort, ())]
        for row, response, label, outcome in order[: self.explain]:
            colour = {"right": "green", "wrong": "yellow"}.get(_sort(outcome), "red")
            console.print(f"[bold {colour}]{_sort(outcome)}[/]  {escape(row.where)}")
            for name, value in _explanation(response, label, outcome):
                console.print(f"  {name:9s} {escape(_clean(value))}")
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in self.summary.lines():
            table.add_row(name, value)
        console.print(table)
        for row, failure in self._first_failures.values():
            console.print(f"[red]{failure.kind}[/], first at {escape(row.where)}: {escape(_clean(str(failure)[:500]))}")
        _print_histogram(console, self.summary.histogram())
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
    """On one line and printable: answers of models may hold control characters for the terminal."""
    shown = "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\ufffd" for c in text)
    return shown.encode(errors="replace").decode()


def _result(row: Row, outcome: Outcome) -> dict[str, Any]:
    known = {"row": row.number, **({"id": row.fields["id"]} if "id" in row.fields else {})}
    if isinstance(outcome, GraderFailure):
        nothing = dict.fromkeys(("score", "correct", "extracted"))
        return {**known, **nothing, "reason": str(outcome), "parts": {}, "failure": outcome.kind}
    grade = {"score": outcome.score, "correct": outcome.correct, "extracted": outcome.extracted}
    return {**known, **grade, "reason": outcome.reason, "parts": dict(outcome.parts), "failure": None}


def _print_histogram(console: Any, histogram: list[tuple[str, int]]) -> None:
    if not histogram:
        return
    most, width = max(count for _, count in histogram), max(len(label) for label, _ in histogram)
    console.print("scores")
    for label, count in histogram:
        bar = "#" * (max(1, round(40 * count / most)) if count else 0)
        console.print(f"  {label:>{width}s}  {bar} {count}")


async def _grade_all(
    rm_type: str, spec: GraderSpec, rows: Iterator[Row], keys: Keys, settings: RmHubSettings, report: Report
) -> None:
    from agentrl.rm_hub.running.runner import GraderRunner

    # Read in one place: a bad row ends the file for all tasks, and is said once.
    left = ((at, row, *keys.read(row, spec)) for at, row in enumerate(rows))
    async with GraderRunner(settings, preload=[rm_type]) as runner:
        width = {"remote_rm": settings.rm_concurrency, "llm_judge": settings.judge_concurrency}
        tasks = width.get(rm_type, settings.code_concurrency if spec.runs == "async" else 2 * runner.pool.processes)

        async def work() -> None:
            for at, row, response, label, metadata in left:
                outcome: Outcome
                try:
                    outcome = await runner.grade(rm_type, response, label, metadata)
                except GraderFailure as failure:
                    outcome = failure
                report.add(at, row, response, label, outcome)

        async with anyio.create_task_group() as group:
            for _ in range(tasks):
                group.start_soon(work)


def _checked(rm_type: str, settings: RmHubSettings) -> GraderSpec:
    """The grader, with what it needs to start: problems show before a file is read."""
    from agentrl.rm_hub.running.services import SERVICES, service

    spec = find(rm_type)
    if rm_type in SERVICES:
        service(rm_type, settings)
        import httpx  # noqa: F401  # if it is missing, that is one message and not one failure an answer
    return spec


def _settings(options: Mapping[str, Any]) -> RmHubSettings:
    from pydantic import ValidationError

    from agentrl.errors import SettingsError

    given = {name: options[name] for name in RmHubSettings.model_fields if options.get(name) is not None}
    try:
        return RmHubSettings(grader_processes=options["processes"], grader_timeout=options["timeout"], **given)
    except ValidationError as error:
        problems = [f"--{str(e['loc'][0]).replace('_', '-')} {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise SettingsError("\n".join(problems)) from error


@contextmanager
def _progress() -> Iterator[Callable[[int, float | None], None]]:
    """A bar on a terminal; where standard error is a pipe or file, a line for every tenth of the file."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.fields[count]} graded"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("grade", total=1.0, count=0)
            yield lambda count, done: bar.update(task, completed=done or 0.0, count=count)
        return
    said = 0

    def line(count: int, done: float | None) -> None:
        nonlocal said
        step = count // 1000 if done is None else int(done * 10)
        if step > said:
            said = step
            share = "" if done is None else f" ({done:.0%} of the file)"
            click.echo(f"graded {count}{share}", err=True)

    yield line
