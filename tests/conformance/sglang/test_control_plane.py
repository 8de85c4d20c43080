"""Abort, pause, weights from disk and over gloo, versions: the recorded scenarios, step by step."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.run.training import free_port
from tests.conformance.sglang.replay import Background, check, events, recording, same, send
from tests.support.nightly import nightly

Step = Callable[..., httpx.Response]
LONG = {"max_new_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def step(url: str) -> Step:
    """Send a recorded request and compare its answer."""

    def run(name: str, **replace: Any) -> httpx.Response:
        answer = send(url, recording(name)["request"], replace)
        check(name, answer)
        return answer

    return run


@pytest.fixture
def long_request(url: str) -> Iterator[Callable[..., Background]]:
    """Start a request of 1500 tokens and wait until it has a slot, or its stream begins. All end with the test."""

    def start(name: str = "", **replace: Any) -> Background:
        body = {"input_ids": [10, 60, 61, 62], "sampling_params": LONG, "return_logprob": True, **replace}
        plain: dict[str, Any] = {"method": "POST", "path": "/generate", "body": body}
        request = recording(name)["request"] if name else plain
        rid = request["body"].get("rid")
        wanted = running(url) + (len(rid) if isinstance(rid, list) else 1)
        background = Background(url, request)
        while running(url) < wanted:
            assert not background.finished
        if request["body"].get("stream"):
            background.begun()
        return background

    yield start
    send(url, {"method": "POST", "path": "/abort_request", "body": {"abort_all": True}})
    send(url, {"method": "POST", "path": "/continue_generation", "body": {}})


def running(url: str) -> int:
    return int(httpx.get(f"{url}/v1/loads", trust_env=False).json()["loads"][0]["num_running_reqs"])


def aborted(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200
    meta: dict[str, Any] = answer.json()["meta_info"]
    assert (
        meta["finish_reason"] == recording("disk_busy_abort_victim")["response"]["json"]["meta_info"]["finish_reason"]
    )
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 0
    return meta


def test_abort_by_rid_keeps_what_was_generated(step: Step, long_request: Callable[..., Background]) -> None:
    victim = long_request(rid="victim-1")
    step("abort_rid")
    same(recording("disk_busy_abort_victim")["response"]["json"], victim.result().json())
    aborted(victim.result())


def test_abort_matches_rids_by_prefix(step: Step, url: str, long_request: Callable[..., Background]) -> None:
    victims = [long_request(rid="grp-1"), long_request(rid="grp-11"), long_request(rid="other")]
    send(url, {"method": "POST", "path": "/abort_request", "body": {"rid": "grp"}})  # no request in flight has this rid
    assert running(url) == 3
    step("abort_prefix")
    assert [aborted(victim.result())["id"] for victim in victims[:2]] == ["grp-1", "grp-11"]
    assert not victims[2].finished
    step("abort_prefix_then_all")
    aborted(victims[2].result())


@pytest.mark.slow
def test_abort_all_ends_a_batch(step: Step, long_request: Callable[..., Background]) -> None:
    victim = long_request(input_ids=[[10, 60], [10, 61]], rid=["b-1", "b-2"])
    step("abort_all")
    reasons = [member["meta_info"]["finish_reason"]["type"] for member in victim.result().json()]
    assert reasons == ["abort", "abort"]


def test_abort_ends_a_stream_with_a_last_chunk(step: Step, long_request: Callable[..., Background]) -> None:
    victim = long_request("abort_stream_victim")
    step("abort_stream")
    answer = victim.result()
    check("abort_stream_victim", answer)
    assert events(answer.text)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.slow
def test_abort_ends_a_chat(step: Step, long_request: Callable[..., Background]) -> None:
    victim = long_request("chat_abort_victim")
    step("chat_abort")
    check("chat_abort_victim", victim.result())
    assert victim.result().json()["choices"][0]["finish_reason"] == "abort"


def test_flush_waits_for_idle(step: Step, long_request: Callable[..., Background]) -> None:
    long_request(rid="z-1")
    step("flush_cache_busy")
    step("flush_cache_busy_timeout")
    step("abort_z")


@pytest.mark.parametrize("mode", nightly(["abort", "in_place", "retract"], ("retract",)))
def test_pause_update_continue(
    mode: str, step: Step, url: str, models: tuple[Path, Path], long_request: Callable[..., Background]
) -> None:
    step("version_set")
    victim = long_request(rid=f"p-{mode}")
    step(f"pause_{mode}")
    late = Background(url, recording("pause_abort_late_request")["request"])
    step(f"pause_{mode}_health")
    if mode == "retract":
        step("pause_retract_flush")
    if mode == "in_place":
        assert send(url, {"method": "POST", "path": "/flush_cache", "body": None}).status_code == 400
    if mode == "abort":
        step("pause_abort_set_version")
    else:
        step(f"pause_{mode}_update_disk", model_path=str(models[1]))
    assert not late.finished
    assert victim.finished == (mode == "abort") or victim.result()
    step("continue_abort")
    assert late.result().json()["meta_info"]["weight_versions"][0]["version"] == f"v-{mode}"
    meta = victim.result().json()["meta_info"]
    if mode == "abort":
        aborted(victim.result())
        return
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans] == ["42", f"v-{mode}"]
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == meta["completion_tokens"] == 1500
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert meta["weight_version"] == f"v-{mode}"
    if mode == "retract":
        same(recording("pause_retract_victim")["response"]["json"], victim.result().json())


def test_pause_and_continue_are_idempotent(step: Step) -> None:
    for name in ("continue_twice", "pause_default", "pause_again", "continue_again"):
        step(name)


def test_weights_from_disk(step: Step, models: tuple[Path, Path]) -> None:
    step("disk_model_b", model_path=str(models[1]))
    b = step("disk_generate_b").json()
    assert b["output_ids"] == recording("disk_generate_b")["response"]["json"]["output_ids"]
    step("disk_model_a", model_path=str(models[0]), load_format="auto")
    a = step("disk_generate_a").json()
    assert a["output_ids"] == recording("disk_generate_a")["response"]["json"]["output_ids"]
    info = step("disk_model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(models[0]), "7")
    step("disk_bad_path")
    step("disk_bad_type")
    step("disk_health_after_bad")
    assert step("disk_generate_a").json()["output_ids"] == a["output_ids"]


@pytest.mark.slow
def test_an_unpaused_update_waits_or_aborts(
    step: Step, models: tuple[Path, Path], long_request: Callable[..., Background]
) -> None:
    victim = long_request(rid="d-2")
    step("disk_while_busy_abort_all", model_path=str(models[0]))
    check("disk_busy_abort_victim", victim.result())
    aborted(victim.result())


def test_versions_and_checksums(step: Step) -> None:
    step("version_set")
    step("version_int")
    step("version_missing")
    assert step("version_generate").json()["meta_info"]["weight_version"] == "42"
    first, second = step("weights_checker").json(), step("weights_checker").json()
    assert first == second


def test_weights_over_gloo(step: Step, url: str, models: tuple[Path, Path]) -> None:
    from safetensors.torch import load_file
    from torch.distributed import broadcast, destroy_process_group

    from agentrl.numerics.weight_group import join_group

    state = load_file(models[1] / "model.safetensors")
    step("w_dist_no_group")
    port = free_port()
    joined: list[Any] = []
    address = f"tcp://127.0.0.1:{port}"
    trainer = threading.Thread(
        target=lambda: joined.append(
            join_group(
                backend="gloo", address=address, world_size=2, rank=0, name="slime", timeout=timedelta(seconds=30)
            )
        ),
        daemon=True,
    )
    trainer.start()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    body |= {"group_name": "slime", "backend": "gloo"}
    answer = send(url, {"method": "POST", "path": "/init_weights_update_group", "body": body})
    assert answer.json() == {"success": True, "message": "Succeeded to initialize custom process group."}
    trainer.join(120)
    step("w_begin")
    step("w_begin_twice")
    update = Background(
        url,
        recording("w_dist_update")["request"],
        {
            "names": list(state),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in state.values()],
            "shapes": [list(t.shape) for t in state.values()],
        },
    )
    for tensor in state.values():
        broadcast(tensor, 0, group=joined[0])
    check("w_dist_update", update.result())
    step("w_t_end")
    step("w_end_twice")
    assert step("w_model_info_after_dist").json()["weight_version"] == "dist-1"
    generated = send(url, recording("disk_generate_b")["request"]).json()
    assert generated["output_ids"] == recording("disk_generate_b")["response"]["json"]["output_ids"]
    done = {"method": "POST", "path": "/destroy_weights_update_group", "body": {"group_name": "slime"}}
    assert send(url, done).status_code == 200
    step("w_destroy_group_again")
    destroy_process_group(joined[0])
    step("disk_model_a", model_path=str(models[0]))


def test_pickled_tensors_are_refused(step: Step, url: str) -> None:
    step("w_tensor_outside_session")
    step("w_t_begin")
    answer = send(url, recording("w_tensor_empty")["request"])
    step("w_t_end")
    assert answer.status_code == 400
    assert "pickle" in answer.json()["message"]
