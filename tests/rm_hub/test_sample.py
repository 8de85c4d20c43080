from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import RunSettings
from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub import Grade, GraderRunner, RmHubSettings, async_rm, batched_async_rm, final_answer
from agentrl.rm_hub.registry import exhausted, find
from agentrl.rm_hub.running.runner import entered, runner_for, settings_of
from agentrl.sample import Sample

FAULTY = str(Path(__file__).parent.parent / "support" / "faulty_graders.py")


def args(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


async def test_the_reward_is_the_score_and_the_grade_is_kept() -> None:
    sample = Sample(response="The Paris.", label="Paris")
    assert await async_rm(args(rm_type="exact_match"), sample) == 1.0
    kept = sample.metadata["grade"]
    assert (kept["rm_type"], kept["score"], kept["correct"]) == ("exact_match", 1.0, True)
    assert kept["reason"]


async def test_without_a_label_slimes_runs_reward_with_0_and_others_fail() -> None:
    sample = Sample(prompt="1+1?", response="\\boxed{2}")
    assert await async_rm(SimpleNamespace(rm_type="math", slime_defaults=True), sample) == 0.0
    assert sample.metadata["grade"]["reason"] == "there is no label, which slime rewards with 0"
    with pytest.raises(GraderFailure, match="needs a label"):
        await async_rm(SimpleNamespace(rm_type="math"), sample)


async def test_a_sample_may_name_its_own_grader() -> None:
    own = Sample(response=r"\boxed{Paris}", label="Paris", metadata={"rm_type": "boxed_exact_match"})
    assert await batched_async_rm(args(rm_type="exact_match"), [own, Sample(response="Rome", label="Paris")]) == [
        1.0,
        0.0,
    ]
    assert await async_rm(args(), own) == 1.0


async def test_the_last_thing_the_model_said_is_graded() -> None:
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Rome"},
        {"role": "tool", "content": "It is Paris."},
        {"role": "assistant", "content": [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}]},
    ]
    sample = Sample(response="Rome It is Paris. Paris", label="Paris", metadata={"messages": messages})
    assert final_answer(sample) == "Paris"
    assert await async_rm(args(rm_type="exact_match"), sample) == 1.0
    assert final_answer(Sample(metadata={"messages": [{"role": "assistant", "content": None}]})) == ""
    assert final_answer(Sample(response="x")) == "x"


async def test_a_reward_key_makes_it_a_dict() -> None:
    with_parts = f"{FAULTY}:sleeps"
    sample = Sample(response="0")
    assert await async_rm(args(rm_type=with_parts, reward_key="half"), sample) == {"half": 0.5, "score": 1.0}
    assert await async_rm(args(rm_type=with_parts, reward_key=None, eval_reward_key="score"), sample) == {
        "half": 0.5,
        "score": 1.0,
    }
    with pytest.raises(GraderFailure, match="--reward-key hlaf.*half, score") as caught:
        await async_rm(args(rm_type=with_parts, reward_key="hlaf"), sample)
    assert caught.value.kind == "grader_no_reward_key"


async def test_an_answer_that_was_not_judged_has_every_part() -> None:
    data = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    sample = Sample(response="no box", metadata=data)
    assert await async_rm(args(rm_type="boxed_ifbench", reward_key="loose"), sample) == {"loose": 0.0, "score": 0.0}
    assert sample.metadata["grade"]["unjudged"] == "no_box"
    gdpo = args(rm_type="boxed_ifbench", reward_key="score", gdpo_weights={"loose": 1.0, "instruction": 0.5})
    assert await async_rm(gdpo, sample) == {"score": 0.0, "loose": 0.0, "instruction": 0.0}


async def test_an_answer_whose_grader_took_too_long_has_every_part_of_gdpo() -> None:
    class Late(GraderRunner):
        async def grade(self, rm_type: str, response: str, label: Any = None, metadata: Any = None) -> Grade:
            return exhausted(find(rm_type), GraderFailure("late", kind="grader_timeout"))

    gdpo = args(rm_type="math", reward_key="score", gdpo_weights={"score": 1.0, "form": 0.5})
    async with Late() as late:
        with entered(late):
            assert await async_rm(gdpo, Sample(response="2", label="2")) == {"score": 0.0, "form": 0.0}


async def test_in_a_batch_the_others_are_graded_when_one_fails() -> None:
    samples = [Sample(response="a", label=label) for label in ("a", None, "b")]
    with pytest.raises(GraderFailure, match="needs a label"):
        await batched_async_rm(args(rm_type="exact_match", grader_timeout=600.0), samples)
    assert [sample.metadata.get("grade", {}).get("score") for sample in samples] == [1.0, None, 0.0]


async def test_no_grader_and_unknown_graders() -> None:
    with pytest.raises(SettingsError, match="pass --rm-type"):
        await async_rm(args(), Sample(response="a", label="a"))
    with pytest.raises(SettingsError, match="did you mean 'exact_match'"):
        await async_rm(args(rm_type="exact_mach"), Sample(response="a", label="a"))
    with pytest.raises(SettingsError, match="a grader's name"):
        await async_rm(args(), Sample(response="a", label="a", metadata={"rm_type": 3}))


async def test_a_grader_that_overruns_is_a_typed_failure() -> None:
    with pytest.raises(GraderFailure, match="longer than 0.3 s") as caught:
        await async_rm(args(rm_type=f"{FAULTY}:sleeps", grader_timeout=0.3), Sample(response="60"))
    assert caught.value.kind == "grader_timeout"


async def test_graders_that_wait_are_awaited_with_a_deadline() -> None:
    waits = f"{FAULTY}:waits"
    assert await async_rm(args(rm_type=waits), Sample(response="0")) == 1.0
    with pytest.raises(GraderFailure, match="no grade within 0.2 s") as caught:
        await async_rm(args(rm_type=waits, grader_total_timeout=0.2), Sample(response="60"))
    assert caught.value.kind == "grader_timeout"
    with pytest.raises(GraderFailure, match="raised ValueError"):
        await async_rm(args(rm_type=waits), Sample(response="soon"))


async def test_the_runner_of_the_surrounding_code_is_used() -> None:
    async with GraderRunner(RmHubSettings(grader_processes=1)) as runner:
        with entered(runner):
            await async_rm(args(rm_type="exact_match"), Sample(response="a", label="a"))
            assert runner_for(args()) is runner
        assert runner.pool.started == 1
    assert runner_for(args()) is runner_for(args(rm_type="f1"))
    assert runner_for(args(grader_timeout=3.0)) is not runner_for(args())


def test_settings_come_from_the_run_or_from_any_object() -> None:
    run = RunSettings.from_cli(["--grader-timeout", "3", "--grader-processes", "2", "--rm-url", "http://h/"])
    assert (
        settings_of(run.args) == run.rm_hub == RmHubSettings(grader_timeout=3, grader_processes=2, rm_url="http://h/")
    )
    assert settings_of(None) == settings_of(args()) == RmHubSettings()
    with pytest.raises(SettingsError, match="--grader-timeout"):
        settings_of(args(grader_timeout=-1))
