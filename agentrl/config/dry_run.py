"""`--dry-run`: the resolved settings, and what will be placed where. Imports neither torch nor ray.

Trainer ranks are numbered in Megatron's order, tensor parallel fastest, then context, data, and pipeline slowest:
`rank = tp + TP * (cp + CP * (dp + DP * pp))`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from agentrl.config.fields import all_fields
from agentrl.config.settings import Purpose, RunSettings
from agentrl.settings import Settings, shown


class TrainerRank(NamedTuple):
    """One trainer process and its coordinates in the parallel layout."""

    rank: int
    node: int
    local: int
    tp: int
    cp: int
    dp: int
    pp: int


def trainer_ranks(settings: RunSettings, purpose: Purpose = "train") -> list[TrainerRank]:
    """The trainer's processes, from arithmetic alone; none where there is no trainer."""
    train, cluster = settings.train, settings.cluster
    if cluster.debug_rollout_only or purpose != "train":
        return []
    tp, cp = train.tensor_model_parallel_size, train.context_parallel_size
    dp = cluster.world_size // train.model_parallel_size
    return [
        TrainerRank(
            *(rank, *divmod(rank, cluster.actor_num_gpus_per_node)),
            *(rank % tp, rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp)),
        )
        for rank in range(cluster.world_size)
    ]


def show(
    settings: RunSettings, console: Console | None = None, *, purpose: Purpose = "train", everything: bool = False
) -> None:
    """Print settings and placement: tables in a terminal, plain lines in a pipe.

    Args:
        purpose: what is to be run.
        everything: all settings; else those that were given, and those that are not as they are by default.
    """
    console = console or Console(highlight=False)
    draw = _show_tables if console.is_terminal else _show_plain
    draw(settings, trainer_ranks(settings, purpose), console, everything)
    if not everything:
        _print(console, f"\nThe rest of the {len(all_fields())} settings is as by default; --dry-run-all prints it.")


def _rows(values: Settings, everything: bool) -> list[tuple[str, Any]]:
    given = values.model_fields_set
    return [(n, v) for n, v in values if everything or n in given or v != all_fields()[n].default]


def _show_tables(settings: RunSettings, trainer: Sequence[TrainerRank], console: Console, everything: bool) -> None:
    for section, values in settings:
        if not (rows := _rows(values, everything)):
            continue
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, render(value), style="bold" if name in values.model_fields_set else "dim")
        console.print(table)
        console.print()
    console.print("Bold: given by you. Dim: what follows from the rest, and defaults.\n")
    console.print("What runs where", style="bold")
    for line in describe(settings, trainer):
        console.print(line, markup=False)
    if len(trainer) > 1:
        ranks = Table("rank", "node", "process", "TP", "CP", "DP", "PP", box=None, header_style="bold")
        for r in trainer:
            ranks.add_row(*map(str, r))
        console.print(ranks)


def _show_plain(settings: RunSettings, trainer: Sequence[TrainerRank], console: Console, everything: bool) -> None:
    for section, values in settings:
        if not (rows := _rows(values, everything)):
            continue
        _print(console, f"[{section}]")
        for name, value in rows:
            follows = "" if value == all_fields()[name].default else "  # follows from the rest"
            why = "" if name in values.model_fields_set else follows or "  # default"
            _print(console, f"{name} = {render(value)}{why}")
        _print(console, "")
    _print(console, "[placement]")
    for line in describe(settings, trainer):
        _print(console, line)
    if len(trainer) > 1:
        for r in trainer:
            where = f"node {r.node} process {r.local}"
            _print(console, f"trainer rank {r.rank}: {where}: tp {r.tp} cp {r.cp} dp {r.dp} pp {r.pp}")


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def describe(settings: RunSettings, trainer: Sequence[TrainerRank]) -> list[str]:
    """The placement in sentences, one a kind of process."""
    train, cluster, rollout = settings.train, settings.cluster, settings.rollout
    lines = []
    if trainer:
        sizes = (train.tensor_model_parallel_size, train.pipeline_model_parallel_size, train.context_parallel_size)
        layout = "TP {} x PP {} x CP {} x DP {}".format(*sizes, cluster.world_size // train.model_parallel_size)
        lines.append(
            f"trainer: {train.train_backend}, {len(trainer)} process(es) on {cluster.actor_num_nodes} node(s), "
            f"{layout}, device {cluster.device}"
        )
        if own := cluster.critic_world_size:
            lines.append(
                f"critic: {own} process(es) of its own, DP {own // train.model_parallel_size}, cut as the trainer"
            )
        elif settings.algorithm.needs_critic:
            lines.append("critic: in the trainer's processes")
    else:
        lines.append("trainer: none")
    lines += list(_engine_lines(settings)) or ["engines: none"]
    lines.append(f"rollout worker: 1 process, up to {rollout.rollout_max_concurrency} trajectories at once")
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    lines.append(
        f"each of {rollout.num_rollout} rollouts: {rollout.rollout_batch_size} prompts x "
        f"{rollout.n_samples_per_prompt} samples = {samples} trajectories, in {train.num_steps_per_rollout} optimizer "
        f"step(s) of {train.global_batch_size}"
    )
    return lines


def _engine_lines(settings: RunSettings) -> Iterator[str]:
    engine, each = settings.engine, settings.cluster.rollout_num_gpus_per_engine
    if not settings.generates:
        dump = settings.cluster.load_debug_rollout_data
        yield f"engines: none ({'rollouts come from a dump' if dump else 'conversations are learned from'})"
    elif engine.engine == "external":
        for index, address in enumerate(engine.rollout_external_engine_addrs):
            yield f"engine {index}: already running at {shown(address)}"
    else:
        for index in range(settings.cluster.num_engines):
            devices = ", ".join(map(str, range(index * each, (index + 1) * each)))
            where = "in turns with the trainer on its" if settings.cluster.colocate else "on engine"
            yield f"engine {index}: {engine.engine}, {where} devices {devices}"


def render(value: Any) -> str:
    """A value as a person would write it in a settings file, without secrets."""
    value = shown(value)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{getattr(k, 'value', k)}={render(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(render, value)) or "none"
    return str(getattr(value, "value", value))
