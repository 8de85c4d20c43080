"""Checks of a run's inputs in the calling process, before anything is started. `--dry-run` makes the same checks.

1. Plug-ins are imported and their interfaces checked. Data and evaluation sets are read. Tokenizer, chat template and
   parsers are loaded. External engines are probed. Ports are tried.
2. The models of trainer and engine are built on the meta device, without weights.
3. All errors are raised together. A check that depends on a failed one is skipped. The slow checks of tokenizer and
   models come last, and only if nothing else failed.
4. User code is only imported: no `setup`, `reset` or reward is called, and no data source is built."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio

from agentrl.algorithms.registry import algorithm_of
from agentrl.chat import Chat
from agentrl.chat.chat import load_tokenizer
from agentrl.chat.render_turn import check_calls_are_read
from agentrl.config import Purpose, RunSettings
from agentrl.config.checks import absent
from agentrl.config.model_info import read_model_info
from agentrl.config.problems import Problems, one_error
from agentrl.data.prompts import PromptRow
from agentrl.data.user_source import check_source
from agentrl.dumps import dump_path
from agentrl.engine.hosted import NO_TOKENS
from agentrl.engine.launcher import check_launch
from agentrl.engine.pool import EnginePool
from agentrl.envs import ALONE, AgentEnvironment, EnvClasses, Environment, Environments, command_environment
from agentrl.errors import CheckpointError, DataError, GraderFailure, SettingsError, install, raised_as
from agentrl.modelfolder import check_weights, is_float8, read_config
from agentrl.observability.progress import counted
from agentrl.observability.settings import ObservabilitySettings
from agentrl.plugins import load_object
from agentrl.rm_hub import check_rm_type, grade
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rollout.filters import GroupFilter, load_filter
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.hooks import RolloutHooks, rollout_hooks
from agentrl.rollout.teacher import check_teacher, probe_text, same_vocabulary
from agentrl.run.autoconfig import resolve_device, whole_epochs
from agentrl.run.conversations import check_conversations
from agentrl.run.evalsets import EvalSet, eval_sets, named
from agentrl.run.resuming import check_prompts, covered, refuse_others
from agentrl.runfolder import BELOW, check_writable
from agentrl.settings import flag_of
from agentrl.train.checkpoints import Found, check_critic, check_curve, foreign, latest, torch_dist
from agentrl.train.hooks import hooks_of
from agentrl.train.learning_rate import learning_rate


@dataclass(frozen=True, slots=True)
class Plugins:
    """The user's objects for generation and grading; None if the settings name none."""

    environments: Environments | None = None
    generate: GenerateFunction | None = None
    reward: RewardFunction | None = None
    group_filter: GroupFilter | None = None
    hooks: RolloutHooks = field(default_factory=RolloutHooks)

    @classmethod
    def load(cls, settings: RunSettings, kinds: EnvClasses | None = None) -> "Plugins":
        """Import and check all plug-ins. Without environment or generate function, a trajectory is one answer. `kinds`:
        environment classes of this process so far. Raises PluginError: one cannot be imported, or does not fit."""
        s, problems, found = settings.rollout, Problems(), dict[str, Any]()
        with problems:
            if s.env:
                found["environments"] = Environments.load(s.env, s.env_args, settings.args, kinds)
            elif s.agent:
                kind = command_environment(s.agent, s.agent_sandbox, s.agent_readable)
                found["environments"] = Environments.alone(kind, settings.args)
            elif not s.custom_generate_function_path:
                found["environments"] = Environments.alone(Environment, settings.args)
        loads: dict[str, tuple[str | None, Callable[[str], Any]]] = {
            "generate": (s.custom_generate_function_path, GenerateFunction.load),
            "reward": (s.custom_rm_path, partial(RewardFunction.load, group=s.group_rm)),
            "group_filter": (s.dynamic_sampling_filter_path, load_filter),
        }
        for name, (path, load) in loads.items():
            with problems:
                if path:
                    found[name] = load(path)
        with problems:
            found["hooks"] = rollout_hooks(settings.args)
        problems.raise_all()
        plugins = cls(**found)
        if settings.cluster.rollout_workers > 1 and (name := plugins.hooks.alone):
            raise SettingsError(f"{name} needs all trajectories in one process; leave out --rollout-workers")
        if settings.hosted and plugins.agents:
            said = f"--env {s.env}: an agent program asks the gateway, which needs token ids, and {NO_TOKENS}"
            raise SettingsError(f"{said}; give the program the hosted model's own address, or use another --engine")
        return plugins

    @property
    def agents(self) -> bool:
        """True if agent programs generate trajectories, which needs a gateway."""
        kinds = [entry.kind for entry in (self.environments or {}).values()]
        return bool(self.generate and self.generate.agent) or any(issubclass(k, AgentEnvironment) for k in kinds)


def load_chat(settings: RunSettings) -> Chat:
    s = settings.rollout
    assert settings.train.hf_checkpoint is not None
    return Chat.load(
        settings.train.hf_checkpoint,
        chat_template=s.chat_template_path,
        template_kwargs=settings.data.apply_chat_template_kwargs,
        tool_call_parser=s.tool_call_parser,
        reasoning_parser=s.reasoning_parser,
        template_rewrite_policy=s.template_rewrite_policy,
        image_limits=settings.data.image_limits,
    )


def prepared(
    settings: RunSettings, purpose: Purpose, problems: Problems | None = None
) -> tuple[RunSettings, list[str]]:
    """Return the checked settings of a run, and notes for the user. `purpose`: the kind of the run. `problems`: errors
    of the command line; with any, missing settings are not reported. Raises AgentRLError: a check failed. Its message
    lists all errors with flag, file or line."""
    problems = problems or Problems()
    with problems:
        if not problems.any:
            settings.check_complete(purpose)
        elif found := [*absent(settings, purpose)]:
            raise one_error(found)  # a missing setting may be a flag that was not understood
    alone = purpose == "train" and settings.cluster.debug_rollout_only
    if problems.passed and purpose != "eval":
        with problems:
            settings = whole_epochs(settings, purpose)
    return settings, preflight(settings, "rollout" if alone else purpose, problems)


def preflight(settings: RunSettings, purpose: Purpose, problems: Problems | None = None) -> list[str]:
    """Make all checks that need no started process; return notes for the user. Arguments and errors: see `prepared`."""
    problems, train = problems or Problems(), purpose == "train"
    if train and settings.cluster.backend == "ray" and find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    written: dict[str, str | Path | None] = {"--output-dir": Path(settings.observability.output_dir, BELOW[purpose])}
    if train:
        written["--save-hf"] = settings.train.save_hf and settings.train.save_hf.format(rollout_id=0)
        written |= {"--save": settings.train.save, "--update-weight-disk-dir": settings.cluster.update_weight_disk_dir}
    for flag, folder in written.items():
        with problems:
            if folder:
                check_writable(flag, folder)
    with problems:
        if purpose == "rollout":
            refuse_others(settings)
    if purpose != "eval":
        _check_sinks(settings.observability, problems)
    if model := os.path.isdir(settings.train.hf_checkpoint or "") and not settings.hosted:
        with problems:
            check_model_folder(settings, purpose)
        model = problems.passed
    for check in (_checkpoint, check_prompts) if train else ():
        with problems:
            check(settings)
    notes, stale, algorithm = list[str](), settings.rollout.max_staleness, settings.algorithm
    corrected = algorithm.use_rollout_logprobs or algorithm.old_is_trainers or algorithm.supervised
    if train and stale and not corrected:  # the ratio does not use the sampling log-probs
        notes.append(
            f"--max-staleness {stale} with --no-use-rollout-logprobs and no correction: the loss takes tokens of older weights for "
            "tokens of the newest ones, and training may become unstable; leave the flag out, or add --use-tis"
        )
    notes += _check_played(settings, purpose, model, problems)
    problems.raise_all()
    if train:
        from agentrl.run.training import make_backend

        resolve_device(settings)
        make_backend(settings).check()
    if settings.generates and settings.engine.engine == "embedded":
        from agentrl.engine.embedded.model import check_served

        check_served(str(settings.train.hf_checkpoint), settings.engine.engine_context_length)
    return notes


def _check_sinks(watched: ObservabilitySettings, problems: Problems) -> None:
    """Check that the metrics sinks are installed, without opening them."""
    for name, package, extra in (("use_wandb", "wandb", "wandb"), ("prometheus_port", "prometheus_client", "metrics")):
        with problems:
            if getattr(watched, name) and find_spec(package) is None:
                raise SettingsError(f"{flag_of(name)}: {package} is not installed; {install(extra)}, or leave it out")
    for path in watched.metrics_sinks:
        with problems:
            load_object(path, what="--metrics-sinks")


def _check_played(settings: RunSettings, purpose: Purpose, model: bool, problems: Problems) -> list[str]:
    """Check data, plug-ins, engines, parsers and graders. `model`: the model's folder has passed its checks."""
    template, data = settings.cluster.load_debug_rollout_data, settings.data
    if purpose == "train" and template is not None:
        with problems:
            _dump(template, settings.rollout.num_rollout)
        return []
    if data.sft_turns is not None:
        with problems:
            if model and not problems.any:
                check_conversations(settings, load_chat(settings))
        return []
    with problems:
        if settings.rollout.rm_type is not None:
            check_rm_type(settings.rollout.rm_type, settings.rm_hub)
    plugins, seen, sets = Plugins(), list[FirstRows](), list[EvalSet]()
    with problems:
        plugins = Plugins.load(settings)
    whole = not problems.any  # otherwise a missing part may follow from another error
    with problems:
        if purpose == "train":
            _longest_trajectory(settings, plugins)
    with problems:
        local = purpose == "train" and settings.cluster.backend == "local" and settings.engine.engine == "embedded"
        if whole and not local:
            support, cluster = purpose == "train" and settings.rollout.replays_truncation, settings.cluster
            anyio.run(check_launch, settings.engine, cluster.num_engines, cluster.ray_address is None, support)
    with problems:
        if purpose != "eval" and not any(absent(settings, purpose)):
            seen.append(_training_rows(settings, plugins, whole))
    with problems:
        sets = eval_sets(settings)
    for held_out in sets:
        with problems, named(held_out.where):
            seen.append(_eval_rows(held_out, whole))
            if (
                purpose == "eval" and len(sets) == 1 and data.prompt_data is None
            ):  # others may have a field that it lacks
                held_out.data.check_named()
    with problems:
        if whole and purpose != "eval" and data.prompt_data_check == "full" and data.data_source_path is None:
            used = {name for rows in seen for name in rows.rows}
            names = plugins.environments.names if plugins.environments else ()
            if idle := ", ".join(name for name in names if name not in used):
                raise SettingsError(f"--env {idle}: no row of the data names it; leave it out, or correct the rows")
    told = list[str]()
    with problems:
        if model and not problems.any:
            chat = load_chat(settings)
            if chat.placeholders is None and (row := next((r for rows in seen for r in rows.with_images), None)):
                raise DataError(
                    f"row {row.index + 1} has an image, and --hf-checkpoint {settings.train.hf_checkpoint} sees text only; choose "
                    "a model that sees images, or leave the images out"
                )
            if any(calls_tools(rows) for rows in seen):
                told = check_calls_are_read(chat, settings.rollout.tool_call_parser)
            if purpose != "eval":
                _teacher(settings, chat)
    return list(dict.fromkeys([*told, *(note for rows in seen for note in rows.notes)]))


def check_model_folder(settings: RunSettings, purpose: Purpose) -> None:
    """Check that the model's files are complete. The built-in engine also reads `.bin` files; the trainer does not."""
    assert settings.train.hf_checkpoint is not None
    folder = Path(settings.train.hf_checkpoint)
    has_tokenizer("--hf-checkpoint", folder)
    if is_float8(read_config(folder)) and settings.generates and settings.engine.engine == "embedded":
        raise CheckpointError(
            f"--hf-checkpoint {folder}: its weights are float8, in which the built-in engine does not compute; use --engine "
            f"sglang, or `agentrl convert {folder} DIR --to hf`, which writes it without"
        )
    if purpose == "train" and (kind := settings.engine.sglang_options.get("quantization")):
        said = f"--sglang-quantization {kind}: the trainer sends weights in the form of --hf-checkpoint; leave it out,"
        raise SettingsError(f"{said} and give a folder with float8 blocks of 128 x 128 for float8 engines")
    if purpose == "train" or any(folder.glob("*.safetensors*")):
        check_weights(folder)
    elif settings.engine.engine == "embedded" and not any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder}: no weights in it; expected files like model.safetensors")
    if purpose == "train":
        train, reads = settings.train, settings.algorithm.reads
        if train.save_hf and (made := Path(train.save_hf.format(rollout_id=0))).exists():
            whole = (made / "config.json").is_file()  # a model of ours; one with LoRA has a folder `adapter`
            other = any(not whole or (each.is_dir() and each.name != "adapter") for each in made.iterdir())
            if other or made.resolve() == folder.resolve():
                raise SettingsError(f"--save-hf {train.save_hf}: the model would replace this folder; name a new one")
        _other_model("--load", taken := foreign(train.load))
        stays = train.lora_rank is not None or ("vision_config" in read_config(folder) and not train.train_vision)
        if settings.generates and stays and taken is not None and taken.resolve() != folder.resolve():
            raise SettingsError(
                f"--load {train.load}: engines keep those weights of --hf-checkpoint {folder} that do not learn; give the weights "
                "to start from as --hf-checkpoint (`agentrl convert` makes a folder of a torch_dist checkpoint)"
            )
        _other_model("--ref-load", train.ref_load if "ref_log_probs" in reads else None)
        _other_model("--opd-teacher-load", train.opd_teacher_load if "teacher_log_probs" in reads else None)
        _other_model("--critic-load", train.critic_load if "values" in reads else None)
        algorithm_of(settings.algorithm)
        hooks_of(settings.args)
        if (steps := settings.rollout.num_rollout * train.num_steps_per_rollout - train.actor_starts) > 0:
            learning_rate(steps - 1, train, steps)  # raises if the phases of the schedule do not fit
        if "values" in reads and (steps := steps + train.actor_starts) > 0:
            learning_rate(steps - 1, train.of_critic, steps)
        resumed(settings)


def resumed(settings: RunSettings) -> Found | None:
    """Return the checkpoint to resume from, if any; check it against the algorithm and the learning-rate schedule.
    Raises CheckpointError: the run's checkpoints are gone, or `--load` names one of them that is not the newest."""
    train, rollouts, place = settings.train, settings.rollout.num_rollout, settings.observability.output_dir
    saved = Path(train.save or Path(place) / "checkpoints").expanduser().resolve()
    found, asked = latest(saved), None
    with (
        suppress(CheckpointError) if found else nullcontext()
    ):  # what a run with checkpoints does not read may be damaged
        asked = latest(Path(train.load).expanduser().resolve() if train.load else saved)
    found = found or asked
    if found is None and (count := covered(settings)):
        said = f"no checkpoint in {saved}, and the run in --output-dir {place} has trained {counted(count, 'rollout')}"
        raise CheckpointError(f"{said}; give the folder of its checkpoints as --load, or choose another --output-dir")
    if found is not None and asked not in (None, found) and asked.path.parent == saved:
        said = f"--load {train.load}: the run goes on from its newest checkpoint {found.path}; leave --load out,"
        raise CheckpointError(f"{said} or start a branch with another --output-dir (and --save)")
    if found is not None:
        check_critic(found.path, wanted="values" in settings.algorithm.reads)
        if found.step + 1 < rollouts:
            alone, each = train.actor_starts, train.num_steps_per_rollout
            check_curve(found, train, rollouts * each - alone, max((found.step + 1) * each - alone, 0))
    return found


def has_tokenizer(flag: str, folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        there = "nor config.json; download a model into it, or `agentrl init DIR` makes a tiny one"
        if (folder / "config.json").is_file():
            there = "it has config.json: download the tokenizer too"
        raise SettingsError(f"{flag} {folder}: no tokenizer.json in it, {there}")


def _other_model(flag: str, folder: str | Path | None) -> None:
    with raised_as(CheckpointError, flag, CheckpointError, shown=" {}"):
        if folder is not None and torch_dist(folder) is None:
            check_weights(Path(folder))


def _checkpoint(settings: RunSettings) -> None:
    """Refuse a `--load` folder without a checkpoint: the run would silently start from scratch. If `--save` is the same
    folder, it may be empty, as at the first start of a run."""
    load, save = settings.train.load, settings.train.save
    if load is None:
        return
    same = save is not None and Path(save).expanduser().resolve() == Path(load).expanduser().resolve()
    if foreign(load) is not None:
        if same:
            said = f"--save {save}: the run starts from weights in this folder, and a resume would not find them"
            raise SettingsError(f"{said}; give --save another folder")
        return
    if not same and latest(Path(load).expanduser()) is None:
        said = f"--load {load}: no complete checkpoint in it; correct the path,"
        raise CheckpointError(f"{said} or leave it out to start from --hf-checkpoint {settings.train.hf_checkpoint}")


def _dump(template: str, num_rollout: int) -> None:
    """Check that no rollout after the first dumped one lacks a file. A resumed run may begin at a later rollout."""
    if not (found := {number for number in range(num_rollout) if dump_path(template, number).is_file()}):
        said = f"--load-debug-rollout-data {template}: no file like {dump_path(template, 0)}"
        raise DataError(f"{said}; write one with --save-debug-rollout-data")
    if (missing := min({*range(min(found), num_rollout)} - found, default=None)) is not None:
        raise DataError(
            f"--load-debug-rollout-data {template}: --num-rollout {num_rollout} needs {dump_path(template, missing)}, "
            f"which is not there; set --num-rollout {missing}, or dump more rollouts"
        )


_LABELLED = 8  # rows per environment whose labels are tried
_UNCHANGED = "--custom-generate-function-path slime.rollout.sglang_rollout.generate"


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first row of each environment, the rows whose labels are tried, and the first row with images."""

    plugins: Plugins
    rows: dict[str, PromptRow] = field(default_factory=dict)
    labelled: dict[str, list[PromptRow]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    with_images: list[PromptRow] = field(default_factory=list)
    slime: bool = False  # slime's defaults apply: it sends a text as it is

    def look(self, row: PromptRow) -> str | None:
        """Record a row; return the error if the row names none of several environments."""
        if row.images and not self.with_images:
            self.with_images.append(row)
        environments, name = self.plugins.environments, row.env or row.metadata.get("env")
        if environments is None or not environments.names:
            name = ALONE
        elif problem := environments.unknown(name):
            return f"{problem}; --env-key says which field names it"
        played = self.plugins.generate or self.plugins.hooks.alone.endswith("function_path")
        plain = self.slime and isinstance(row.prompt, str) and not played
        if plain and environments and environments[str(name)].kind is Environment:
            return f"a text is the prompt: add --apply-chat-template, or {_UNCHANGED} to send it without the template"
        self.rows.setdefault(str(name), row)
        first = self.labelled.setdefault(str(name), [])
        if len(first) < _LABELLED and row not in first:  # the first row is passed twice
            first.append(row)
            if row.has_unread_label:
                said = "the rows have a field 'label' that no setting reads, so Sample.label is None"
                self.notes.append(f"{said}; --label-key label reads it")
        return None


def _training_rows(settings: RunSettings, plugins: Plugins, whole: bool) -> FirstRows:
    own_source = settings.data.data_source_path is not None  # it may turn texts into messages
    rows = FirstRows(plugins, slime=settings.compat.slime_defaults and not own_source)
    if own_source and plugins.environments and plugins.environments.names:
        check_source(settings.data)  # the source names the environments
    elif (first := check_source(settings.data, rows.look)) is None:
        if whole and not own_source:
            _check_prompts_are_made(plugins)
    elif problem := rows.look(first):  # the only row that a lazy check reads
        raise DataError(f"--prompt-data {settings.data.prompt_data}: its first row: {problem}")
    elif whole:
        check_graded(settings, rows)
    return rows


def _eval_rows(held_out: EvalSet, whole: bool) -> FirstRows:
    plugins = Plugins.load(held_out.settings) if whole else Plugins()
    rows = FirstRows(plugins, slime=held_out.settings.compat.slime_defaults)
    held_out.data.check(rows.look)
    if whole:
        check_graded(held_out.settings, rows)
    if chosen := held_out.metadata.get("env"):
        rows.rows[chosen] = held_out.data[0]
    return rows


def _check_prompts_are_made(plugins: Plugins) -> None:
    """Check that the environment or the generate function makes prompts, as there is no prompt data."""
    if plugins.environments is None or plugins.generate is not None:
        return
    if plugins.environments.names:
        raise SettingsError("no prompts: with several environments a row says which plays it; give --prompt-data FILE")
    if (kind := plugins.environments[ALONE].kind).reset is Environment.reset:
        said = f"no prompts: {kind.__name__} has no reset method that makes its own"
        raise SettingsError(f"{said}; write one, or give --prompt-data FILE.jsonl")


def calls_tools(first: FirstRows) -> bool:
    """Return true if turns are parsed for tool calls: an environment has tools, or rows do and `step` is its own."""
    plugins = first.plugins
    kinds = [entry.kind for entry in (plugins.environments or {}).values()] if plugins.generate is None else []
    own_steps = any(kind.step is not Environment.step for kind in kinds)
    declared = any(kind.declared_tools(with_sources=False) or kind.tool_sources() for kind in kinds)
    return declared or (own_steps and any(row.tools for row in first.rows.values()))


def _longest_trajectory(settings: RunSettings, plugins: Plugins) -> None:
    """Refuse an overlong penalty that compares multi-turn trajectories with the length limit of one turn."""
    rollout, buffer = settings.rollout, settings.algorithm.overlong_buffer_len
    kinds = [entry.kind for entry in (plugins.environments or {}).values() if entry.kind is not Environment]
    turns = max((rollout.max_turns or kind.max_turns for kind in kinds), default=1)
    if buffer and turns > 1 and "loss_max_length" not in settings.given():
        raise SettingsError(
            f"--overlong-buffer-len {buffer}: trajectories have up to {turns} turns of {rollout.rollout_max_response_len} tokens, and "
            "their whole length counts; set --loss-max-length to the most tokens that the model should write in a trajectory"
        )


def ungraded(settings: RunSettings, plugins: Plugins) -> bool:
    """Return true if no grader is required, and only the row of a sample can name a grader."""
    rollout = settings.rollout
    if settings.algorithm.needs_rewards or rollout.eval_prompt_data or rollout.rm_type or plugins.reward is not None:
        return False
    return all(entry.kind.reward is Environment.reward for entry in (plugins.environments or {}).values())


def teacher_pool(settings: RunSettings) -> EnginePool | None:
    """Return the pool of teacher servers, not yet open; None without `--opd-teacher-url`."""
    urls, model = settings.rollout.opd_teacher_url, read_model_info(settings.train.hf_checkpoint)
    return EnginePool(urls, settings.engine, vocab_size=model.vocab_size if model else None) if urls else None


def _teacher(settings: RunSettings, chat: Chat) -> None:
    """Check that the teacher answers and has the student's vocabulary."""
    model, longest = read_model_info(settings.train.hf_checkpoint), settings.rollout.rollout_max_context_len
    if longest is not None:
        longest += 1  # a server refuses a prompt that fills its context
    elif model is not None:
        longest = model.context_length

    async def asked(pool: EnginePool) -> None:
        async with pool:
            await check_teacher(pool, chat.tokenizer, longest)

    if pool := teacher_pool(settings):
        anyio.run(asked, pool)
    if "teacher_log_probs" in settings.algorithm.reads and (folder := settings.train.opd_teacher_load):
        has_tokenizer("--opd-teacher-load", Path(folder))
        text = probe_text(chat.tokenizer)
        same_vocabulary(chat.tokenizer, text, load_tokenizer(folder)(text)["input_ids"], f"--opd-teacher-load {folder}")


def check_graded(settings: RunSettings, first: FirstRows) -> None:
    """Refuse a run in which no trajectory can get a reward. Runs in which user code may set rewards pass."""
    rm_type, plugins = settings.rollout.rm_type, first.plugins
    if rm_type is not None:
        check_rm_type(rm_type, settings.rm_hub)
    if ungraded(settings, plugins) or plugins.reward is not None or plugins.generate is not None:
        return
    for name, entry in (plugins.environments or {}).items():
        if rm_type and entry.kind.reward is not Environment.reward:
            own = f"{entry.kind.__name__}.reward"
            first.notes.append(f"--rm-type {rm_type}: {own} decides; the grader counts only where that method calls it")
        if (row := first.rows.get(name)) is None:
            continue
        if settings.compat.slime_defaults and _unlabelled(row, rm_type, settings.rm_hub):
            said = f"--rm-type {rm_type} compares with a label, and the prompts have none:"
            first.notes.append(f"{said} every reward is 0, as in slime")
        else:
            _grades(entry.kind, row, rm_type, settings.rm_hub, first.labelled.get(name, ()))


def _unlabelled(row: PromptRow, rm_type: str | None, graders: RmHubSettings) -> bool:
    return row.label is None and rm_type is not None and check_rm_type(rm_type, graders).needs_label


def _grades(
    kind: type[Environment], row: PromptRow, rm_type: str | None, graders: RmHubSettings, labelled: Sequence[PromptRow]
) -> None:
    if any(getattr(kind, name) is not getattr(Environment, name) for name in ("reset", "step", "reward")):
        return
    if not (rm_type := row.metadata.get("rm_type") or rm_type):
        raise SettingsError(
            "nothing gives an answer a reward; pass --rm-type or --custom-rm-path, or play it by --env pkg.mod:Name or "
            "--custom-generate-function-path"
            if kind is Environment
            else f"nothing grades a trajectory: {kind.__name__} has no reward method of its own, nor a step method "
            "that returns Step(reward=...); write one of them, or pass --rm-type or --custom-rm-path"
        )
    if _unlabelled(row, rm_type, graders):
        said = f"--rm-type {rm_type} compares with a label, and the prompts have none"
        raise SettingsError(f"{said}; set --label-key to the data's field")
    if labelled and all(refused := [_refused(rm_type, row) for row in labelled]):
        raise DataError(f"no label of the first {len(labelled)} rows can be graded: {refused[0]}")


def _refused(rm_type: str, row: PromptRow) -> str:
    """Return the error of a built-in grader for the label or metadata of a row; "" if the grader accepts them."""
    if check_rm_type(rm_type).runs != "process" or ":" in rm_type:
        return ""
    try:
        grade(rm_type, "\\boxed{1}", row.label, row.metadata)
    except GraderFailure as failure:
        return str(failure) if failure.kind in ("grader_bad_label", "grader_bad_metadata", "grader_no_label") else ""
    return ""
