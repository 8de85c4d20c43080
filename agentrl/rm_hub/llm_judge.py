"""`llm_judge`: a language model behind any OpenAI-compatible server judges the answer.

1. Each text is put between tags that have a digest of the texts, so no text can contain its own closing tag.
2. The verdict is requested as JSON, with a schema if the server supports it; `reading.verdict` reads it. If an answer
   has no verdict, the judge is asked once more. A second such answer is a `judge_nonsense` failure, never a zero.
3. Verdicts are cached by model, rubric and texts. The API key comes from the environment only."""

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio

from agentrl.errors import GraderFailure, SettingsError, raised_as
from agentrl.rm_hub.grade import Grade, GraderService, Metadata
from agentrl.rm_hub.reading.verdict import parse_verdict
from agentrl.rm_hub.running.http import HttpStatus, JsonService
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.sample import content_text
from agentrl.tools.threads import run_in_daemon_thread

_FOLDER = Path(__file__).parent
DEFAULT_RUBRIC = (_FOLDER / "rubric.txt").read_text(encoding="utf-8")
_SYSTEM = (_FOLDER / "judge_system.txt").read_text(encoding="utf-8").rstrip()
_AGAIN = 'That was no verdict. Answer with the JSON object alone: {"reason": "...", "verdict": "...", "score": ...}'

_SCHEMA = json.loads((_FOLDER / "verdict.json").read_text(encoding="utf-8"))
_FIELD = re.compile(r"\{(question|response|label)\}")
_NO_SCHEMA = (400, 404, 415, 422, 501)  # statuses of servers that do not support the `response_format`
_NEW_LIMIT = "max_completion_tokens"  # the field that newer servers demand for `max_tokens`
_WAIT = 30.0  # seconds to wait for another process's write to the cache


class LLMJudge(GraderService):
    """An async context manager: one judge, its connections and its cache. Raises SettingsError: `judge_url` is
    missing, the rubric has no {response}, or the cache cannot be opened."""

    def __init__(self, settings: RmHubSettings) -> None:
        if not settings.judge_url:
            raise SettingsError("--rm-type llm_judge needs --judge-url, the address of an OpenAI-compatible server")
        self._settings = settings
        self._rubric = read_rubric(settings.judge_rubric)
        self._schema, self._limit = True, "max_tokens"
        url, timeout, concurrency = settings.judge_url.rstrip("/"), settings.judge_timeout, settings.judge_concurrency
        if not url.endswith("/chat/completions"):  # the address of a host, or of its API
            path = url.partition("://")[2].partition("/")[2]
            url += "/chat/completions" if path else "/v1/chat/completions"
        self._name = url if settings.judge_model == "default" else settings.judge_model  # each server has its default
        self._service = JsonService(url, "the judge", "--judge-url", "judge", timeout, concurrency)
        self._cache = JudgeCache(settings.judge_cache_path) if settings.judge_cache_path else None
        super().__init__(self._service, *filter(None, [self._cache]))

    async def grade(self, response: str, label: Any, metadata: Metadata) -> Grade:
        """Return the verdict of the judge or its cache. The question is the metadata's `question`, else its `prompt`.
        Raises GraderFailure: `judge_unreachable`, `judge_timeout`, `judge_http_STATUS`, `judge_bad_answer`,
        `judge_nonsense`, `judge_cache`; `grader_no_label`, `grader_no_metadata` if the rubric needs a missing field."""
        messages = ask(self._rubric, response, label, metadata)
        key = digest(self._name, json.dumps(messages))
        verdict = await self._cache.get(key) if self._cache is not None else None
        if verdict is None:
            verdict = await self._verdict(messages, response)
            if self._cache is not None:
                await self._cache.put(key, verdict)
        return verdict if verdict.reason else replace(verdict, reason="the judge gave no reason")

    async def _verdict(self, messages: list[dict[str, str]], response: str) -> Grade:
        for _ in range(2):
            text, truncated = await self._complete(messages)
            if (verdict := parse_verdict(text, response)) is not None:
                return verdict
            messages = [*messages, {"role": "assistant", "content": text[-2000:]}, {"role": "user", "content": _AGAIN}]
        said = f"the judge {self._settings.judge_model} gave no verdict in two answers; the last was {text!r:.200}"
        limit = f"It was truncated: use a --judge-max-tokens above {self._settings.judge_max_tokens}"
        remedy = limit if truncated else "Use a stronger judge, or a clearer --judge-rubric"
        raise GraderFailure(f"{said}. {remedy}", kind="judge_nonsense")

    async def _complete(self, messages: list[dict[str, str]]) -> tuple[str, bool]:
        """Return the judge's answer as text, and true if it was truncated. After a server refuses the schema, requests
        omit it. After a server refuses `max_tokens`, requests have `max_completion_tokens`."""
        body: dict[str, Any] = {"model": self._settings.judge_model, "messages": messages, "temperature": 0}
        schema, limit = self._schema, self._limit
        while True:
            form = {"response_format": _SCHEMA} if schema else {}
            try:
                answer = await self._post({**body, limit: self._settings.judge_max_tokens, **form})
                break
            except HttpStatus as refused:
                if limit != _NEW_LIMIT and refused.status == 400 and _NEW_LIMIT in str(refused):
                    limit = _NEW_LIMIT
                elif schema and refused.status in _NO_SCHEMA:
                    schema = False
                else:
                    raise
        self._schema, self._limit = schema, limit
        match answer:
            case {"choices": [{"message": {"content": str(text)}} as choice, *_]}:
                return text, choice.get("finish_reason") == "length"
            case {"choices": [{"message": {"content": None} | {"refusal": str()}} as choice, *_]}:
                return "", choice.get("finish_reason") == "length"
        raise self._service.bad_answer("an OpenAI chat completion", answer)

    async def _post(self, body: Mapping[str, Any]) -> Any:
        name = self._settings.judge_api_key_env
        key = os.environ.get(name, "").strip()
        try:
            return await self._service.post(body, {"authorization": f"Bearer {key}"} if key else None)
        except HttpStatus as refused:
            if refused.status not in (401, 403):
                raise
            said = "is set but was not accepted" if key else "is not set"
            where = f"the API key is read from the environment variable {name}, which {said}"
            raise HttpStatus(f"{refused}; {where}", kind=refused.kind) from refused


class JudgeCache:
    """A cache of verdicts, by a digest of model, rubric and texts, in an SQLite file that processes may share. An async
    context manager. A thread reads and writes the file, and creates it if it is missing. It keeps the rollback journal:
    SQLite refuses another one while a process opens the file. Raises SettingsError: the file is unusable."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()

    async def __aenter__(self) -> Self:
        self._one_at_a_time = anyio.CapacityLimiter(1)
        what = f"--judge-cache-path {self.path} cannot be used as the judge's cache"
        remedy = "name a file of its own in a folder that you may write to"
        with raised_as(SettingsError, what, sqlite3.Error, OSError, remedy=remedy):
            self._db = await run_in_daemon_thread(self._open)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_WAIT):
            await self._run(self._db.close)

    async def get(self, key: str) -> Grade | None:
        found = "SELECT correct, score, reason FROM verdicts WHERE key=?"
        row = await self._run(lambda: self._db.execute(found, (key,)).fetchone())
        return None if row is None else Grade(float(row[1]), bool(row[0]), reason=str(row[2]))

    async def put(self, key: str, verdict: Grade) -> None:
        """Store a verdict. An older verdict under the same key stays."""
        reason = verdict.reason.encode(errors="replace").decode()  # SQLite does not accept lone surrogates
        row = (key, verdict.correct, verdict.score, reason)
        await self._run(lambda: self._db.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?)", row))

    async def _run(self, work: Callable[[], Any]) -> Any:
        async with self._one_at_a_time:
            try:
                with anyio.fail_after(2 * _WAIT):
                    return await run_in_daemon_thread(work)
            except (sqlite3.Error, TimeoutError) as error:
                said = f"the judge's cache {self.path} failed: {error or 'it is locked'}"
                remedy = "free space, or name another --judge-cache-path"
                raise GraderFailure(f"{said}; {remedy}", kind="judge_cache") from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=_WAIT, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, correct INT, score REAL, reason TEXT)")
        return db


def read_rubric(given: str | None) -> str:
    """Return the rubric: the default, `given` itself if it contains {response}, or the text of the file `given`. Raises
    SettingsError: the file cannot be read, or does not contain {response}."""
    if given is None or "{response}" in given:
        return given or DEFAULT_RUBRIC
    what = f"--judge-rubric {given!r:.100}: neither a text with {{response}} in it nor a readable file"
    with raised_as(SettingsError, what, OSError, ValueError, shown=" ({})"):
        text = Path(given).expanduser().read_text(encoding="utf-8")
    if "{response}" not in text:
        raise SettingsError(f"--judge-rubric {given}: the file has no {{response}}, which stands for the graded answer")
    return text


def ask(rubric: str, response: str, label: Any, metadata: Metadata) -> list[dict[str, str]]:
    """Return the judge's messages with each text in tags. Raises GraderFailure: the label or question is missing."""
    question = metadata.get("question", metadata.get("prompt"))
    needed = {"response", *_FIELD.findall(rubric)}
    if "label" in needed and label is None:
        raise GraderFailure("the judge's rubric has {label}, and the item has none", kind="grader_no_label")
    if "question" in needed and question is None:
        lacks = "the judge's rubric has {question}, and the metadata have neither 'question' nor 'prompt'"
        remedy = "put it there (`agentrl grade` takes it from --prompt-key)"
        raise GraderFailure(f"{lacks}; {remedy}", kind="grader_no_metadata")
    items = (("response", response), ("label", label), ("question", question))
    texts = {name: _text(item) for name, item in items if name in needed}
    tag = digest(rubric, *texts.values())[:16]

    def put(field: re.Match[str]) -> str:
        return f"<text-{tag}>\n{texts[field.group(1)]}\n</text-{tag}>"

    # One pass: a {label} inside the graded answer is not replaced.
    said = {"system": _SYSTEM.format(tag=tag), "user": _FIELD.sub(put, rubric)}
    return [{"role": role, "content": text} for role, text in said.items()]


def digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _text(item: Any) -> str:
    """Return a question or label as text: text unchanged, chat messages joined, other values as JSON."""
    if isinstance(item, str):
        return item
    if isinstance(item, (list, tuple)) and all(isinstance(m, Mapping) and "role" in m for m in item):
        return "\n\n".join(f"{m['role']}: {content_text(m.get('content'))}" for m in item)
    return json.dumps(item, ensure_ascii=False, default=str)
