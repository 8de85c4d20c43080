"""`RunSettings`: all settings of a run, one section per package, checked together. Precedence: flags, the `--config` file,
a command's presets, defaults. All problems are one `SettingsError`. `check_complete(purpose)` also reports settings that
are missing or have no effect; construction does not, so that settings can be built in parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import click
from pydantic import ValidationError, ValidationInfo, model_validator

from agentrl.algorithms.registry import built_in
from agentrl.config import checks, inapplicable
from agentrl.config.args import Args
from agentrl.config.compat_interface import Part, foreign
from agentrl.config.fields import RENAMED, SECTIONS, Sections, all_fields
from agentrl.config.files import read_file
from agentrl.config.flags import merged, read_flags, read_script
from agentrl.config.model_info import read_model_info
from agentrl.config.problems import Problems, did_you_mean, one_error, sentences
from agentrl.errors import SECRET, SettingsError
from agentrl.settings import Settings, shown
from agentrl.train.megatron.families import FAMILIES

Purpose = Literal["train", "eval", "rollout"]


class RunSettings(Sections):
    """The settings of a run; each section is owned, documented and checked by the package of its name."""

    @model_validator(mode="after")
    def _follow_and_check(self, info: ValidationInfo) -> Self:
        if self.engine.rollout_external_engine_addrs and "engine" not in self.engine.model_fields_set:
            self._fill("engine", engine="external")
        model = read_model_info(self.train.hf_checkpoint)
        known = model is None or model.model_type in (None, *(family.model_type for family in FAMILIES))
        # slime's scripts name megatron for every model.
        if self.train.train_backend == "auto" or (self.compat.slime_defaults and not known):
            self._fill("train", train_backend="megatron" if known and self.cluster.backend != "local" else "fsdp")
        if self.algorithm.needs_length and self.algorithm.loss_max_length is None:
            self._fill("algorithm", loss_max_length=self.rollout.rollout_max_response_len)
        if self.cluster.colocate:
            self._follow_colocate()
        problems = checks.contradictions(self, model)
        if compat := foreign():
            problems += compat.problems(self)
        with info.context or Problems.raised():
            if problems:
                raise one_error(problems)
        batch, steps = checks.steps_and_batch(self)
        self._fill("train", global_batch_size=batch, num_steps_per_rollout=steps)
        if self.train.lora_rank is not None:
            self._follow_adapter()
        if self.cluster.backend == "local":  # trainer and engine share a process, and so its threads
            self._only_by_disk("--backend local")
            threads = self.train.train_threads or self.engine.embedded_threads
            self._fill("train", train_threads=threads)
            self._fill("engine", embedded_threads=threads)
        decided = self.algorithm.use_rollout_logprobs is not None or self.algorithm.supervised
        chosen = built_in(self.algorithm)
        anchored = self.rollout.max_staleness > 0 or (chosen is not None and chosen.anchored_at_rollout)
        if anchored and not decided:
            self._fill("algorithm", use_rollout_logprobs=not self.algorithm.old_is_trainers)
        if self.engine.engine == "sglang" and self.rollout.use_rollout_routing_replay:
            self._fill("engine", sglang_options={"enable_return_routed_experts": True, **self.engine.sglang_options})
        if self.train.true_on_policy_mode:
            self._fill("engine", embedded_deterministic=True)
            most = self.train.ci_train_rollout_logprob_abs_diff_threshold or 0.0
            self._fill("train", share_prefixes=False, ci_train_rollout_logprob_abs_diff_threshold=most)
        if self.data.env_key is None and isinstance(self.rollout.env, dict):
            self._fill("data", env_key="env")
        if self.train.use_pytorch_profiler and self.train.profile_dir is None:
            self._fill("train", profile_dir=f"{self.observability.output_dir}/profile")
        if self.train.record_memory_history and self.train.memory_snapshot_dir is None:
            self._fill("train", memory_snapshot_dir=f"{self.observability.output_dir}/memory")
        details = self.observability.dump_details
        if details is not None and self.observability.save_debug_rollout_data is None:
            kind = "pt" if self.compat.slime_defaults else "jsonl"
            self._fill("observability", save_debug_rollout_data=f"{details}/rollout_data/{{rollout_id}}.{kind}")
        return self

    def _follow_colocate(self) -> None:
        """Offload trainer and engines alternately. SGLang needs start options for this. It does not restore released
        weights by itself. A weight update replaces all weights except an adapter's base and a draft model, so SGLang must
        keep copies of these two in host memory."""
        cluster = self.cluster
        devices = cluster.rollout_num_gpus if "rollout_num_gpus" in cluster.model_fields_set else cluster.world_size
        offload = {name: getattr(cluster, name) is not False for name in ("offload_train", "offload_rollout")}
        self._fill("cluster", rollout_num_gpus=devices, **offload)
        if self.engine.engine == "sglang" and offload["offload_rollout"]:
            given = self.engine.sglang_options
            options = {"enable_memory_saver": True}
            if self.train.lora_rank is not None:
                options["enable_weights_cpu_backup"] = True
            if any(name.startswith("speculative") for name in given):
                options["enable_draft_weights_cpu_backup"] = True
            self._fill("engine", sglang_options={**options, **given})

    def _follow_adapter(self) -> None:
        """Send engines only the adapter, as a folder. SGLang needs start options for LoRA."""
        train = self.train
        self._only_by_disk("--lora-rank")
        if self.engine.engine == "sglang":
            modules = ["all"] if train.target_modules == ("all-linear",) else list(train.target_modules)
            options = {"enable_lora": True, "max_lora_rank": train.lora_rank, "lora_target_modules": modules}
            self._fill("engine", sglang_options={**options, **self.engine.sglang_options})

    def _only_by_disk(self, why: str) -> None:
        if "update_weight_mode" in self.cluster.model_fields_set and self.cluster.update_weight_mode != "disk":
            raise SettingsError(f"{why} sends weights by disk; leave --update-weight-mode out")
        self._fill("cluster", update_weight_mode="disk")

    def _fill(self, section: str, **values: object) -> None:
        """Set derived values without marking them as set by the user."""
        old: Settings = getattr(self, section)
        filled = old.model_copy(update=values)
        filled.__pydantic_fields_set__ -= values.keys() - old.model_fields_set
        self.__dict__[section] = filled

    @classmethod
    def from_flat(
        cls, values: Mapping[str, Any], origins: Mapping[str, str] | None = None, problems: Problems | None = None
    ) -> Self:
        """Build from flat field names; other settings have their defaults. `origins`: for messages, where each value was
        written; by default the flag. `problems`: collects errors instead of raising; invalid settings get their defaults.
        Raises SettingsError: unknown names, wrong types, contradictions."""
        known, wrong = all_fields(), list[str]()
        values = {RENAMED.get(name, name): value for name, value in values.items()}
        for name, value in values.items():
            if name not in known:
                wrong.append(f"unknown setting {name}{did_you_mean(name, known)}")
                continue
            where = (origins or {}).get(name) or known[name].flag
            if isinstance(value, bool) and known[name].kind in (int, float):
                # Pydantic would take `lr: yes` for 1.
                wrong.append(f"{where}: expected {known[name].expected()}; got {value!r}")
            elif SECRET in str(value):
                wrong.append(f"{where}: it was saved without its secret; give {known[name].flag} again")
        parts: dict[str, Settings] = {}
        for section, model in SECTIONS.items():
            own = {k: v for k, v in values.items() if k in known and known[k].section == section}
            try:
                parts[section] = model.model_validate(own)
            except ValidationError as error:
                wrong += sentences(error, known, origins or {})
                bad = {item["loc"][0] if item["loc"] else "" for item in error.errors()}
                if problems is not None:
                    good = {k: v for k, v in own.items() if k not in bad} if bad - {""} else {}
                    parts[section] = model.model_validate(good)
        with problems or Problems.raised():
            if wrong:
                raise one_error(wrong)
        if problems is None:
            return cls.model_validate(parts)
        # Contradictions are reported only if no setting is invalid.
        return cls.model_validate(parts, context=Problems() if problems.any else problems)

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """Build from a YAML or TOML file; `overrides` are flat names and win."""
        return cls.from_parts(overrides, {}, config=path)

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> Self:
        """Build from command-line arguments, `--config FILE` among them."""
        values, origins, rest = read_flags(argv, ("--config", "--slime-script"))
        own = click.Command("", params=[click.Option(["--config"]), click.Option(["--slime-script"])])
        try:
            params = own.make_context("settings", rest).params
        except click.UsageError as error:
            raise SettingsError(error.format_message()) from error
        if script := params["slime_script"]:
            values, origins = merged(read_script(script, values)[:2], (values, origins))
        return cls.from_parts(values, origins, config=params["config"])

    @classmethod
    def from_parts(
        cls,
        values: Mapping[str, Any],
        origins: Mapping[str, str],
        *,
        config: str | Path | None = None,
        presets: Mapping[str, Any] | None = None,
        problems: Problems | None = None,
    ) -> Self:
        """Build from flags, an optional file, and a command's presets, in this precedence. Other arguments and errors are
        those of `from_flat`."""
        low: Part = (presets or {}, {})
        low = low if config is None else merged(low, read_file(config, problems))
        both: Part = merged(low, (values, origins))
        if compat := foreign():
            with problems or Problems.raised():
                both = compat.resolve(*both)
        elif both[0].get("slime_defaults"):
            raise SettingsError("--slime-defaults needs agentrl.compat, which is not installed")
        return cls.from_flat(*both, problems)

    def shown(self) -> dict[str, dict[str, Any]]:
        """Return every setting by section and name as plain JSON, without secrets."""
        dumped = self.model_dump(mode="json")
        return {section: {name: shown(value) for name, value in own.items()} for section, own in dumped.items()}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed settings, by flat name. The copy is checked, and its derived settings are set again."""
        given = self.given()
        return type(self).from_flat({**{n: v for n, v in self.flat().items() if n in given}, **changes})

    @property
    def generates(self) -> bool:
        """True if the run generates trajectories; false if it trains on a dump or on conversations."""
        return self.cluster.load_debug_rollout_data is None and self.data.sft_turns is None

    @property
    def hosted(self) -> bool:
        """True if a hosted model generates, without token ids."""
        return checks.hosts(self)

    @property
    def args(self) -> Args:
        options = {f"sglang_{name}": value for name, value in self.engine.sglang_options.items()}
        return Args({**options, **self.flat(), **self.compat.compat_options})

    def check_complete(self, purpose: Purpose) -> Self:
        """Check that nothing is missing, that each given setting has an effect, and that the run can train. Returns the
        settings. Raises SettingsError: lists settings that are missing, have no effect or contradict others."""
        problems = [*checks.absent(self, purpose), *checks.missing(self, purpose)]
        if not (problems or self.compat.slime_defaults):
            problems += inapplicable.inapplicable(self, purpose)
        if purpose == "train" and not self.cluster.debug_rollout_only:
            problems += checks.untrainable(self)
        if problems:
            raise one_error(problems)
        return self
