"""`remote_rm` against real HTTP servers in a thread; the servers' answers are scripted."""

import json
import pickle
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.errors import Blame, GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import find
from agentrl.rm_hub.remote_rm import RemoteRM, read_answer
from agentrl.rm_hub.running import http
from agentrl.rm_hub.running.http import HttpStatus
from agentrl.rm_hub.settings import RmHubSettings
from tests.rm_hub.http_server import Endpoint, serving, unused_address


def settings(url: str, **changes: Any) -> RmHubSettings:
    return RmHubSettings(rm_url=url, **{"rm_timeout": 20.0, **changes})


async def ask(
    endpoint: Endpoint,
    response: str = "four",
    label: object = "4",
    metadata: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Grade:
    with serving(endpoint) as url:
        async with RemoteRM(settings(url, **changes)) as server:
            return await server.grade(response, label, metadata or {})


async def test_the_servers_number_is_the_score_and_the_request_has_the_known_form() -> None:
    seen = []

    async def endpoint(request: Request) -> Response:
        seen.append(await request.json())
        return JSONResponse(0.75)

    grade = await ask(endpoint, "four", ["4"], {"prompt": "2+2?", "source": "primer"})
    assert (grade.score, grade.correct) == (0.75, True)
    assert seen == [{"prompt": "2+2?", "response": "four", "label": ["4"], "metadata": {"source": "primer"}}]


@pytest.mark.parametrize(
    ("answer", "score", "correct"),
    [
        (1, 1.0, True),
        (0, 0.0, False),
        (-2.5, -2.5, False),
        ({"score": 0.5}, 0.5, True),
        ({"reward": -1}, -1.0, False),
        ({"score": 0.9, "correct": False}, 0.9, False),
    ],
)
def test_forms_of_answers(answer: object, score: float, correct: bool) -> None:
    grade = read_answer(answer)
    assert grade is not None
    assert (grade.score, grade.correct) == (score, correct)


def test_other_numbers_become_parts_and_texts_are_kept() -> None:
    grade = read_answer({"score": 1, "style": 0.5, "extracted": "4", "reason": "same", "tags": ["a"], "nan": None})
    assert grade is not None
    assert dict(grade.parts) == {"style": 0.5}
    assert (grade.extracted, grade.reason) == ("4", "same")


@pytest.mark.parametrize(
    "answer",
    [True, None, "1.0", [1.0], {}, {"score": None}, {"score": "high"}, {"score": True}, {"scores": 1}, 10**400],
)
def test_answers_without_a_score(answer: object) -> None:
    assert read_answer(answer) is None


@pytest.mark.parametrize("body", [b"", b"oops", b'{"score": NaN}', b'{"score": "high"}', b"[" * 100_000, b"\xff\xfe"])
async def test_bad_answers_are_typed_failures(body: bytes) -> None:
    async def endpoint(request: Request) -> Response:
        return Response(body)

    with pytest.raises(GraderFailure) as caught:
        await ask(endpoint)
    assert caught.value.kind == "grader_bad_answer"
    assert caught.value.blame is Blame.GRADER


async def test_an_answer_that_does_not_end_is_a_bad_one() -> None:
    async def endpoint(request: Request) -> Response:
        return Response(b"1" * (9 << 20))

    with pytest.raises(GraderFailure, match="expected at most 8 MiB") as caught:
        await ask(endpoint)
    assert caught.value.kind == "grader_bad_answer"


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_error_statuses_are_typed_and_not_tried_again(status: int) -> None:
    calls = []

    async def endpoint(request: Request) -> Response:
        calls.append(1)
        return Response("too busy", status_code=status)

    with pytest.raises(HttpStatus, match=f"HTTP {status}: 'too busy'") as caught:
        await ask(endpoint)
    assert (caught.value.kind, caught.value.status) == (f"grader_http_{status}", status)
    assert len(calls) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.kind, again.status) == (str(caught.value), caught.value.kind, status)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_asked_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_WAITS", (0.0, 0.0))
    calls: list[int] = []

    async def endpoint(request: Request) -> Response:
        calls.append(1)
        return JSONResponse(1) if len(calls) in (3, 5) else Response("busy", status, headers={"retry-after": "0"})

    assert (await ask(endpoint)).score == 1
    assert (await ask(endpoint)).score == 1
    with pytest.raises(HttpStatus, match=f"HTTP {status}: 'busy'"):
        await ask(endpoint)
    assert len(calls) == 8


@pytest.mark.parametrize("asked", ["60", "Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_a_wait_longer_than_the_deadline_is_a_failure_at_once(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_WAITS", (0.0,) if asked == "60" else ())
    calls: list[int] = []

    async def endpoint(request: Request) -> Response:
        calls.append(1)
        return Response("busy", 429, headers={"retry-after": asked})

    with pytest.raises(HttpStatus, match="HTTP 429"):
        await ask(endpoint)
    assert len(calls) == 1


async def test_a_server_that_is_not_there() -> None:
    wanted = pytest.raises(GraderFailure, match="is it running, and --rm-url right")
    with unused_address() as address, wanted as caught:
        async with RemoteRM(settings(address)) as server:
            await server.grade("4", "4", {})
    assert caught.value.kind == "grader_unreachable"


async def test_a_server_that_does_not_answer_in_time() -> None:
    async def endpoint(request: Request) -> Response:
        await anyio.sleep(30)
        return JSONResponse(1)

    with pytest.raises(GraderFailure, match="within 0.2 s") as caught:
        await ask(endpoint, rm_timeout=0.2)
    assert caught.value.kind == "grader_timeout"


async def test_requests_at_once_stay_below_the_limit_and_answers_go_to_their_items() -> None:
    now, most = 0, 0

    async def endpoint(request: Request) -> Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(0.01)
        now -= 1
        return JSONResponse(float((await request.json())["response"]))

    scores: dict[int, float] = {}
    with serving(endpoint) as url:
        async with RemoteRM(settings(url, rm_concurrency=3)) as server, anyio.create_task_group() as group:

            async def one(item: int) -> None:
                scores[item] = (await server.grade(str(item), None, {})).score

            for item in range(20):
                group.start_soon(one, item)
    assert scores == {item: float(item) for item in range(20)}
    assert most <= 3


async def test_hostile_text_arrives_as_it_is() -> None:
    text = "a\x00b\ud800{" + "[" * 1000 + "\u202e" + "x" * 1_000_000

    async def endpoint(request: Request) -> Response:
        return JSONResponse({"score": float(json.loads(await request.body())["response"] == text)})

    assert (await ask(endpoint, text)).score == 1.0


async def test_labels_that_are_not_json() -> None:
    async def endpoint(request: Request) -> Response:
        return JSONResponse(1)

    with pytest.raises(GraderFailure, match="label or metadata are not") as caught:
        await ask(endpoint, label={1, 2})
    assert caught.value.kind == "grader_bad_metadata"


@pytest.mark.parametrize(("url", "message"), [(None, "needs --rm-url"), ("localhost:80", "begins with http://")])
def test_settings_that_name_no_server(url: str | None, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RemoteRM(RmHubSettings(rm_url=url))


async def test_an_address_that_is_none() -> None:
    with pytest.raises(SettingsError, match="not an address"):
        async with RemoteRM(settings("http://[::1")):
            pass


def test_it_is_in_the_table() -> None:
    spec = find("remote_rm")
    assert (spec.runs, spec.needs_label, spec.reads) == ("service", False, "response")
    assert spec.load() is RemoteRM
