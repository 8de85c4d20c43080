"""slime's module names resolve to ours, and a function of a file that imports slime gets slime's args and samples."""

from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

from agentrl.compat.modules import names, speaks_slime
from agentrl.compat.sample import SlimeSample
from agentrl.config import RunSettings
from agentrl.errors import PluginError
from agentrl.plugins import is_async, load_object
from agentrl.sample import Sample as Ours
from agentrl.sample import Status


def _file(tmp_path: Path, text: str) -> str:
    (tmp_path / "user.py").write_text(text)
    return str(tmp_path / "user.py")


def test_every_name_of_the_table_resolves(tmp_path: Path) -> None:
    lines = [f"from {m} import {n}" if n != "*" else f"import {m}" for m, all_ in names().items() for n in all_]
    assert load_object(f"{_file(tmp_path, chr(10).join([*lines, 'loaded = 1']))}:loaded", what="x") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import slime.ray.rollout", "no counterpart of slime's module slime.ray"),
        (
            "from slime.utils.misc import Box",
            "no counterpart of slime.utils.misc.Box; of that module it has load_function",
        ),
    ],
)
def test_a_name_that_is_not_there_is_said(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_object(f"{_file(tmp_path, line)}:x", what="x")


def test_lazy_imports_of_slime_and_of_files_beside_resolve_when_the_function_is_called(tmp_path: Path) -> None:
    (tmp_path / "beside_the_user.py").write_text("VALUE = 3\n")
    text = "def f():\n import slime.utils.types as t\n from beside_the_user import VALUE\n return t.Sample, VALUE\n"
    assert load_object(f"{_file(tmp_path, text)}:f", what="x")() == (SlimeSample, 3)


def test_what_counts_is_that_the_file_imports_slime(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(args, sample): return sample\n")
    text = "def f(args, sample):\n from slime.utils.types import Sample\n return sample\n"
    assert speaks_slime(load_object(f"{_file(tmp_path, text)}:f", what="x"))
    assert not speaks_slime(load_object(f"{tmp_path}/own.py:f", what="x"))


def test_args_are_mutable_have_the_users_keys_and_slimes_defaults(tmp_path: Path) -> None:
    text = "import slime\ndef f(args):\n args.calls = getattr(args, 'calls', 0) + 1\n return args\n"
    f = load_object(f"{_file(tmp_path, text)}:f", what="x")
    args = RunSettings().replace(compat_options={"my_key": [1]}, n_samples_per_prompt=3).args
    assert f(args) is f(args)
    found = f(args)
    assert (found.calls, found.my_key, found.n_samples_per_prompt) == (3, [1], 3)
    assert (found.ci_test, found.loss_mask_type) == (False, "qwen")
    with pytest.raises(AttributeError, match="no 'n_sample_per_prompt' .*did you mean n_samples_per_prompt"):
        _ = found.n_sample_per_prompt


def test_samples_go_out_as_slimes_and_come_back_as_ours_with_all_that_was_set(tmp_path: Path) -> None:
    text = (
        "from slime.utils.types import Sample\n"
        "def f(args, samples):\n"
        "    assert all(type(s) is Sample for s in samples)\n"
        "    samples[0].tool_calls = getattr(samples[0], 'tool_calls', 0) + 1\n"
        "    samples[0].remove_sample = True\n"
        "    del samples[1:]\n"
        "    return samples + [Sample(index=9, status='completed')]\n"
    )
    f: Any = load_object(f"{_file(tmp_path, text)}:f", what="x")
    args, group = RunSettings().args, [Ours(index=0, prompt="a"), Ours(index=1)]
    first = group[0]
    for calls in (1, 2):
        kept, new = f(args, group)
        assert kept is first
        assert group == [first]
        assert type(new) is Ours
        assert new.status is Status.COMPLETED
        assert first.remove_sample
        assert first.metadata == {"slime_attributes": {"tool_calls": calls}}


OBJECTS = """
import functools
import slime
class Rewarder:
    def __call__(self, args, sample):
        sample.mark = type(sample).__module__
        return hasattr(args, "sglang_router_request_timeout_secs") or args.ci_test is False
    def plain(self, args, sample):
        return self(args, sample)
    async def later(self, args, sample):
        return self(args, sample)
class Waiting(Rewarder):
    async def __call__(self, args, sample):
        return self.plain(args, sample)
    def plain(self, args, sample):
        return Rewarder.__call__(self, args, sample)
made, waiting = Rewarder(), Waiting()
plain, later = made.plain, made.later
part, other = functools.partial(made.plain), functools.partial(waiting)
kind = Rewarder
"""


@pytest.mark.parametrize("name", ["made", "waiting", "plain", "later", "part", "other"])
async def test_callable_objects_of_slimes_form_get_slimes_args_and_samples(tmp_path: Path, name: str) -> None:
    found: Any = load_object(f"{_file(tmp_path, OBJECTS)}:{name}", what="x")
    sample = Ours(index=0, prompt="a")
    assert is_async(found) == (name in ("waiting", "later"))
    result = found(RunSettings().args, sample)
    assert (await result if isawaitable(result) else result) is True
    assert sample.metadata == {"slime_attributes": {"mark": "agentrl.compat.sample"}}


def test_a_class_stays_the_users(tmp_path: Path) -> None:
    assert isinstance(load_object(f"{_file(tmp_path, OBJECTS)}:kind", what="x"), type)


def test_appending_with_kept_sets_takes_the_log_probs_within_them() -> None:
    sample = SlimeSample(tokens=[1], loss_mask=[])
    meta = {"output_token_sampling_mask": [[5, 6], [7]], "output_token_sampling_logprobs": [-0.5, 0.0]}
    sample.append_response_tokens(tokens=[5, 7], log_probs=[-1.0, -2.0], meta_info=meta)
    sample.append_response_tokens(tokens=[8], trainable=False)
    assert sample.rollout_log_probs == [-0.5, 0.0, 0.0]
    assert list(sample.rollout_top_p_token_ids or ()) == [5, 6, 7]
    assert list(sample.rollout_top_p_token_offsets or ()) == [0, 2, 3, 3]


def test_appending_grows_the_lists_that_user_code_holds_and_keeps_who_wrote_what() -> None:
    sample = SlimeSample(prompt="p", tokens=[1, 2], loss_mask=[])
    mask: Any = sample.loss_mask
    meta = {"finish_reason": {"type": "length"}, "weight_version": "4", "prompt_tokens": 2, "cached_tokens": 1}
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], meta_info=meta, text="ab")
    sample.append_response_tokens(tokens=[7], trainable=False)
    assert mask == [1, 1, 0]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0]
    assert (sample.status, sample.response, sample.prefix_cache_info.prefix_cache_hit_rate) == (
        Status.TRUNCATED,
        "ab",
        0.5,
    )
    plain = sample.plain()
    assert [(s.origin.value, s.version) for s in plain.segments] == [("model", "4"), ("env", None)]
    assert SlimeSample.of(plain) == sample == SlimeSample.from_dict(sample.to_dict())
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 9], 1, [1], [-1.0]
    assert sample.plain().validate().segments == []
    with pytest.raises(ValueError, match="need the log-probs"):
        sample.append_response_tokens(tokens=[1])
