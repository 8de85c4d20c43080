"""Memory that the engine gives back while somebody else needs it: its weights, its keys and values.

1. Run in the engine's thread. What is given back twice, or brought back twice, is so once.
2. Nothing is generated while something is missing: requests wait. Cached prefixes are lost, weights are not: their bytes
   are as before. Without its weights the engine takes no others.
"""

from collections.abc import Collection
from typing import Literal, get_args

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.errors import refused
from agentrl.engine.weights import WHOLE
from agentrl.parked import Parked, give_back

WEIGHTS, CACHE = "weights", "kv_cache"
Tag = Literal["weights", "kv_cache", "cuda_graph"]
"""As SGLang calls them; there are no graphs here."""
TAGS: tuple[Tag, ...] = get_args(Tag)


class Memory:
    """Of one engine."""

    def __init__(self) -> None:
        self._parked: Parked | None = None

    def release(self, engine: Engine, tags: Collection[str]) -> None:
        """Give back.

        Raises:
            RequestError: sequences are being generated, or there is no room for the weights in the folder for temporary
                files.
        """
        if engine.running:
            raise refused("release_memory_occupation: requests are running; abort them, or wait for their end.")
        if CACHE in tags and CACHE not in engine.released:
            engine.weights_changed()  # no prefix of what is lost is used again
            engine.cache.release()
            give_back()
        if WEIGHTS in tags and WEIGHTS not in engine.released:
            try:
                self._parked = Parked(engine.model.state_dict().values())
            except OSError as error:
                raise refused(f"release_memory_occupation: the weights could not be put aside: {error}.") from error
        engine.released |= {tag for tag in tags if tag in WHOLE}

    def resume(self, engine: Engine, tags: Collection[str]) -> None:
        """Bring back."""
        if WEIGHTS in tags and self._parked is not None:
            self._parked.restore()
            self._parked = None
        if CACHE in tags and CACHE in engine.released:
            engine.cache.restore()
        engine.released -= set(tags)
