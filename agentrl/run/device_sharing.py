"""DeviceSharing on shared devices (`--colocate`): who has their memory during which action of the schedule.

While engines generate the trainer is away; while it trains they are. A weight update needs the trainer and, of the
engines, their weights; so does writing checkpoints and the model, so that weights that were just sent are not lost.
"""

from agentrl.config.placement import ClusterSettings
from agentrl.run.protocols import WHOLE, Components, within
from agentrl.run.schedule import Do

_ENGINES: dict[Do, frozenset[str]] = {
    Do.NEXT_BATCH: WHOLE,
    Do.EVALUATE: WHOLE,
    Do.TRAIN: frozenset(),
    Do.SEND: frozenset({"weights"}),
    Do.SAVE: frozenset({"weights"}),
    Do.EXPORT: frozenset({"weights"}),
}


class DeviceSharing:
    """Gives the memory to whoever needs it next."""

    def __init__(self, settings: ClusterSettings, parts: Components) -> None:
        self._settings, self._parts = settings, parts
        self._before: Do | None = None

    async def before(self, do: Do) -> None:
        """Return when `do` may begin."""
        generates = _ENGINES[do] == WHOLE
        same = self._before is not None and _ENGINES[self._before] == _ENGINES[do]
        if self._parts.weights is None or same:
            return
        self._before = do
        with within(self._settings.start_timeout, "taking turns on the devices (--colocate)"):
            if generates and self._settings.offload_train:
                await self._parts.trainer.offload()
            if self._settings.offload_rollout:
                await self._parts.rollouts.set_resident_memory(_ENGINES[do])
            if not generates and self._settings.offload_train:
                await self._parts.trainer.onload()
