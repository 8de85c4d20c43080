"""Settings of the trainer: checkpoints, batch sizes, optimizer, schedule and parallel layout."""

import os.path
import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.errors import TrainError, raised_as
from agentrl.settings import HomePath, Settings

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
PATTERNS = ("only_train_params_name_list", "freeze_params_name_list")  # settings that freeze parameters of the actor
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]


class TrainSettings(Settings):
    """Training of the model. Names are slime's and Megatron's flags."""

    train_backend: Literal["auto", "megatron", "fsdp"] = "auto"
    """The training backend: megatron, or fsdp for any causal language model of transformers; auto: megatron with Ray
    and a model of its families, else fsdp."""

    hf_checkpoint: HomePath | None = None
    """Hugging Face folder of config, tokenizer and starting weights."""
    ref_load: HomePath | None = None
    """Folder of the reference model: Hugging Face's, or torch_dist; by default the starting weights."""
    opd_teacher_load: HomePath | None = None
    """Hugging Face folder of a teacher with the student's vocabulary, of any size, for use_opd: the trainer holds it
    beside the trained model."""
    ref_update_interval: int | None = Field(None, ge=1)
    """Rollouts between two copies of the weights to the reference model; default: never."""
    load: str | None = None
    """Folder of checkpoints to resume from while --save has none; default: --save. A Hugging Face folder, and checkpoints of another trainer
    (torch_dist), give the weights to start from."""
    save: str | None = Field(None, description="Folder to write checkpoints to; default: checkpoints in --output-dir.")
    save_interval: int | None = Field(10, ge=1)
    """Write a checkpoint every this many rollouts, and at the end."""
    save_hf: str | None = None
    """Folder to write the model to, as a Hugging Face folder, with each checkpoint; {rollout_id} in its name is
    replaced."""
    async_save: bool = False
    """Write checkpoints while the run goes on, from a copy of the trainer's state in host memory. A resume begins from
    the last one that is complete."""
    no_save_optim: bool = False
    """Leave the optimizer's state out of checkpoints; a resume starts with an empty state."""
    reset_optimizer_states: bool = Field(False, description="Forget the optimizer's state after each rollout.")
    keep_checkpoints: int | None = Field(None, ge=1)
    """Keep only this many of the newest checkpoints; default: all."""

    global_batch_size: int | None = Field(None, ge=1)
    """Trajectories per optimizer step; default: a rollout's / num_steps_per_rollout."""
    num_steps_per_rollout: int = Field(1, ge=1, description="Optimizer steps that a rollout's batch is split into.")
    micro_batch_size: int = Field(1, ge=1, description="Samples per microbatch when use_dynamic_batch_size is off.")
    use_dynamic_batch_size: bool = Field(False, description="Pack samples into microbatches by number of tokens.")
    max_tokens_per_gpu: int | None = Field(None, ge=1)
    """Maximum tokens of a packed microbatch on one device; a longer sample is packed alone."""
    share_prefixes: bool = True
    """Compute the common prefixes of a microbatch's samples once: a group's prompt, earlier turns."""
    balance_data: bool = Field(True, description="Spread samples over data-parallel ranks by estimated work.")
    true_on_policy_mode: bool = False
    """Trainer and built-in engine compute the same log-probs to the bit, and a difference ends the run; several times
    slower."""
    ci_train_rollout_logprob_abs_diff_threshold: float | None = Field(None, ge=0)
    """End the run before a step if the log-probs of engine and trainer differ by more than this, in the mean over its
    trained tokens. Default: never, and 0 with true_on_policy_mode."""

    optimizer: Literal["adam", "muon"] = "adam"
    """AdamW; or Muon for matrices and AdamW for the rest."""
    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    muon_lr: float | None = Field(None, ge=0, description="Peak learning rate of the matrices under Muon; default lr.")
    lr_decay_style: DecayStyle = Field("constant", description="Shape of the learning rate after the warm-up.")
    lr_decay_iters: int | None = Field(None, ge=1)
    """Optimizer step where the decay ends; default: the last one."""
    lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    lr_warmup_fraction: float | None = Field(None, ge=0, lt=1)
    """Warm-up as a share of lr_decay_iters, in place of lr_warmup_iters."""
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate of the first step of the warm-up.")
    lr_wsd_decay_iters: int | None = Field(None, ge=1, description="Steps of the final decay of the WSD style.")
    lr_wsd_decay_style: WsdDecayStyle = Field("exponential", description="Shape of the final decay of the WSD style.")
    critic_load: HomePath | None = None
    """Hugging Face folder that PPO's critic starts from, with its value head (score.weight) if it has one. Default: the
    actor's starting weights, with a value head of zeros."""
    critic_lr: float | None = Field(None, ge=0)
    """Peak learning rate of the critic, on the actor's curve; by default 10 times lr."""
    critic_lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of the critic's linear warm-up.")
    num_critic_only_steps: int = Field(0, ge=0, description="Number of first rollouts that train only the critic.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay of matrices.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0 is off.")

    only_train_params_name_list: tuple[str, ...] = Field(())
    """Train only parameters with one of these patterns in their name, megatron's or Hugging Face's."""
    freeze_params_name_list: tuple[str, ...] = Field(())
    """Leave parameters with one of these patterns in their name as they are."""

    lora_rank: int | None = Field(None, ge=1)
    """Train LoRA adapters of this rank in place of the weights; default: train the weights."""
    lora_alpha: float = Field(32.0, gt=0, description="Adapters are scaled by lora_alpha / lora_rank.")
    target_modules: tuple[str, ...] = Field(("all-linear",))
    """Linear layers that get an adapter, by the ends of their names (q_proj v_proj); all-linear: all."""

    tensor_model_parallel_size: int = Field(1, ge=1, description="Devices that share each layer's matrices.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Devices that share the layers.")
    decoder_first_pipeline_num_layers: int | None = Field(None, ge=1)
    """Layers of the first pipeline stage; the other stages share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = Field(None, ge=1, description="Layers of the last pipeline stage.")
    context_parallel_size: int = Field(1, ge=1, description="Devices that share each sequence.")
    expert_model_parallel_size: int = Field(1, ge=1, description="Devices that share a mixture's experts.")
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Devices that share each expert's matrices; by default tensor_model_parallel_size."""
    moe_grouped_gemm: bool = False
    """Compute all experts of a layer in one grouped product, as FSDP always does. By default Megatron computes one
    expert after another."""
    sequence_parallel: bool = Field(False, description="Also split norms and dropout along the sequence over TP.")
    use_distributed_optimizer: bool = Field(False, description="Shard the optimizer state over data-parallel ranks.")
    dist_ckpt_optim_fully_reshardable: bool = False
    """With the distributed optimizer: save its state so that it also loads under other tensor, pipeline and expert
    parallelism. Saving then takes several times the state's memory."""
    train_vision: bool = False
    """With fsdp: train the weights for images as well; by default they stay as they are."""
    fsdp_cpu_offload: bool = False
    """With fsdp: keep weights, gradients and optimizer state in host memory, and step on the CPU."""
    data_parallel_replicate_degree: int = Field(1, ge=1)
    """With fsdp: copies of the sharded model; gradients are summed over them (HSDP)."""

    deterministic_mode: bool = False
    """Use only kernels of PyTorch whose result does not depend on timing; fail if there is none."""
    bf16: bool | None = None
    """Compute in bfloat16 with fp32 master weights; off computes in fp32. Default: on with CUDA, off without."""
    attention_softmax_in_fp32: bool = Field(True, description="Compute the attention softmax in fp32.")
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or attention only."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For full recomputation: equal units of layers (uniform), or only the first layers (block)."""
    recompute_num_layers: int | None = Field(None, ge=1)
    """Layers per unit (uniform), or number of recomputed layers (block)."""

    use_pytorch_profiler: bool = Field(False, description="Write torch's profile of some rollouts' training.")
    profile_step_start: int = Field(10, ge=0, description="The first rollout that is profiled, counted from 0.")
    profile_step_end: int = Field(12, ge=1, description="The rollout before which profiling ends.")
    profile_dir: str | None = Field(None, description="Folder of the profiles; default: profile in --output-dir.")

    record_memory_history: bool = False
    """Record CUDA allocations; if training fails, the error names a snapshot of the memory."""
    memory_snapshot_dir: str | None = None
    """Folder of the snapshots; default: memory in --output-dir."""

    seed: int = Field(1234, ge=0, description="Seed of the trainer's random numbers.")
    train_threads: int | None = Field(None, ge=1)
    """CPU threads of each trainer process; default: an equal share of the cores that nothing else uses."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Collectives between trainer processes; auto is nccl with CUDA and gloo without."""
    distributed_timeout_minutes: int = Field(10, ge=1, description="Minutes after which a collective fails a trainer.")

    @field_validator("save_hf")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        what = f"{pattern!r} may have {{rollout_id}} in braces and nothing else"
        with raised_as(ValueError, what, LookupError, ValueError, shown=""):
            return pattern and pattern.format(rollout_id=0) and os.path.expanduser(pattern)

    @field_validator("only_train_params_name_list", "freeze_params_name_list")
    @classmethod
    def _check_expressions(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            with raised_as(ValueError, f"{pattern!r} is no regular expression", re.error):
                re.compile(pattern)
        return patterns

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := [text for wrong, text in self._problems() if wrong]:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[tuple[object, str]]:
        """Yield each possible mistake: true if it was made, and its message."""
        dynamic, most = self.use_dynamic_batch_size, self.max_tokens_per_gpu
        yield dynamic and most is None, "use_dynamic_batch_size needs max_tokens_per_gpu"
        useless = "max_tokens_per_gpu has no effect without use_dynamic_batch_size; set that too"
        yield most is not None and not dynamic, useless
        for name in ("min_lr", "lr_warmup_init"):
            yield (rate := getattr(self, name)) > self.lr, f"{name} {rate} is above lr {self.lr}"
        start, end = self.profile_step_start, self.profile_step_end
        none = f"profile_step_end {end} must be above profile_step_start {start}"
        yield self.use_pytorch_profiler and end <= start, none
        both = self.lr_warmup_iters and self.lr_warmup_fraction is not None
        yield both, "set lr_warmup_iters or lr_warmup_fraction, not both"
        for name in ("lr_warmup_iters", "critic_lr_warmup_iters"):
            late = self.lr_decay_iters is not None and getattr(self, name) >= self.lr_decay_iters
            yield late, f"{name} {getattr(self, name)} must be below lr_decay_iters"
        endless = self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None
        yield endless, "lr_decay_style WSD needs lr_wsd_decay_iters"
        both = all(getattr(self, name) for name in PATTERNS)
        yield both, f"{' and '.join(PATTERNS)} both say what learns; leave one of them out"
        muon, tp = self.optimizer == "muon", self.tensor_model_parallel_size
        useless = "muon_lr has no effect with optimizer adam; set optimizer to muon"
        yield self.muon_lr is not None and not muon, useless
        cut = "optimizer muon needs whole matrices: set tensor_model_parallel_size and expert_tensor_parallel_size to 1, or use adam"
        yield muon and max(tp, self.expert_tensor_parallel) > 1, cut
        cut = "optimizer muon needs all experts: set expert_model_parallel_size to 1, or use adam"
        yield muon and self.expert_model_parallel_size > 1, cut
        cut = "optimizer muon cannot be sharded: turn use_distributed_optimizer off, or use adam"
        yield muon and self.use_distributed_optimizer, cut
        yield self.sequence_parallel and tp == 1, "sequence_parallel needs tensor_model_parallel_size above 1"
        full, how = self.recompute_granularity == "full", ("recompute_method", "recompute_num_layers")
        lacks = any(getattr(self, name) is None for name in how)
        yield full and lacks, f"recompute_granularity full needs {' and '.join(how)}"
        for name in how:
            yield not full and getattr(self, name) is not None, f"{name} needs recompute_granularity full"
        inexact = (
            "moe_grouped_gemm and true_on_policy_mode: grouped products differ in the last bits; leave one of them out"
        )
        yield self.moe_grouped_gemm and self.true_on_policy_mode, inexact
        always = "attention_softmax_in_fp32 cannot be turned off: torch's attention always works so; leave it out"
        yield not self.attention_softmax_in_fp32, always

    @property
    def of_critic(self) -> "TrainSettings":
        """Return the critic's settings: own peak rate and warm-up, no LoRA, no frozen parameters; all else alike."""
        rate = 10 * self.lr if self.critic_lr is None else self.critic_lr
        scale = rate / self.lr if self.lr else 1.0
        scaled = {name: getattr(self, name) * scale for name in ("min_lr", "lr_warmup_init")}
        muon = None if self.muon_lr is None else self.muon_lr * scale
        warmup = {"lr_warmup_iters": self.critic_lr_warmup_iters, "lr_warmup_fraction": None}
        whole = {**dict.fromkeys(PATTERNS, ()), "lora_rank": None}
        return self.model_copy(update={"lr": rate, "muon_lr": muon, **scaled, **warmup, **whole})

    @property
    def actor_starts(self) -> int:
        """Return the number of the actor's first optimizer step. Before this step only the critic learns."""
        return self.num_critic_only_steps * self.num_steps_per_rollout

    @property
    def own_stages(self) -> dict[str, int]:
        """Return the settings that fix the number of layers of a pipeline stage, by name."""
        names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    def stage_sizes(self, layers: int) -> list[int]:
        """Return the layers of each pipeline stage. Raises TrainError: the model's `layers` cannot be divided so."""
        own, stages = self.own_stages, self.pipeline_model_parallel_size
        rest, others = layers - sum(own.values()), stages - len(own)
        if rest < others or (rest % others if others > 0 else rest or others):
            less = "".join(f", less {size} of --{name.replace('_', '-')}," for name, size in own.items())
            raise TrainError(
                f"--pipeline-model-parallel-size {stages} does not divide the model's {layers} layers{less}"
            )
        sizes = [rest // others] * others if others else []
        first, last = (getattr(self, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
        return [*([first] if first else []), *sizes, *([last] if last else [])]

    @property
    def expert_tensor_parallel(self) -> int:
        """Return `expert_tensor_parallel_size`, by default `tensor_model_parallel_size`."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Return the number of devices per microbatch: TP x PP x CP, or 1 with fsdp, which shards weights alone."""
        if self.train_backend == "fsdp":
            return 1
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
