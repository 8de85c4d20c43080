# mypy: ignore-errors
"""Functions as people write them for slime, without any import of agentrl."""

import copy
import json
import os

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.rollout.sglang_rollout import generate as generate_once
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample, sampling_params):
    assert isinstance(sample, Sample)
    assert isinstance(sample.prompt, str)
    assert args.answer_key == "the user's"
    state = GenerateState(args)
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.turns = 0
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        sample.turns += 1
        if turn == 0:
            shown = state.tokenizer("go on", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=shown, trainable=False, text="go on")
    return sample


async def interrupted(args, sample, sampling_params):
    params = {**sampling_params, "ignore_eos": True}
    sample = await generate_once(args, sample, {**params, "max_new_tokens": 3})
    sample.status = Sample.Status.ABORTED
    return await generate_once(args, sample, params)


async def reward(args, sample, **kwargs):
    assert (sample.prompt + sample.response).count("go on") >= 1
    return sample.turns


async def other_reward(args, sample, **kwargs):
    return 7


class Source:
    def __init__(self, args):
        self.args, self.given = args, 0

    def get_samples(self, num_samples):
        groups = [[Sample(prompt=f"prompt {self.given + i}") for _ in range(2)] for i in range(num_samples)]
        self.given += num_samples
        for group in groups:
            for sample in group:
                sample.generate_function_path = f"{__file__}:generate"
                sample.custom_rm_path = f"{__file__}:reward"
            group[1].custom_rm_path = f"{__file__}:other_reward"
        return groups

    def add_samples(self, samples):
        raise AssertionError("the ledger is the buffer")

    def save(self, rollout_id):
        self.saved = rollout_id

    def load(self, rollout_id=None):
        self.given = 2

    def __len__(self):
        return 100


class Inheriting(RolloutDataSource):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        assert all(isinstance(sample.prompt, str) for group in groups for sample in group)
        groups[-1][-1] = copy.deepcopy(groups[-1][0])
        groups[0][0].prompt += "changed"
        return groups


class Saving(RolloutDataSource):
    """Saves itself as slime's sources do."""

    def save(self, rollout_id):
        path = os.path.join(self.args.save, f"rollout/state_{rollout_id}.json")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            json.dump({"position": self.position}, file)

    def load(self, rollout_id=None):
        if self.args.load is None:
            return
        with open(os.path.join(self.args.load, f"rollout/state_{rollout_id}.json")) as file:
            self.position = json.load(file)["position"]


async def each(args, sample, rollout_id, evaluation):
    sample.metadata["hooked"] = [rollout_id, evaluation]


def dynamic_filter(args, samples, **kwargs):
    import torch

    return DynamicFilterOutput(torch.tensor(samples[0].group_index != 0), reason="the first one")


def sample_filter(args, groups):
    args.filtered = len(groups)
    for group in groups:
        group[-1].remove_sample = True


def all_samples(args, all_groups, data_source):
    assert hasattr(data_source, "get_samples")
    args.seen = sum(len(group) for group in all_groups)


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    assert all(isinstance(sample, Sample) for sample in samples)
    assert args.filtered == 2
    assert rollout_time > 0
    rollout_extra_metrics |= {"seen": args.seen, "logged": len(samples)}
    return False


def eval_log(rollout_id, args, data, extra_metrics):
    (found,) = data.values()
    rewards = found["rewards"]
    assert len(rewards) == len(found["truncated"]) == len(found["samples"])
    hooked = [sample.metadata["hooked"] for sample in found["samples"] if "hooked" in sample.metadata]
    assert all(given == [args.rollout_id, True] for given in hooked)
    extra_metrics["mine"] = sum(rewards) / len(rewards)
    return False


def _finished(sample):
    sample.tokens, sample.response_length, sample.response = [5, 6, 7], 2, "ab"
    sample.rollout_log_probs, sample.reward, sample.status = [-1.0, -1.0], 0.5, Sample.Status.COMPLETED
    return sample


def rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        samples = [_finished(Sample(index=0))]
        data = {"mine": {"rewards": [0.5], "truncated": [False], "samples": samples}}
        return RolloutFnEvalOutput(data, metrics={"eval/own": 4})
    first, second, *_ = data_source.get_samples(4)
    played = run(generate_and_rm_group(args, first, GenerateState(args).sampling_params))
    own = [_finished(Sample(index=90 + at)) for at in range(2)]
    data_source.add_samples([second])
    return RolloutFnTrainOutput([played, own], metrics={"rollout/own": 3, "table": object()})


def too_few(args, rollout_id, data_source, evaluation=False):
    data_source.get_samples(1)
    return []


def too_many(args, rollout_id, data_source, evaluation=False):
    return [[_finished(sample) for sample in group] for group in data_source.get_samples(3)]


def twice(args, rollout_id, data_source, evaluation=False):
    group = [_finished(sample) for sample in data_source.get_samples(1)[0]]
    return [group, group]


def until_enough(args, rollout_id, data_source, evaluation=False):
    groups = []
    while len(groups) < args.rollout_batch_size:
        groups += data_source.get_samples(1)
    return [[_finished(sample) for sample in group] for group in groups]


def without_samples(args, rollout_id, data_source, evaluation=False):
    return {"mine": {"rewards": [0.5]}}


def fails(args, rollout_id, data_source, evaluation=False):
    data_source.get_samples(1)
    return 1 / 0


def unrewarded(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(2)
    for sample in copy.copy(groups[0]):
        _finished(sample).reward = None
    return groups


def newest(args, rollout_id, buffer, num_samples):
    chosen = buffer[-num_samples:]
    del buffer[-num_samples:]
    return chosen


def breaks(*values):
    return 1 / 0


async def fails_to_reward(args, sample, **kwargs):
    return None


def divides(args, sample, **kwargs):
    return 1 / 0
