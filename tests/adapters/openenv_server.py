"""An OpenEnv server with a guessing game, and one with a text: `python openenv_server.py PORT guess|echo PLACES`."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Game(Environment):
    """A secret number below 100. A right guess has reward 1, a wrong one 0.25 if it is near."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.secret = random.Random(seed).randrange(100)
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(text="I think of a number below 100.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self._state.step_count += 1
        if action.number < 0:
            raise RuntimeError("the game is broken")
        away = action.number - self.secret
        text = "right" if away == 0 else "higher" if away < 0 else "lower"
        return Seen(text=text, done=away == 0, reward=1.0 if away == 0 else 0.25 if abs(away) < 3 else 0.0)

    @property
    def state(self) -> State:
        return self._state


class Echo(Game):
    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        return Seen(text=f"heard {action.message!r}", done=True, reward=float(len(action.message)))


if __name__ == "__main__":
    kind, action = {"guess": (Game, Guess), "echo": (Echo, Say)}[sys.argv[2]]
    app = create_fastapi_app(kind, action, Seen, max_concurrent_envs=int(sys.argv[3]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
