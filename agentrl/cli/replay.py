"""`agentrl replay`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.settings_command import PlayedCommand, given_names, given_settings
from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from agentrl.runfolder import BELOW, SETTINGS

if TYPE_CHECKING:
    from agentrl.check.replay import ReplayedTrajectory
    from agentrl.groups import Group

_SHOWN = 10
_KEPT = ("rollout", "data", "rm_hub", "compat")


@click.command(
    "replay",
    cls=PlayedCommand,
    params=[
        click.Argument(["folder"], type=click.Path()),
        click.Option(["--kind"], type=click.Choice(["train", "eval", "rollout"]), help="Only what was played for it."),
        click.Option(["--limit"], type=click.IntRange(1), default=1000, help="Newest trajectories. [default: 1000]"),
    ],
)
def command(folder: str, kind: str | None, limit: int) -> int:
    """Score the trajectories of a run again, with a changed grader or environment, and compare.

    FOLDER is a run's. Its settings are taken, and flags change them: --rm-type or --custom-rm-path for another grader;
    an environment is played again as its code is now, with what the model wrote then. Nothing in FOLDER is changed."""
    from agentrl.check.replay import replay
    from agentrl.run.evalsets import REPLACES
    from agentrl.run.preflight import load_chat

    given, stored = given_names(), stored_settings(Path(folder))
    replaced = {old for name in given for old in REPLACES.get(name, ())}
    presets = {name: value for name, value in stored.items() if name not in replaced}
    groups, evaluations = stored_groups(Path(folder), kind, limit)
    if "rm_type" in given:  # replaces the environment's own reward and the rows' graders
        presets["custom_rm_path"] = "agentrl.rm_hub:async_rm"
        for sample in (sample for group in groups for sample in group):
            sample.metadata.pop("rm_type", None)
    if not given.isdisjoint(("rm_type", "custom_rm_path")):  # before a grader that the data source named
        for sample in (sample for group in groups for sample in group):
            sample.custom_rm_path = None
    settings = given_settings(None, presets=presets)
    if evaluations and settings.rollout.eval_config and given.isdisjoint(("rm_type", "custom_rm_path", "env")):
        own = f"the sets of {settings.rollout.eval_config} may have graders and environments of their own"
        raise SettingsError(
            f"{folder}: {own}; leave them out with --kind, or give --rm-type, --custom-rm-path or --env"
        )
    if settings.train.hf_checkpoint is None:
        raise SettingsError("--hf-checkpoint is missing: the trajectories are read with their model's tokenizer")
    show(replay(settings, load_chat(settings), groups, settings.rollout.reward_key, evaluations), settings)
    return 0


def stored_settings(folder: Path) -> dict[str, Any]:
    """Return a run's non-default settings of rollouts and graders. Raises SettingsError: the folder has no run."""
    from agentrl.observability.report import read_settings

    folder = next((at for below in BELOW.values() if ((at := folder / below) / SETTINGS).is_file()), folder)
    if not (folder / SETTINGS).is_file():
        beside = sorted(file.parent.name for file in folder.parent.glob(f"*/{SETTINGS}"))
        there = f"; {folder.parent} has {', '.join(beside)}" if beside else ""
        raise SettingsError(f"{folder}: no run here; give the --output-dir of a run{there}")
    sections = read_settings(folder)
    plain = RunSettings.from_flat({}).shown()
    own = {n: v for s in _KEPT for n, v in sections.get(s, {}).items() if n in plain[s] and v != plain[s][n]}
    return own | {"hf_checkpoint": sections.get("train", {}).get("hf_checkpoint")}


def stored_groups(folder: Path, kind: str | None, limit: int) -> "tuple[list[Group], set[int]]":
    """Return the newest groups of a run, with about `limit` trajectories from each store, and the indices of
    evaluation groups. Raises SettingsError: there are no groups."""
    from agentrl.buffer.reader import Filter, StoreReader, find_stores

    groups: list[Group] = []
    evaluations: set[int] = set()
    for file in find_stores(folder).values():
        with StoreReader(file) as reader:
            rows = reader.query(Filter(equal={"kind": kind} if kind else {}), order="-id", limit=limit)
            for key, played_for in {row.key: row.kind for row in rows}.items():
                if played_for == "eval":
                    evaluations.add(len(groups))
                groups.append(reader.group(key))
    if not groups:
        wanted = f" of kind {kind}" if kind else ""
        raise SettingsError(f"{folder}: no trajectories{wanted} are stored in it; a run keeps --keep-trajectories")
    return groups, evaluations


def show(found: "Sequence[ReplayedTrajectory]", settings: "RunSettings") -> None:
    key = settings.rollout.reward_key
    pairs = [(again, _reward(again, key), again.reward) for again in found]
    both = [(then, now) for _, then, now in pairs if then is not None and now is not None]
    counts = Counter("same" if then == now else "higher" if now > then else "lower" for then, now in both)
    means = [f"{sum(side) / len(both):.4g}" for side in zip(*both, strict=True)]
    said = f"mean reward {', now '.join(means)}" if means else "no reward to compare"
    click.secho(f"{len(found)} trajectories: {said}", bold=True)
    failed, diverged = sum(bool(again.failure) for again in found), sum(bool(again.diverged) for again in found)
    click.echo(f"  {counts['same']} the same, {counts['higher']} higher, {counts['lower']} lower, {failed} failed now")
    click.echo(f"  {sum(bool(again.stopped) for again in found)} stopped for another reason")
    click.echo(f"  {diverged} went another way: the environment, a tool or the template now says something else")
    changed = [pair for pair in pairs if pair[1] != pair[2] or pair[0].failure or pair[0].diverged or pair[0].stopped]
    changed.sort(key=lambda pair: (not pair[0].failure, -abs((pair[1] or 0) - (pair[2] or 0))))
    for again, then, now in changed[:_SHOWN]:
        sample, what = again.stored[0], again.failure or again.diverged or again.stopped
        who = f"group {sample.group_index} sample {sample.index}"
        click.echo(f"  {who}: {then} -> {now}{what and f'; {what:.300}'}")


def _reward(again: "ReplayedTrajectory", key: str | None) -> float | None:
    sample = again.stored[-1]
    return None if sample.reward is None or "failure" in sample.metadata else sample.get_reward_value(key)
