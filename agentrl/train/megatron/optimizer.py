"""The optimizer: megatron's Adam, or Muon for the hidden matrices with AdamW for the rest. Muon orthogonalises whole
matrices, so the settings refuse it with tensor parallelism or the distributed optimizer."""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.train.megatron.layout import ParallelLayout, alike
from agentrl.train.network import frozen
from agentrl.train.optimizer import Optimizer, decay_groups
from agentrl.train.settings import TrainSettings


def data_parallel(model: torch.nn.Module, config: Any, settings: TrainSettings) -> torch.nn.Module:
    """Wrap the model with megatron's gradient buffers and data-parallel reductions (in float32). With the distributed
    optimizer, gradients are reduced during the last microbatch's backward pass. Weights are not gathered during a
    forward pass (`overlap_param_gather`): the engines get them right after the step."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.use_distributed_optimizer,
        bucket_size=40_000_000 if settings.use_distributed_optimizer else None,  # the same for any number of replicas
        use_distributed_optimizer=settings.use_distributed_optimizer,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    config.no_sync_func = wrapped.no_sync if ddp.overlap_grad_reduce else None
    return wrapped


def sharding(settings: TrainSettings, layout: ParallelLayout) -> dict[str, Any]:
    """Return megatron's options for the state of models and optimizers in checkpoints."""
    return {
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": layout.dp_cp_group,
        "non_homogeneous_layers": bool(frozen(settings)),  # one layer may learn and another one not
    }


class MegatronOptimizer(Optimizer):
    """The optimizer of the wrapped model; `inner` is a megatron optimizer."""

    def __init__(
        self, model: torch.nn.Module, settings: TrainSettings, layout: ParallelLayout, total_steps: int | None
    ) -> None:
        super().__init__(settings, total_steps)
        self.sharding = sharding(settings, layout)
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        config = OptimizerConfig(**alike(settings, OptimizerConfig) | {"optimizer": "adam", "params_dtype": dtype})
        if settings.optimizer == "muon":
            self.inner: Any = _muon(model, settings, config, layout)
        else:
            self.inner = get_megatron_optimizer(config, [model])
        self.parts = [part.optimizer for part in self.inner.chained_optimizers]

    def norm(self) -> float:
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def apply(self, norm: float) -> None:
        most, parts = self.settings.clip_grad, self.inner.chained_optimizers
        gradients = [p.grad for part in parts for p in part.get_parameters() if p.grad is not None]
        if gradients and 0 < most < norm:
            torch._foreach_mul_(gradients, most / (norm + 1e-6))
        self.inner.step_with_ready_grads()

    def state(self, weights: dict[str, Any], *, is_loading: bool, reshardable: bool) -> dict[str, Any]:
        kind = "fully_reshardable" if reshardable else "dp_reshardable"
        metadata = {**self.sharding, "distrib_optim_sharding_type": kind}
        try:
            state: dict[str, Any]
            state = self.inner.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        except AssertionError as error:
            said = f"the optimizer's state has no form that a checkpoint can hold ({error or 'its parts disagree'})"
            raise CheckpointError(f"{said}; earlier checkpoints are whole") from error
        return state

    def take(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            parts = list(state.values()) if len(self.parts) > 1 else [state]
            self._with_steps(parts)
            for part in parts:
                self._with_own_steps(part)
            with torch.no_grad():  # megatron copies into views of the weights
                self.inner.load_state_dict(state)
            return
        for part in self.parts:
            part.state.clear()
        self.inner.reload_model_params()  # copies the loaded weights to the master weights

    @staticmethod
    def _with_own_steps(part: dict[str, Any]) -> None:
        """Set `step` of torch's Adam from its parameter groups: `dp_reshardable` state is stored without it."""
        if part.get("param_state_sharding_type") != "dp_reshardable":
            return
        buffers = [buffer for buffer in part["param_state"].values() if isinstance(buffer, dict)]
        for entry in (e for buffer in buffers for buckets in buffer.values() for bucket in buckets for e in bucket):
            if "step" in entry:
                entry["step"] = torch.tensor(float(part["optimizer"]["param_groups"][0]["step"]))

    @staticmethod
    def _with_steps(parts: list[dict[str, Any]]) -> None:
        """Set missing `common_step` entries. Megatron writes none at step 0, that is, after `reset`. Rank 0 writes none
        for experts if the first stage has no experts."""
        states = [part.get("optimizer", part).get("state", {}) for part in parts]
        counts = [state["common_step"] for state in states if "common_step" in state]
        for state in states:
            if any("exp_avg" in entry for entry in state.values() if isinstance(entry, dict)):
                state.setdefault("common_step", counts[0] if counts else torch.tensor(0.0))


class Muon(torch.optim.Muon):
    """Muon with Newton-Schulz iterations in float32 on a CPU. PyTorch's bfloat16 is ten times slower on most CPUs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with the current gradients; `closure` is not called."""
        for group in self.param_groups:
            momentum, decay = group["momentum"], group["lr"] * group["weight_decay"]
            for weight in (parameter for parameter in group["params"] if parameter.grad is not None):
                buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                buffer.lerp_(weight.grad, 1 - momentum)
                update = _orthogonal(weight.grad.lerp(buffer, momentum), group["ns_coefficients"], group["ns_steps"])
                scale = 0.2 * max(weight.shape) ** 0.5  # AdamW's typical root mean square
                weight.mul_(1 - decay).add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Approximate the orthogonal factor of `matrix` by the quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    found = (matrix.T if tall else matrix).to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def _muon(model: torch.nn.Module, settings: TrainSettings, config: OptimizerConfig, layout: ParallelLayout) -> Any:
    """Return Muon (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the decoder's matrices, as
    megatron fuses them (q, k and v; gate and up). Other parameters go to AdamW. Muon's updates are scaled to AdamW's
    typical size (arXiv:2502.16982), so both can share a learning rate."""
    rest = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    hidden = [name for name, parameter in rest.items() if parameter.dim() == 2 and ".decoder.layers." in f".{name}"]
    matrices = [rest.pop(name) for name in hidden]
    common: dict[str, Any] = {"is_expert_parallel": False, "lr_mult": 1.0, "is_decoupled_lr": False}
    parts = []
    if matrices:
        groups: list[dict[str, Any]] = [{"params": matrices, "wd_mult": 1.0, "muon": True, **common}]
        muon = Muon(groups, lr=settings.lr, weight_decay=0.0)
        parts.append(_wrap(muon, config, layout, "momentum_buffer"))
    adam_groups, betas = decay_groups(rest.values(), muon=False, **common), (settings.adam_beta1, settings.adam_beta2)
    if adam_groups:
        adam = torch.optim.AdamW(adam_groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, weight_decay=0.0)
        parts.append(_wrap(adam, config, layout, "exp_avg", "exp_avg_sq"))
    return ChainedOptimizer(parts)


def _wrap(optimizer: torch.optim.Optimizer, config: OptimizerConfig, layout: ParallelLayout, *state: str) -> Any:
    def init_state(inner: torch.optim.Optimizer, _config: Any = None) -> None:
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {name: torch.zeros_like(parameter.data) for name in state}

    if config.bf16:
        wrapped: Any = Float16OptimizerWithFloat16Params(optimizer, config, None, init_state)
    else:
        wrapped = FP32Optimizer(optimizer, config, init_state)
    wrapped.grad_stats_parallel_group = mpu.get_model_parallel_group()
    wrapped.tp_group = layout.tp_group
    return wrapped
