"""Plays every script alone, again, concurrently and cancelled, and checks the properties that a run needs. Tests that
are skipped, for lack of time or because the plain episodes fail, are listed."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from agentrl.chat import Chat
from agentrl.check.findings import Finding, Prover, summed
from agentrl.check.harness import Episode, Harness, users_code
from agentrl.check.observer import Observer
from agentrl.check.policy import FromFile, Live, Person, Scripted
from agentrl.check.script import ANSWERS, WRONG, Lines, Script, scripts
from agentrl.clock import Tell, Watchdog
from agentrl.config import RunSettings
from agentrl.envs import Environment
from agentrl.errors import Failure, SettingsError
from agentrl.rollout.user_tasks import UserTasks
from agentrl.stalls import Cause

STALL = 0.3  # seconds for which user code may block the event loop


@dataclass(slots=True)
class CheckedPlay:
    """The episodes that were played, and the findings."""

    found: list[Finding] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    rows: int = 0  # prompts to play, one episode each; 0 if scripts play

    @property
    def problems(self) -> list[Finding]:
        """The findings that make the check fail, each once."""
        return [found for found, _ in summed(self.found) if not found.note]

    @property
    def shown(self) -> Episode | None:
        """The episode to show to the user: with a tool call if there is one."""
        whole = [episode for episode in self.episodes if episode.samples]
        return max(whole, key=lambda e: (e.name.startswith("calls "), e.name in ANSWERS), default=None)


async def play(
    settings: RunSettings,
    chat: Chat,
    seconds: float,
    played: CheckedPlay,
    stuck: Callable[[], None],
    show: Callable[[Harness, Episode | None], None],
    live: Live | Sequence[Lines] | None = None,
) -> None:
    """Play all episodes and record them in `played`. `seconds`: time for episodes; between two turns an environment may
    take a third of it. `stuck`: called in a thread if user code blocks the event loop that long. `show`: called for
    each environment, with the episode to show, before its teardown. `live`: plays one episode per row instead of the
    scripts; or the episodes of a `--play` file."""
    lines = live if isinstance(live, Sequence) else ()
    try:
        async with Harness.opened(settings, chat, seconds / 3, most=len(lines) or None) as stages:
            if lines and len(stages) > 1:
                raise SettingsError("--play FILE plays one environment; name it instead of the run's several")
            for stage in stages:
                here = CheckedPlay(played.found)
                if stage.ungraded:
                    played.found.append(Finding(stage.ungraded, note=stage.made_up))
                director = _Director(stage, seconds / len(stages), here)
                if lines:
                    await director.file(lines)
                else:
                    await (director.live(live) if callable(live) else director.play(stuck))
                for episode in here.episodes if live else [here.shown]:
                    show(stage, episode)
                played.episodes += here.episodes
                played.untried += here.untried
                played.rows += here.rows
    except Failure as error:
        played.found.append(Finding(str(error)))


class _Director:
    def __init__(self, stage: Harness, seconds: float, played: CheckedPlay) -> None:
        self.stage, self.played, self._until = stage, played, time.monotonic() + seconds
        plugins, rm_type, kind = stage.plugins, stage.settings.rollout.rm_type, stage.kind
        own = kind is not None and kind.reward is not Environment.reward
        grades = f"{stage.user}.reward" if own else f"--rm-type {rm_type}" if rm_type else f"{stage.user}.step"
        grades = plugins.reward.name if plugins.reward else grades
        key = stage.settings.rollout.reward_key
        self._prover = Prover(stage.chat, stage.user, kind is not None, grades, stage.patience, key)
        self._scripts = [scripts(stage.chat, sample, stage.tools) for sample in stage.rows]
        self._blocked, self._observer = dict[str, list[float]](), Observer()

    async def play(self, stuck: Callable[[], None]) -> None:
        kind: type[Environment] = self.stage.kind or type("Nobody", (Environment,), {})
        stalls, followed = Watchdog.watching(STALL, self._stalled(stuck)), UserTasks.followed()
        with stalls, followed as self._user_tasks, self._observer.watching(kind):
            alone = await self._alone()
            self._find(*self._prover.of_tools(kind.declared_tools()), *self._observer.findings, *self._blocks())
            if not self.stage.ungraded:
                self._find(*self._prover.of_rewards(alone))
            await self._more(alone)
        self._find(*self._observer.findings, *self._blocks())

    async def live(self, make: Live) -> None:
        self.played.rows = len(self.stage.rows)
        for row in range(self.played.rows):
            policy = make(self.stage.chat, self.stage.tools)
            episode = await self.stage.play(f"plays prompt {row + 1}", policy, row)
            if isinstance(policy, Person) and policy.left:
                return
            self._note(episode)

    async def file(self, episodes: Sequence[Lines]) -> None:
        if len(episodes) > (rows := len(self.stage.rows)):
            raise SettingsError(f"{episodes[rows].name}: no prompt for it: the data has {rows}; an episode takes one")
        self.played.rows = len(episodes)
        for row, lines in enumerate(episodes):
            policy = FromFile(self.stage.chat, self.stage.tools, lines)
            episode = self._note(await self.stage.play(f"plays {lines.name}", policy, row))
            sample = next(iter(episode.samples), None)
            if sample is not None and "failure" not in sample.metadata:
                reward = sample.get_reward_value(self.stage.settings.rollout.reward_key)
                self._find(*map(Finding, policy.wrong(reward)))

    def _find(self, *found: Finding) -> None:
        self.played.found += found

    def _stalled(self, stuck: Callable[[], None]) -> Tell:
        def tell(seconds: float, who: str, where: str) -> None:
            if who not in get_args(Cause) and users_code(where):  # a busy machine is not a finding
                self._blocked.setdefault(f"{who.partition(' (')[0]} ({where})", []).append(seconds)
                if seconds > self.stage.patience:
                    self._find(*self._blocks())
                    stuck()

        return tell

    def _blocks(self) -> Iterator[Finding]:
        """Yield findings on code that blocks the event loop; a short block that occurs once may be a busy machine."""
        for where, times in self._blocked.items():
            if len(times) > 1 or max(times) > 2 * STALL:
                what = f"{where} blocks the event loop, and with it all other trajectories: await slow calls, or run them in a thread"
                yield Finding(f"{what} (anyio.to_thread.run_sync)", f"for {max(times):.1f} s")

    async def _script(self, script: Script, row: int = 0, size: int = 1, cancelled: str = "") -> Episode:
        return self._note(await self.stage.play(script.name, Scripted(self.stage.chat, script), row, size, cancelled))

    def _note(self, episode: Episode) -> Episode:
        self.played.episodes.append(episode)
        self._find(*self._prover.of_episode(episode))
        return episode

    async def _alone(self) -> list[Episode]:
        """Play every script on the first row and the plain answers on other rows, one episode at a time."""
        episodes: list[Episode] = []
        left, close = _Left(self._user_tasks), self._prover.where("close")
        every = [(row, script) for row, own in enumerate(self._scripts) for script in own]
        todo = [(row, script) for row, script in every if row == 0 or script.name in (WRONG, *ANSWERS)]
        for number, (row, script) in enumerate(todo):
            if time.monotonic() > self._until or any(e.stuck or e.lost for e in episodes) or any(self._blocks()):
                self.played.untried += [", ".join(dict.fromkeys(script.name for _, script in todo[number:]))]
                break
            episodes.append(await self._script(script, row))
            self._find(*left.running())
        self._find(*left.growth(len(episodes), close))
        return episodes

    async def _more(self, alone: Sequence[Episode]) -> None:
        """Try further episodes, as long as no problem was found."""
        first = self._scripts[0]
        calling = next((script for script in first if script.name.startswith("calls ")), first[0])
        ordered = [(episode, script) for episode, script in zip(alone, first, strict=False) if script.ordered]

        async def again() -> None:
            for episode, script in ordered:
                self._find(*self._prover.of_pair(episode, await self._script(script), "alone"))

        async def together() -> None:
            self._observer.alone = False
            episodes = await asyncio.gather(*(self._script(script) for _, script in ordered))
            for (one, _), two in zip(ordered, episodes, strict=True):
                self._find(*self._prover.of_pair(one, two, "beside others"))

        async def group() -> None:
            self._find(*self._prover.of_group(await self._script(first[0], size=2)))

        async def cancelled(waits: int) -> None:
            script = replace(calling, name="is cancelled", waits=waits)
            await self._script(script, cancelled="waiting" if waits else "answered")

        async def held() -> None:
            if self.stage.kind is not None and self.stage.kind.when_interrupted != "keep":
                await self._script(replace(calling, name="is held", holds=len(calling.turns)))

        tries = {
            "the same once more": again,
            "cancelled in the environment": lambda: cancelled(0),
            "cancelled while the model writes": lambda: cancelled(len(calling.turns)),
            "two samples of a group": group,
            "side by side": together,
            "held between two rollouts": held,
        }
        for name, attempt in tries.items():
            if self.played.problems or time.monotonic() > self._until:
                self.played.untried.append(name)
            else:
                await attempt()


class _Left:
    """Leftovers of episodes: tasks of the user's code, threads, open files, processes."""

    def __init__(self, tasks: UserTasks) -> None:
        self._tasks, self._first = tasks, dict[str, int]()

    def running(self) -> Iterator[Finding]:
        self._first = self._first or _counts()
        for what, where in self._tasks.left():
            yield Finding(f"{what} leaves a task running that it started at {where}: cancel and await it in `close`")

    def growth(self, episodes: int, close: str) -> Iterator[Finding]:
        """Yield findings on leftovers that grow with every episode but the first."""
        gc.collect()
        for name, count in _counts().items():
            if episodes > 3 and count - self._first.get(name, count) >= episodes - 1:
                yield Finding(f"{close} leaves {name} behind, with every episode: close what `reset` or `step` opens")


def _counts() -> dict[str, int]:
    ours = ("agentrl", "AnyIO", "asyncio", "ThreadPool")
    children = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return {
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "threads": sum(not thread.name.startswith(ours) for thread in threading.enumerate()),
        "processes": sum(map(len, children)),
    }
