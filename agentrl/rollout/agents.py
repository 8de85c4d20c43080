"""Trajectories of agent programs. Each has a session of the gateway, which returns its samples. `async def
agent(base_url, sample)` is a generate function; it may return a reward. An `AgentEnvironment` has `act`."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl.engine.wire import SamplingParams
from agentrl.errors import AgentFailure, ContextOverflow, EnvFailure
from agentrl.gateway.sessions import Session
from agentrl.plugins import describe_error
from agentrl.rollout.context import RolloutContext
from agentrl.sample import Sample

Act = Callable[[str, Sample], Awaitable[Any]]  # `agent(base_url, sample)`


async def play_agent(
    context: RolloutContext, sample: Sample, params: SamplingParams, act: Act, parts: list[Sample]
) -> list[Sample]:
    """Run an agent to its end and return the session's samples, without those of side tasks. `parts` gets them, also
    if the agent fails later. Raises AgentFailure: no request was answered, or the agent raised an error at a limit.
    ContextOverflow: the first prompt does not fit into the context, or the agent raised an error after a prompt that
    does not fit. EngineFailure: the engines failed and the agent gave up, or the gateway was closed."""
    if (gateway := context.gateway) is None:
        raise EnvFailure("agents need the gateway of a run", kind="env_no_gateway")
    origin = replace(sample, rollout_id=sample.index, metadata={})
    session = gateway.open(origin, context.turn_params(params, sample, 0, context.context_length))
    session.engine, session.context_length = context.client, context.context_length  # an evaluation has its own
    reward: Any = None
    rewards: dict[int, float] | None = {}  # if the agent fails, no root gets a reward
    try:
        reward, rewards = await act(gateway.url(session), sample), None
    except Exception as error:
        refusal = session.refusal_of(error)
        session.failure = session.failure or (refusal.failure if refusal else None)
        if session.failure:
            raise session.failure from error  # the failure caused the agent's error
        if refusal and refusal.kind == "context":
            rewards = None  # the samples are kept, and the failure policy sets their rewards
            raise ContextOverflow(f"the agent's prompt does not fit: {refusal}") from error
        if refusal and refusal.kind == "limit":
            said = f"the agent raised {describe_error(error)} after {refusal}; let it send fewer or shorter requests"
            raise AgentFailure(said, kind="agent_limit") from error
        raise
    else:
        if session.failure:
            raise session.failure
    finally:
        samples = gateway.close(session.token, {} if session.failure else rewards)
        for tally in context.tallies:
            tally.sampled(session.counts["sampled"])
        for member in samples:
            member.reward, member.metadata = reward, {**sample.metadata, **member.metadata}
        sample.metadata["gateway"] = {}
        for first in (sample, *samples[:1]):  # after a failure, only `sample` remains
            first.metadata["counters"] = {**first.metadata.get("counters", {}), **_figures(session)}
            first.metadata["gateway"]["session"] = session.record
        parts[:] = samples or [sample]
    if not samples and session.counts["refused/context"]:
        raise ContextOverflow(f"the agent's prompt does not fit: {session.refusals[-1]}")
    if not samples:
        refused = f"; its last refusal: {session.refusals[-1]}" if session.refusals else ""
        raise AgentFailure(f"the agent ended without an answered request{_end(sample)}{refused}", kind="agent_silent")
    return samples


def _figures(session: Session) -> dict[str, int]:
    """Return a closed session's counts, under the names that they have in metrics."""
    figures = {f"agent/{name}": count for name, count in session.figures().items() if name != "bytes"}
    nodes = session.tree.nodes.values()
    figures["tool_calls"] = sum(len(node.calls) for node in nodes)
    figures["tool_ok"] = sum(len(node.calls) for node in nodes if node.children)  # the agent continued with the result
    return figures


def _end(sample: Sample) -> str:
    """Describe the end of the agent's command; "" if there was no command."""
    end = sample.metadata.get("agent")
    if not isinstance(end, dict) or "exit_code" not in end:  # a data row may have an entry of this name
        return ""
    said = [*filter(str.strip, str(end.get("errors", "")).splitlines()), ""]
    return f"; it exited with status {end['exit_code']}: {said[-2] if said[1:] else ''}"


def leader(samples: Sequence[Sample]) -> Sample:
    """Return the sample whose reward all samples of a session share: the last one of the main conversation."""
    main = [sample for sample in samples if sample.metadata.get("gateway", {}).get("role") == "main"]
    return (main or list(samples))[-1]


def share_reward(samples: Sequence[Sample]) -> None:
    """Set the leader's reward on all samples of a trajectory that have none, and on its parts its credit of turns."""
    first = leader(samples)
    for sample in (one for one in samples if one.reward is None):
        sample.reward = first.reward
        if "gateway" not in sample.metadata and (credit := first.metadata.get("step_credit")):
            sample.metadata["step_credit"] = credit
