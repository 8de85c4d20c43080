"""The shop's users: a script, or a second model behind an address of OpenAI's form (`USER_URL`)."""

import os

from agentrl import Sample
from agentrl.envs import ModelUser, ScriptedUser, SimulatedUser

INSTRUCTION = (
    "You are a customer. You want: {wish} Your order is {order}. Answer in a sentence; say BYE when it is done."
)


def user_of(sample: Sample) -> SimulatedUser:
    """Return the user of one conversation. The script names the order once, when a question is asked."""
    wish, order = str(sample.metadata["wish"]), str(sample.metadata["order"])
    if url := os.environ.get("USER_URL"):
        return ModelUser(f"{url.rstrip('/')}/v1", INSTRUCTION.format(wish=wish, order=order), wish)
    return ScriptedUser([(r"\?", f"It is order {order}.")])
