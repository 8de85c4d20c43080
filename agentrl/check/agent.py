"""One session of an agent program before a run: its tree, its refused requests, and its samples."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from agentrl.chat import Chat
from agentrl.check.findings import wrong_ids
from agentrl.check.harness import context_room
from agentrl.check.policy import Policy
from agentrl.config import RunSettings
from agentrl.engine.wire import SamplingParams
from agentrl.envs import AgentEnvironment, Environment, EnvSpec
from agentrl.errors import AgentRLError, EnvFailure, GraderFailure
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Session
from agentrl.rollout.agents import leader
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.environment import closing, make_environment, set_up
from agentrl.rollout.failures import guarded
from agentrl.rollout.rewards import check_reward
from agentrl.sample import Sample

_ROOM = 32_768  # context length if neither settings nor model give it: today's agents have long prompts


class OneAnswer(Policy):
    """Answers each request with the same sentence."""

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        return self.ids("I have nothing to add.", ended=True)


@dataclass(slots=True)
class PlayedSession:
    """The results of one session of an agent. `tree`: nodes and roots, as in docs/gateway.md. `reward`: from the
    environment's own method. `error`: the failure of the agent, or "". `wrong`: errors in ids and masks."""

    tree: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    refusals: Sequence[str] = ()
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    reward: object = None
    error: str = ""
    wrong: list[str] = field(default_factory=list)

    def lines(self, chat: Chat) -> list[str]:
        roles = {root["number"]: root["role"] for root in self.tree["roots"]}
        found = []
        for node in self.tree["nodes"]:
            place = f"root, {roles[node['number']]}" if node["parent"] is None else f"behind {node['parent']}"
            agent = f", agent {node['agent']}" if node["agent"] else ""
            size = f"{node['prompt_tokens']} + {node['sampled_tokens']} tokens"
            found.append(f"turn {node['number']} ({place}{agent}): {node['reason']}, {size}, {node['finish']}")
        found += [f"refused: {text}" for text in self.refusals]
        names = [name.partition("/")[2] for name in self.figures if name.startswith("ignored/")]
        found += [f"without effect: {', '.join(sorted(names))}"] if names else []
        sizes = [(s.prompt_length, s.response_length, s.trained_tokens) for s in self.samples]
        found += [f"sample: {prompt} + {response} tokens, {trained} train" for prompt, response, trained in sizes]
        found += [f"reward: {self.reward}"] if self.reward is not None else []
        found += [f"wrong: {text}" for text in self.wrong]
        return [*found, *([f"failed: {self.error}"] if self.error else [])]


async def play_session(
    settings: RunSettings, chat: Chat, entry: EnvSpec, sample: Sample, policy: Policy
) -> PlayedSession:
    """Have an agent play one sample's prompt against a policy, and compare ids and masks with the policy's. Raises
    EnvFailure: the environment cannot be set up or made."""
    played, began, name = PlayedSession(), time.monotonic(), entry.kind.__name__
    room = context_room(settings.rollout, settings.train.hf_checkpoint, _ROOM)
    gateway = Gateway(chat, policy, context_length=room)
    async with set_up([entry], settings.cluster.start_timeout), gateway.serving():
        env = make_environment(entry, RolloutContext(settings.rollout, entry.args, chat, policy, room))
        assert isinstance(env, AgentEnvironment)
        env.socket = gateway.socket
        sampling = SamplingParams(temperature=1.0, max_new_tokens=settings.rollout.rollout_max_response_len)
        session: Session = gateway.open(replace(sample, index=0, rollout_id=0), sampling)
        try:
            with anyio.fail_after(settings.rollout.trajectory_timeout):
                async with closing(lambda: env, sample):
                    try:
                        await guarded(env.act(gateway.url(session), sample), what=f"{name}.act", failure=EnvFailure)
                    finally:
                        played.tree, played.refusals = session.tree.shown(), [*map(str, session.refusals)]
                        played.samples, played.figures = gateway.close(session.token), session.figures()
                    if played.samples and type(env).reward is not Environment.reward:
                        first = leader(played.samples)
                        first.metadata = {**sample.metadata, **first.metadata}
                        first.reward = await guarded(env.reward(first), what=f"{name}.reward", failure=GraderFailure)
                        check_reward(first, f"{name}.reward")
                        played.reward = first.reward
        except TimeoutError:
            played.error = f"no end after {settings.rollout.trajectory_timeout:g} s (--trajectory-timeout)"
        except AgentRLError as error:
            played.error = str(error)
    turns, several = [turn for told in policy.asked.values() for turn in told], len(played.samples) > 1
    for each in played.samples:
        played.wrong += wrong_ids(chat, name, each, turns, split=several)
    if not played.samples and not played.error:
        found = sample.metadata.get("agent")
        end = found if isinstance(found, dict) else {}  # a data row may have an entry of this name
        said = str(end.get("errors", "")).strip() or str(end.get("output", "")).strip()
        played.error = f"no answered request; {said[-300:] or 'the agent printed nothing'}"
    played.seconds = time.monotonic() - began
    return played
