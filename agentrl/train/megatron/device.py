"""Patches that let megatron.core run without CUDA, Transformer Engine or Apex. `prepare()` must run before process
groups and models are made. It applies only the patches that this machine needs."""

import contextlib
import functools
import importlib
import types
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_FACTORIES = frozenset({"zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like"})
_MODULES = """pipeline_parallel.schedules optimizer.optimizer optimizer.clip_grads optimizer.grad_scaler
    transformer.utils utils models.common.embeddings.rope_utils dist_checkpointing.strategies.state_dict_saver
    dist_checkpointing.exchange_utils tensor_parallel.data distributed.param_and_grad_buffer transformer.moe.moe_utils"""
"""Modules of megatron.core with a literal CUDA device or pinned memory on the training or checkpoint path."""


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Without CUDA, disable `torch.compile` for modules that are imported in this context. Megatron marks many
    functions with it, and the first mark loads inductor, which takes seconds."""
    unchanged: Any = torch.compile if torch.cuda.is_available() else lambda f=None, **_: f or (lambda given: given)
    return patch.object(torch, "compile", unchanged)


@functools.cache
def prepare() -> None:
    """Make megatron.core usable on this machine; idempotent."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # read by `moe_utils`, but missing without Transformer Engine
    if not isinstance(multi_latent_attention.TELinear, type):  # megatron only checks that its own wrapper is importable
        vars(multi_latent_attention)["HAVE_TE"] = False
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        mend_distributed_optimizer(distrib_optimizer.DistributedOptimizer)
    if not torch.cuda.is_available():
        run_without_cuda()


def run_without_cuda() -> None:
    """Replace only behaviour that would raise without CUDA: `device="cuda"` and pinned memory in a few modules, calls
    of devices and streams, `.cuda()`, dtypes by type string, and the random-state tracker."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.synchronize = cuda.current_stream = cuda.default_stream = lambda *_, **__: None
    cuda.current_device = lambda: CPU
    tensor.cuda = lambda self, *_, **__: self
    on_cpu = _TorchOnCpu("torch")
    for name in _MODULES.split():
        vars(importlib.import_module(f"megatron.core.{name}"))["torch"] = on_cpu
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random as megatron_random

    for cls in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        cls.__init__ = _type_names()(cls.__init__)
    # Tensor-parallel ranks need no random states: layers draw no numbers, and other code uses the CPU's generator.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    vars(megatron_random).update(dict.fromkeys(("_get_cuda_rng_state", "_set_cuda_rng_state"), lambda *_, **__: None))
    _patch_experts()
    _patch_uneven()


class _TorchOnCpu(types.ModuleType):
    """`torch` for a few megatron modules: tensors requested on CUDA or in pinned memory are made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in _FACTORIES:
            return found

        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return found(*args, **kwargs)

        return make


def _patch_experts() -> None:
    """Let megatron dispatch tokens to experts without CUDA streams."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def to_host(self: Any, _point: str, tokens_per_expert: Any = None) -> Any:
        for name in ("input_splits", "output_splits"):
            if torch.is_tensor(sizes := getattr(self, name)):
                setattr(self, name, sizes.tolist())
        return tokens_per_expert

    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream, dispatcher._maybe_dtoh_and_synchronize = CPU, to_host


def _patch_uneven() -> None:
    """Gather and scatter parts of unequal sizes by all-to-all, because gloo's own operations need equal sizes."""
    from megatron.core.tensor_parallel import mappings

    evenly, scattered = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(x: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> torch.Tensor:
        ranks = group.size()
        if sizes is None or ranks == 1:
            return evenly(x, group, None, *rest)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        dist.all_to_all_single(out, torch.cat([x] * ranks), sizes, [len(x)] * ranks, group=group)
        return out

    def reduce_scatter(x: torch.Tensor, group: Any, sizes: Any = None, *rest: Any) -> torch.Tensor:
        ranks = group.size()
        if sizes is None or ranks == 1:
            return scattered(x, group, None, *rest)
        own = sizes[group.rank()]
        out = x.new_empty(ranks * own, *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), [own] * ranks, sizes, group=group)
        return out.view(ranks, own, *x.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


@contextlib.contextmanager
def _type_names() -> Iterator[None]:
    """Make `Tensor.type()` return `torch.cuda.XTensor` in this context: the optimizers check dtypes by that string."""
    tensor: Any = torch.Tensor
    original = tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.", 1)

    with patch.object(tensor, "type", named):
        yield


def mend_distributed_optimizer(cls: Any) -> None:
    """Fix three faults of the distributed optimizer's checkpoints with torch's Adam: no state before the first step, no
    `step` in loaded state, and a single `step` tensor."""
    original_state, original_load = cls.state_dict, cls.load_state_dict
    original_set = cls._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            for param in (p for group in self.optimizer.param_groups for p in group["params"]):
                zeros = torch.zeros_like
                state = {"step": torch.tensor(0.0), "exp_avg": zeros(param), "exp_avg_sq": zeros(param)}
                self.optimizer.state[param] = state
        return original_state(self)

    def load_state_dict(self: Any, state: Any) -> None:
        original_load(self, state)
        for entry in self.optimizer.state.values():
            entry["step"] = entry["step"].clone()

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original_set(self, model_param, {"step": state["step"], **tensors})

    cls.state_dict, cls.load_state_dict = state_dict, load_state_dict
    cls._set_main_param_and_optimizer_states = set_states
