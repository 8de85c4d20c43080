"""Recorded exchanges: load, send again, and compare the fields that must be equal.

Compared: status, content type, the keys and types of every object, finish reasons, token counts, error bodies.
Not compared: sampled text and ids, times, and the entries of `INTENDED` and the key tables, each with its reason.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parent / "v0523"

HOST_ONLY = {
    "storage_prefetch_wait": "times a storage tier that the embedded engine has not",
    "storage_staging_wait": "as above",
    "forward_entry_time": "internal clock reading of SGLang's scheduler process",
    "prefill_finished_time": "as above",
    "api_server_dispatch_finish_ts": "as above",
    "decode_throughput": "absent for answers of one token, and a time",
    "first_token_latency": "a time",
    "queue_time": "a time",
    "request_received_ts": "a time",
    "request_finished_ts": "a time",
    "e2e_latency": "a time",
    "response_sent_to_client_ts": "a time",
    "cached_tokens_details": "null or an object, as the cache happens to be",
    "cache": "model_info's description of SGLang's own caches",
    "per_gpu_checksum": "SGLang's own hash over its fused tensors",
    "per_engine_checksum": "as above",
    "parallelism_info": "one process here",
    "total_prefill_uncached_tokens": "counters of SGLang's scheduler, in /v1/loads",
}
"""Keys that may be missing on either side, and the reason."""

LOADS_KEPT = {
    "timestamp",
    "dp_rank",
    "num_running_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "num_total_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "token_usage",
}
"""Keys of /v1/loads on both sides; the others describe queues that the embedded engine does not have."""

KEYED_BY_DATA = (".checksums", "top_logprobs[]")
"""Objects whose keys are tensor names (fused in SGLang, Hugging Face's here) or sampled tokens."""

INTENDED = {
    "crash_empty_text": (400, "the real server dies; an empty prompt is refused"),
    "crash_id_out_of_vocab": (400, "the real server dies; ids are checked against the vocabulary"),
    "crash_negative_id": (400, "the real server dies; ids are checked against the vocabulary"),
    "crash_empty_batch_member": (400, "an empty prompt is refused in a batch as it is alone"),
    "abort_all_batch_victim": (400, "the real server fails with a bare 500 on a list of rids for one prompt"),
    "pause_abort_health": (200, "/health says at once that the process is well, paused or not"),
    "pause_in_place_health": (200, "as above"),
    "pause_retract_health": (200, "as above"),
}
"""Answers that differ on purpose: our status, and the reason."""

OWN_WORDING = {
    "error_hidden_not_enabled": "names what to do here, not SGLang's flags",
    "error_lora_not_enabled": "as above",
    "disk_bad_path": "SGLang asks the Hugging Face hub, the embedded engine reads local folders only",
}


def recording(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    body = loaded["request"]["body"]
    if isinstance(body, dict) and isinstance(body.get("input_ids"), dict):
        ids = body["input_ids"]
        body["input_ids"] = [ids["repeat"]] * ids["count"]
    return loaded


def steady(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make the end token (id 2) improbable, unless the request is about it: no test may end by chance."""
    body = request["body"]
    if not isinstance(body, dict):
        return dict(request)
    changed = dict(body)
    params = body.get("sampling_params")
    if request["path"].startswith("/v1/"):
        changed["logit_bias"] = _biased(body)
        if "tool_choice" in body:  # the grammar ends the answer
            changed["max_tokens"] = 4
    elif isinstance(params, dict):
        changed["sampling_params"] = {**params, "logit_bias": _biased(params)}
    elif isinstance(params, list):
        changed["sampling_params"] = [{**member, "logit_bias": _biased(member)} for member in params]
    elif params is None:
        changed["sampling_params"] = {"logit_bias": _biased({})}
    return {**request, "body": changed}


def _biased(params: Mapping[str, Any]) -> dict[str, float]:
    return {"2": -100.0, **(params.get("logit_bias") or {})}


def names(*prefixes: str) -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json") if file.stem.startswith(prefixes))


def send(
    url: str,
    request: Mapping[str, Any],
    replace: Mapping[str, Any] | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> httpx.Response:
    """Send a recorded request; `replace` changes fields of its body (paths, ports); `arrived` is called with each piece."""
    body = request["body"]
    if isinstance(body, dict):
        body = {**body, **(replace or {})}
    content = None if body is None else body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json", **request.get("headers", {})} if content is not None else {}
    call = {"method": request["method"], "url": request["path"], "content": content, "headers": headers}
    pieces = []
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client, client.stream(**call) as answer:
        for piece in answer.iter_bytes():
            pieces.append(piece)
            arrived()
    return httpx.Response(answer.status_code, headers=answer.headers, content=b"".join(pieces))


class Background:
    """A recorded request in flight: `result()` waits for the answer."""

    def __init__(self, url: str, request: Mapping[str, Any], replace: Mapping[str, Any] | None = None) -> None:
        self._answer: list[httpx.Response] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, request, replace), daemon=True)
        self._thread.start()

    def _run(self, url: str, request: Mapping[str, Any], replace: Mapping[str, Any] | None) -> None:
        self._answer.append(send(url, request, replace, self._begun.set))

    def begun(self) -> None:
        """Wait for the first piece of the answer."""
        assert self._begun.wait(120)

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> httpx.Response:
        self._thread.join(120)
        return self._answer[0]


def check(name: str, answer: httpx.Response) -> None:
    """Compare an answer with the recorded one of the same name."""
    recorded = recording(name)["response"]
    if name in INTENDED:
        assert answer.status_code == INTENDED[name][0], answer.text
        return
    assert answer.status_code == recorded["status"], answer.text
    if recorded["json"] is None and recorded["text"]:
        if recorded["text"].startswith("data: "):
            same_stream(recorded["text"], answer.text)
        else:
            assert answer.text == recorded["text"]
        return
    if recorded["json"] is None:
        return
    assert answer.headers["content-type"] == recorded["content_type"]
    if answer.status_code != 200:
        same_error(name, recorded["json"], answer.json())
    else:
        same(recorded["json"], answer.json())


def same_error(name: str, real: Any, ours: Any) -> None:
    assert ours.keys() == real.keys()
    if real.get("object") == "error":
        pattern = re.compile(r"\d+ validation errors?:\n  \{'type': ")
        assert {**ours, "message": ""} == {**real, "message": ""}
        assert bool(pattern.match(ours["message"])) == bool(pattern.match(real["message"]))
    elif name not in OWN_WORDING:
        assert ours == real


def same_stream(real: str, ours: str) -> None:
    real_events, our_events = events(real), events(ours)
    assert ours.endswith("data: [DONE]\n\n")
    assert our_events
    if "error" in real_events[0]:
        assert our_events == real_events
        return
    same(real_events[0], our_events[0])
    same(real_events[-1], our_events[-1])


def events(text: str) -> list[Any]:
    """Yield the JSON events of a server-sent stream, without the closing [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def same(real: Any, ours: Any, path: str = "") -> None:
    """Compare: the same keys and types everywhere, finish reasons, prompt lengths and array lengths of answers."""
    if isinstance(real, dict):
        assert isinstance(ours, dict), path
        if path.endswith(KEYED_BY_DATA):
            assert bool(ours) == bool(real), path
            return
        if "meta_info" in real:
            same_answer(real, ours)
        wanted = {key for key in real if key not in HOST_ONLY}
        if "num_running_reqs" in real:
            wanted &= LOADS_KEPT
        assert wanted <= ours.keys(), f"{path}: missing {sorted(wanted - ours.keys())}"
        extra = ours.keys() - real.keys() - HOST_ONLY.keys()
        assert not extra, f"{path}: not in the real answer: {sorted(extra)}"
        for key in wanted - {"finish_reason"}:
            same(real[key], ours[key], f"{path}.{key}")
    elif isinstance(real, list):
        assert isinstance(ours, list), path
        if path == "":
            assert len(ours) == len(real)
        assert bool(ours) == bool(real), path
        for one, other in zip(real, ours, strict=False):
            same(one, other, f"{path}[]")
    elif isinstance(real, bool) or real is None or isinstance(real, str):
        assert type(ours) is type(real), f"{path}: {ours!r} beside {real!r}"
    else:
        assert isinstance(ours, int | float), f"{path}: {ours!r} beside {real!r}"


def same_answer(real: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    theirs, meta = real["meta_info"], ours["meta_info"]
    if theirs["finish_reason"] is None or meta["finish_reason"] is None:
        assert theirs["finish_reason"] == meta["finish_reason"] or theirs["completion_tokens"] == 1
    else:
        assert meta["finish_reason"].keys() == theirs["finish_reason"].keys()
        if theirs["finish_reason"]["type"] != "stop" or isinstance(theirs["finish_reason"]["matched"], int):
            assert meta["finish_reason"] == theirs["finish_reason"]
    assert meta["prompt_tokens"] == theirs["prompt_tokens"]
    count = meta["completion_tokens"]
    assert len(ours["output_ids"]) == count
    if "output_token_logprobs" in meta:
        assert [entry[1] for entry in meta["output_token_logprobs"]] == ours["output_ids"]
        assert meta["output_token_logprobs_length"] == count
    spans = meta.get("weight_versions", [])
    assert not spans or (spans[0]["start"] == 0 and spans[-1]["end"] == count)
