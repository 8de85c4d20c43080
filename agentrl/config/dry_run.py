"""`--dry-run`: the resolved settings, and the placement of processes. Imports neither torch nor ray."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from agentrl.config.fields import all_fields
from agentrl.config.settings import Purpose, RunSettings
from agentrl.settings import shown


def show(settings: RunSettings, console: Console | None = None, *, purpose: Purpose = "train") -> None:
    """Print the settings that were given (in bold) or differ from the defaults, and the placement of `purpose`."""
    console = console or Console()
    for text, style in _lines(settings, purpose):
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _lines(settings: RunSettings, purpose: Purpose) -> Iterator[tuple[str, str]]:
    for section, values in settings:
        seen = [(name, value, name in values.model_fields_set) for name, value in values]
        if rows := [row for row in seen if row[2] or row[1] != all_fields()[row[0]].default]:
            yield f"[{section}]", "cyan"
            for name, value, given in rows:
                why = "" if given else "  # follows from the rest"
                yield f"{name} = {render(value)}{why}", "bold" if given else "dim"
            yield "", ""
    yield "[placement]", "cyan"
    yield from ((line, "") for line in describe(settings, purpose))
    yield f"\nThe rest of the {len(all_fields())} settings is as by default; --help-all explains it.", ""


def describe(settings: RunSettings, purpose: Purpose = "train") -> Iterator[str]:
    """Yield the placement in sentences, one per kind of process."""
    train, cluster, rollout = settings.train, settings.cluster, settings.rollout
    if purpose == "train" and not cluster.debug_rollout_only:
        tp, pp, cp = train.tensor_model_parallel_size, train.pipeline_model_parallel_size, train.context_parallel_size
        cut = "" if train.train_backend == "fsdp" else f"TP {tp} x PP {pp} x CP {cp} x "
        nodes, dp = f"{cluster.actor_num_nodes} node(s)", cluster.world_size // train.model_parallel_size
        who = f"trainer: {train.train_backend}, {cluster.world_size} process(es) on {nodes}"
        yield f"{who}, {cut}DP {dp}, device {cluster.device}"
        if own := cluster.critic_world_size:
            yield f"critic: {own} process(es) of its own, DP {own // train.model_parallel_size}, cut as the trainer"
        elif "values" in settings.algorithm.reads:
            yield "critic: in the trainer's processes"
    else:
        yield "trainer: none"
    yield from list(_engine_lines(settings)) or ["engines: none"]
    workers = "1 process" if cluster.rollout_workers == 1 else f"{cluster.rollout_workers} processes"
    yield f"rollout workers: {workers}, up to {rollout.rollout_max_concurrency} trajectories at once"
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    yield (
        f"each of {rollout.num_rollout} rollouts: {rollout.rollout_batch_size} prompts x "
        f"{rollout.n_samples_per_prompt} samples = {samples} trajectories, in {train.num_steps_per_rollout} optimizer "
        f"step(s) of {train.global_batch_size}"
    )


def _engine_lines(settings: RunSettings) -> Iterator[str]:
    engine, each = settings.engine, settings.cluster.rollout_num_gpus_per_engine
    if not settings.generates:
        dump = settings.cluster.load_debug_rollout_data
        yield f"engines: none ({'rollouts come from a dump' if dump else 'conversations are learned from'})"
    elif engine.hosted_name:
        yield f"engine: the hosted model {engine.hosted_name}"
    elif engine.engine == "external":
        for index, address in enumerate(engine.rollout_external_engine_addrs):
            yield f"engine {index}: already running at {shown(address)}"
    else:
        for index in range(settings.cluster.num_engines):
            devices = ", ".join(map(str, range(index * each, (index + 1) * each)))
            where = "in turns with the trainer on its" if settings.cluster.colocate else "on engine"
            yield f"engine {index}: {engine.engine}, {where} devices {devices}"
    for name, said in engine.engine_groups.items():
        where = f"{said} more {engine.engine}" if isinstance(said, int) else f"already running at {shown(said)}"
        yield f"engine group {name}: {where}"


def render(value: Any) -> str:
    """Return a value in the form of a settings file, without secrets."""
    if (value := shown(value)) is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{getattr(k, 'value', k)}={render(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(render, value)) or "none"
    return str(getattr(value, "value", value))
