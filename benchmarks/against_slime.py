"""Compare our advantages, losses and weights with slime's own functions, on the cases of the acceptance tests.

    git clone https://github.com/THUDM/slime
    python -m benchmarks.against_slime --slime slime

Prints the table of docs/algorithms.md: for each row the largest difference of a value, and of a gradient by the
log-probs, relative to numbers above 1. slime need not be installed: its `loss.py` is imported from the checkout without
the rest of the package. `torch.compile` is off, and given log-probs replace the model's forward pass.

The cases are limited to what both define alike: log-ratios within 5, samples with a trained token, groups of two or
more with unequal rewards, and no tool tokens if returns run along tokens.
"""

import argparse
import importlib
import itertools
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from agentrl.algorithms import AlgorithmSettings, algorithm_of, compute_advantages
from tests.acceptance.algorithms.cases import Case, case
from tests.acceptance.algorithms.test_against_reference import inputs, view

DEFAULTS: dict[str, Any] = (
    {"advantage_estimator": "grpo", "normalize_advantages": False, "grpo_std_normalization": True, "value_clip": 0.2}
    | {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0}
    | {"use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False, "entropy_coef": 0.0}
    | {"use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None}
    | {"use_opsm": False, "opsm_delta": 1e-4, "get_mismatch_metrics": False, "use_rollout_logprobs": False}
    | {"use_opd": False, "custom_advantage_function_path": None, "calculate_per_token_loss": True}
    | {"rollout_top_p": 1.0, "allgather_cp": False, "qkv_format": "thd"}
)
"""The arguments of slime that its functions read."""


@dataclass(frozen=True)
class Slime:
    """slime's loss module, its reward helper, and arguments for them."""

    loss: Any
    rewards: Any

    @classmethod
    def load(cls, folder: Path) -> "Slime":
        torch._dynamo.config.disable = True
        sys.path.insert(0, str(folder))
        for name in ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils", "slime.rollout"):
            package = ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = package
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        loss = importlib.import_module("slime.backends.megatron_utils.loss")
        loss.mpu.initialize_model_parallel()
        return cls(loss, importlib.import_module("slime.rollout._fanout_test_helpers"))

    def advantages(self, made: Case, args: Namespace) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [N]. Rewards are relative to their group if slime's rollout manager does so."""
        rewards: list[float] = made.rewards.tolist()
        if args.advantage_estimator not in ("ppo", "reinforce_plus_plus"):
            args.grpo_std_normalization &= args.advantage_estimator != "reinforce_plus_plus_baseline"
            samples = [
                SimpleNamespace(group_index=g, get_reward_value=lambda _, r=r: r)
                for g, r in zip(made.groups.tolist(), rewards, strict=True)
            ]
            rewards = self.rewards.grpo_normalize_by_group_index(args, samples)[1]
        data = batch_of(made) | {"rewards": rewards}
        self.loss.compute_advantages_and_returns(args, data)
        return torch.cat(data["advantages"]), torch.cat(data["returns"])

    def policy(self, made: Case, args: Namespace, log_probs: Tensor) -> Tensor:
        """Return the sum over trained tokens of slime's whole policy loss."""
        outputs = {"log_probs": parts(made, log_probs), "entropy": parts(made, torch.zeros_like(log_probs))}
        self.loss.get_log_probs_and_entropy = lambda *_, **__: (None, outputs)
        batch = batch_of(made)
        reducer = self.loss.get_sum_of_sample_mean(
            batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], None, True
        )
        loss, _ = self.loss.policy_loss_function(args, batch, None, reducer)
        return torch.as_tensor(loss)


def parts(made: Case, flat: Tensor) -> list[Tensor]:
    return list(flat.split(made.lengths.tolist()))


def batch_of(made: Case) -> dict[str, Any]:
    arrays = {"log_probs": made.old, "rollout_log_probs": made.rollout, "ref_log_probs": made.ref}
    arrays |= {"values": made.values, "teacher_log_probs": made.teacher, "advantages": made.advantages}
    arrays |= {"returns": made.returns, "loss_masks": made.mask.astype(float)}
    lengths = made.lengths.tolist()
    batch: dict[str, Any] = {name: parts(made, torch.from_numpy(array)) for name, array in arrays.items()}
    total = [n + 3 for n in lengths]
    sums = torch.tensor([float(m.sum()) for m in batch["loss_masks"]])
    return batch | {
        "unconcat_tokens": None,
        "response_lengths": lengths,
        "total_lengths": total,
        "rollout_mask_sums": sums,
    }


def shared(count: int, *, tools: bool) -> Iterator[Case]:
    """Yield cases that both implementations define alike. Without `tools` only trained tokens are kept."""
    found, seeds = 0, itertools.count()
    while found < count:
        made = case(seed := next(seeds))
        sizes = dict(zip(*np.unique(made.groups, return_counts=True), strict=True))
        chosen = np.zeros(len(made.mask), bool)
        alive = np.zeros(len(made.lengths), bool)
        for sample, steps in made.steps():
            alive[sample] = bool(steps) and sizes[made.groups[sample]] > 1
        for sample, positions in made.samples():
            chosen[list(positions)] = alive[sample] & (tools | (made.mask[list(positions)] == 1))
        left = [int(chosen[list(p)].sum()) for s, p in made.samples() if alive[s]]
        rng = np.random.default_rng(seed)
        picked = {
            f.name: getattr(made, f.name)[chosen] for f in fields(made) if len(getattr(made, f.name)) == len(chosen)
        }
        picked |= {"groups": made.groups[alive], "rollouts": np.arange(len(left)), "lengths": np.array(left)}
        made = replace(made, **picked, rewards=rng.normal(size=len(left)))
        near = {
            name: np.clip(getattr(made, name), made.old - 5, made.old + 5)
            for name in ("log_probs", "rollout", "ref", "teacher")
        }
        if sum(left) and (np.unique(made.groups, return_counts=True)[1] > 1).all():
            found += 1
            yield replace(made, **near)


def apart(ours: Tensor, theirs: Tensor, made: Case) -> float:
    difference = (ours - theirs).abs() / theirs.abs().clamp(min=1)
    return float(difference[torch.from_numpy(made.mask) == 1].double().nan_to_num(nan=torch.inf).max())


Settings = dict[str, Any]


@dataclass
class Worst:
    """The largest differences so far."""

    cases: int = 0
    value: float = 0.0
    gradient: float | None = None

    def add(self, value: float, gradient: float | None = None) -> None:
        self.cases += 1
        self.value = max(self.value, value)
        if gradient is not None:
            self.gradient = max(self.gradient or 0.0, gradient)


def estimator(name: str, theirs: Settings | None = None, /, **given: Any) -> "Row":
    """Compare advantages and a critic's targets. `theirs` are slime's arguments with other names or values there."""
    given = {"advantage_estimator": name, "normalize_advantages": False} | given

    def compare(slime: Slime, count: int) -> Worst:
        settings, worst = AlgorithmSettings.model_validate(given), Worst()
        for made in shared(count, tools=name not in ("ppo", "reinforce_plus_plus")):
            args = Namespace(**(DEFAULTS | given | (theirs or {})))
            old, reference = torch.from_numpy(made.old), torch.from_numpy(made.ref)
            kl = slime.loss.compute_approx_kl(old, reference, args.kl_loss_type)
            ours = compute_advantages(replace(inputs(made), kl=kl), settings)
            advantages, returns = slime.advantages(made, args)
            if settings.normalize_advantages:
                n = made.mask.sum()
                advantages = advantages * (n / max(n - 1, 1)) ** 0.5
            targets = None if ours.returns is None else apart(ours.returns, returns, made)
            worst.add(apart(ours.advantages, advantages, made), targets)
        return worst

    return compare


def policy(name: str, theirs: Settings | None = None, /, *, old_is_engines: bool = False, **given: Any) -> "Row":
    """Compare the summed policy loss and its gradient. `theirs` is as in `estimator`; `given` overrides `theirs`."""
    given = {"advantage_estimator": name} | given
    arguments = {"eps_clip_high": given.get("eps_clip", 0.2)} | (theirs or {}) | given

    def compare(slime: Slime, count: int) -> Worst:
        algorithm, worst = algorithm_of(AlgorithmSettings.model_validate(given)), Worst()
        for made in shared(count, tools=True):
            made = replace(made, rollout=made.old) if old_is_engines else made
            totals, gradients = [], []
            for ours in (True, False):
                log_probs = torch.from_numpy(made.log_probs.copy()).requires_grad_()
                if ours:
                    total = (algorithm.token_loss(view(made, log_probs)).loss * torch.from_numpy(made.mask)).sum()
                else:
                    total = slime.policy(made, Namespace(**(DEFAULTS | arguments)), log_probs)
                total.backward()
                assert log_probs.grad is not None
                totals.append(total.detach())
                gradients.append(log_probs.grad)
            value = float((totals[0] - totals[1]).abs() / totals[1].abs().clamp(min=1))
            worst.add(value, apart(gradients[0], gradients[1], made))
        return worst

    return compare


def critic(slime: Slime, count: int) -> Worst:
    algorithm, worst = algorithm_of(AlgorithmSettings.model_validate({"advantage_estimator": "ppo"})), Worst()
    for made in shared(count, tools=True):
        batch, args = batch_of(made), Namespace(**DEFAULTS)
        batch["values"] = parts(made, torch.from_numpy(made.old_values))
        reduce = slime.loss.get_sum_of_sample_mean(
            batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], None, True
        )
        ours, theirs = (torch.from_numpy(made.values.copy()).requires_grad_() for _ in range(2))
        slime.loss.get_values = lambda *_, made=made, theirs=theirs, **__: (None, {"values": parts(made, theirs)})
        total, _ = slime.loss.value_loss_function(args, batch, None, reduce)
        each = algorithm.value_loss(ours, torch.from_numpy(made.old_values), torch.from_numpy(made.returns)).loss
        mine = (each * torch.from_numpy(made.mask)).sum()
        (mine + total).backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        worst.add(
            float((mine - total).detach().abs() / total.detach().abs().clamp(min=1)),
            apart(ours.grad, theirs.grad, made),
        )
    return worst


def weights(per_token: bool) -> "Row":
    """Compare token weights: the gradient of slime's reducer, divided as slime's training step divides it."""

    def compare(slime: Slime, count: int) -> Worst:
        algorithm = algorithm_of(AlgorithmSettings.model_validate({"calculate_per_token_loss": per_token}))
        worst = Worst()
        for made in shared(count, tools=True):
            batch = batch_of(made)
            x = torch.zeros(len(made.mask), dtype=torch.float64, requires_grad=True)
            slime.loss.get_sum_of_sample_mean(
                batch["total_lengths"],
                batch["response_lengths"],
                batch["loss_masks"],
                batch["rollout_mask_sums"],
                per_token,
            )(x).backward()
            assert x.grad is not None
            given = inputs(made)
            ours = algorithm.token_weights(given)
            divisor = made.mask.sum() if per_token else len(made.lengths)
            worst.add(apart(ours, x.grad / divisor, made))
        return worst

    return compare


Row = Callable[[Slime, int], Worst]
KL: Settings = {"kl_coef": 0.1, "kl_loss_type": "k3"}
LOSS_KL: Settings = {"use_kl_loss": True, "kl_loss_coef": 0.5}
TIS: Settings = {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.5}
RS: Settings = {
    "use_rs": True,
    "rs_level": "geometric",
    "rs_lower_bound": 0.5,
    "rs_upper_bound": 2.0,
    "rs_veto_threshold": 0.1,
}
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
CLIPPED: Settings = (
    {"custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"}
    | {
        "tis_level": "token",
        "tis_upper_bound": 3.0,
        "tis_lower_bound": 0.5,
        "tis_batch_normalize": False,
        "tis_mode": "clip",
    }
    | {"use_rs": False, "rs_lower_bound": None, "rs_upper_bound": None}
)
ROWS: dict[str, Row] = {
    "advantages: grpo, gspo, cispo": estimator("grpo"),
    "advantages: Dr. GRPO": estimator("grpo", grpo_std_normalization=False),
    "advantages: grpo, whitened (n - 1 taken out)": estimator("grpo", normalize_advantages=True),
    "advantages: reinforce_plus_plus, KL, gamma .9": estimator("reinforce_plus_plus", **KL, gamma=0.9),
    "advantages: reinforce_plus_plus_baseline": estimator("reinforce_plus_plus_baseline"),
    "advantages and returns: ppo, KL, gamma .9, lambd .8": estimator("ppo", **KL, gamma=0.9, lambd=0.8),
    "advantages: grpo with a teacher": estimator("grpo", use_opd=True, opd_kl_coef=0.1),
    "loss: clip": policy("grpo"),
    "loss: clip-higher, dual clip": policy("grpo", eps_clip_high=0.28, eps_clip_c=3.0),
    "loss: gspo": policy("gspo", eps_clip=0.1),
    "loss: cispo": policy("cispo", eps_clip=1.0, eps_clip_high=4.0),
    **{
        f"loss: clip + KL {kind}": policy("grpo", **LOSS_KL, kl_loss_type=kind)
        for kind in ("k1", "k2", "k3", "low_var_kl")
    },
    "loss: clip + unbiased KL low_var_kl": policy("grpo", **LOSS_KL, kl_loss_type="low_var_kl", use_unbiased_kl=True),
    "loss: TIS": policy("grpo", **TIS),
    "loss: IcePop": policy("grpo", {"custom_tis_function_path": ICEPOP}, **TIS, tis_mode="mask"),
    "loss: TIS and rejection by geometric mean, veto": policy("grpo", CLIPPED, **TIS, **RS),
    "loss: TIS of sequences": policy("grpo", CLIPPED, **TIS, tis_level="sequence"),
    "loss: OPSM": policy("grpo", old_is_engines=True, use_opsm=True, opsm_delta=0.1),
    "value loss": critic,
    "weights: per token": weights(True),
    "weights: per trajectory": weights(False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slime", type=Path, required=True, help="a checkout of slime")
    parser.add_argument("--cases", type=int, default=300)
    args = parser.parse_args()
    slime = Slime.load(args.slime.resolve())
    print("| what | cases | value | gradient (or a critic's targets) |\n|---|---|---|---|")
    for name, compare in ROWS.items():
        worst = compare(slime, args.cases)
        gradient = "" if worst.gradient is None else f"{worst.gradient:.0e}"
        print(f"| {name} | {worst.cases} | {worst.value:.0e} | {gradient} |")


if __name__ == "__main__":
    main()
