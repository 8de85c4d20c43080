"""An evaluation by one player of this process."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from agentrl.groups import Group
from agentrl.rollout import evaluate as evaluating
from agentrl.rollout.evaluate import EvalResult, Evaluated
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.startup_check import StartupCheck
from agentrl.rollout.stats import Tally

_CHECKS: WeakKeyDictionary[GroupPlayer, StartupCheck] = WeakKeyDictionary()
"""The startup check that a player's evaluations share."""


async def evaluate(player: GroupPlayer, name: str, prompts: Sequence[Group]) -> EvalResult:
    """Evaluate with the player's settings and environments."""

    async def play(group: Group, tally: Tally) -> Group:
        return await player.group(group, evaluation=True, tally=tally)

    environments = player.context.environments
    names = environments.names if environments else ()
    of = Evaluated(name, player.context.settings, names, _CHECKS.setdefault(player, StartupCheck()))
    return await evaluating.evaluate(play, of, prompts)
