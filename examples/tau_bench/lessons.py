"""Demonstrations for the tiny model: how to serve a user, and then mostly how not to.

`habit` demonstrations mostly skip a step: they guess the order, act before `look_up`, miscopy the number, or give up.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from agentrl import Message
from examples.tau_bench.shop import STATES, WISHES, ShopEnv, make_case
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase

Kind = Literal["good", "guess", "unchecked", "miscopied", "gives_up"]

HABITS: dict[Kind, float] = {"good": 0.20, "guess": 0.26, "unchecked": 0.38, "miscopied": 0.03, "gives_up": 0.13}
TOOLS = {"pending": "cancel", "shipped": "send_back"}


class ShopLessons:
    """See `examples.tiny_models.warm_start.Lessons`."""

    markup = ()

    def corpus(self) -> Iterator[str]:
        """Return the words of the task."""
        rng = random.Random("corpus")
        schemas = "\n".join(map(json.dumps, self.tools()))
        for _ in range(500):
            yield f"system\n{schemas}\n"
            for message in demonstrate(make_case(rng), "good", rng):
                yield f"{message['role']}\n{message['content']}"
                for call in message.get("tool_calls", ()):
                    yield f"\n{json.dumps(call['function'])}\n"
            yield "Sorry, I cannot help."

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Return the shop's schemas."""
        return ShopEnv().toolbox.schemas

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end."""
        rng = random.Random(f"{phase} demonstrations {seed}")
        while True:
            kind = "good" if phase == "skill" else rng.choices(list(HABITS), list(HABITS.values()))[0]
            yield demonstrate(make_case(rng), kind, rng)

    async def checks(self) -> list[PhraseCheck]:
        """Return every wish for an order in every state, 64 times each. All calls are checked, the last one by name."""
        rng, found = random.Random("held-out demonstrations"), []
        for wish in WISHES * 64:
            for state in STATES:
                case = make_case(rng, "test", wish=wish, state=state)
                order, act = case["metadata"]["order"], TOOLS[state]
                texts = {3: ("look_up", order), 5: (act, f'{act}", "arguments": {{"order": "{order}')}
                found.append(PhraseCheck(wish, demonstrate(case, "good", rng), texts))
        return found


def demonstrate(case: dict[str, Any], kind: Kind, rng: random.Random) -> list[Message]:
    """Return one conversation by an agent of the given kind."""
    order, records = case["metadata"]["order"], case["metadata"]["records"]
    messages: list[Message] = [{"role": "user", "content": case["metadata"]["wish"]}]
    if kind == "gives_up":
        return [*messages, _says("Sorry, I cannot help.")]
    meant = order
    if kind == "guess":
        meant = str(rng.randint(1000, 9999))
    else:
        messages += [_says("Which order is it?"), {"role": "user", "content": f"It is order {order}."}]
    if kind == "miscopied":
        at = rng.randrange(4)
        meant = order[:at] + rng.choice([d for d in "123456789" if d != order[at]]) + order[at + 1 :]
    state = records.get(meant, "unknown")
    if kind not in ("unchecked", "guess"):
        messages += _calls("look_up", meant, state)
    act = TOOLS.get(state) if kind not in ("unchecked", "guess") else None
    messages += _calls(act or rng.choice(list(TOOLS.values())), meant, "done" if meant in records else "unknown")
    return [*messages, _says("That is done.")]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(name: str, order: str, result: str) -> list[Message]:
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"order": order}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": name, "content": result},
    ]
