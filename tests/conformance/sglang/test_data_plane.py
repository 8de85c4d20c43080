"""Requests that change nothing, replayed one by one."""

import httpx
import pytest

from tests.conformance.sglang.replay import check, names, recording, send, steady
from tests.support.nightly import nightly

PLAIN = (
    "health",
    "health_after",
    "health_generate",
    "ping",
    "root",
    "model_info",
    "get_model_info",
    "v1_loads",
    "flush_cache_get",
    "abort_empty_body",
    "abort_unknown_field",
    "abort_wrong_type",
    "abort_all_batch_victim",
    "w_get_unknown",
)
REPLAYED = names("generate_", "error_", "crash_", "v1_completions", "chat_")
OPENAI = ("/v1/completions", "/v1/chat/completions")
VICTIMS = {"chat_abort", "chat_abort_victim"}
RECORDED = [*PLAIN, *(name for name in REPLAYED if name not in VICTIMS)]


@pytest.mark.parametrize("name", nightly(RECORDED, RECORDED[::3]))
def test_answers_as_recorded(url: str, name: str) -> None:
    request = recording(name)["request"]
    check(name, send(url, steady(request) if request["path"] in ("/generate", *OPENAI) else request))


def test_memory_is_given_back_and_taken_again(url: str) -> None:
    for name in ("release_memory", "release_memory_health", "resume_tags"):
        check(name, send(url, recording(name)["request"]))
    assert httpx.post(f"{url}/resume_memory_occupation", json={}, trust_env=False).json() is None
    for name in ("release_tags", "resume_tags", "after_memory_generate"):
        check(name, send(url, recording(name)["request"]))


def test_prompt_log_probs_are_the_real_servers(url: str) -> None:
    name = "generate_prompt_logprob"
    real = recording(name)["response"]["json"]["meta_info"]["input_token_logprobs"]
    ours = send(url, recording(name)["request"]).json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in ours] == [entry[1] for entry in real]
    assert ours[0][0] is None
    assert [e[0] for e in ours[1:]] == pytest.approx([e[0] for e in real[1:]], abs=0.03)


def test_greedy_tokens_are_the_real_servers(url: str) -> None:
    real = recording("generate_greedy")["response"]["json"]
    ours = send(url, recording("generate_greedy")["request"]).json()
    assert ours["output_ids"][:8] == real["output_ids"][:8]
    pairs = zip(ours["meta_info"]["output_token_logprobs"], real["meta_info"]["output_token_logprobs"], strict=True)
    for (mine, token, _), (theirs, other, _) in pairs:
        assert token == other
        assert mine == pytest.approx(theirs, abs=0.03)


def test_stopped_text_is_trimmed_as_recorded(url: str) -> None:
    for name in ("generate_stop_str", "generate_stop_str_no_trim"):
        answer = send(url, recording(name)["request"]).json()
        matched = answer["meta_info"]["finish_reason"]["matched"]
        assert matched in ("STT", "TTS")
        assert answer["text"].endswith(matched) == (name == "generate_stop_str_no_trim")
        assert len(answer["output_ids"]) >= 3


def test_server_info_names_version_and_state(url: str) -> None:
    info = httpx.get(f"{url}/server_info", trust_env=False).json()
    assert info["version"] == "0.5.23"
    assert info["status"] == "ready"
    assert info["internal_states"][0]["num_running_reqs"] == 0
    assert httpx.get(f"{url}/get_server_info", trust_env=False).json().keys() == info.keys()


def test_tokens_and_text(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        tokens = client.post("/v1/tokenize", json={"model": "m", "prompt": "The quick"}).json()
        assert tokens["count"] == len(tokens["tokens"]) == 2
        ids = recording("generate_plain")["request"]["body"]["input_ids"]
        assert client.post("/v1/detokenize", json={"model": "m", "tokens": ids}).json() == {"text": "!STUVWXY"}
