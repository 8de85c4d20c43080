"""Random sessions of agents that edit, compact, fork, retry, disconnect and delegate."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from agentrl.chat import Chat
from tests.gateway.acceptance_engine import Audit, Sampled, tree_faults
from tests.gateway.acceptance_gateway import Closed, Served
from tests.support.agent_clients import AGENTS, TOOLS, Agent, words

DISTURBANCES = {
    "hang up before": 0.07,
    "hang up within": 0.05,
    "retry": 0.06,
    "sub-agents": 0.12,
    "fork": 0.06,
    "title": 0.06,
    "edit": 0.07,
    "compact": 0.06,
    "tools": 0.05,
}
"""The probability of each in a turn."""


@dataclass
class Play:
    """One session: what its agents did."""

    chances: dict[str, float]
    most_turns: int = 6
    agents: list[Agent] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)

    def does(self, agent: Agent, what: str) -> bool:
        """Draw a disturbance, and count it."""
        if agent.rng.random() >= self.chances.get(what, 0.0):
            return False
        self.did[what] += 1
        return True

    async def agent(self, agent: Agent, depth: int = 0) -> None:
        """Play an agent to its end."""
        rng = agent.rng
        self.agents.append(agent)
        if not agent.history:
            agent.user(f"{words(rng, 6)} {rng.random()}")
        for _ in range(rng.randint(1, self.most_turns)):
            await self._turn(agent)
            if depth < 2:
                await self._delegate(agent, depth)
            await self._disturb(agent)

    async def _turn(self, agent: Agent) -> None:
        if self.does(agent, "hang up before"):
            await agent.leave(0, patience=agent.rng.randint(1, 12))
        if self.does(agent, "hang up within"):
            await agent.leave(agent.rng.randint(1, 2))
        if self.does(agent, "retry"):
            await agent.ask()  # an answer that the agent discards
        ids = await agent.turn()
        if ids:
            agent.results(ids, [words(agent.rng, 5) for _ in ids])
        else:
            agent.user(f"{words(agent.rng, 5)} {agent.rng.random()}")

    async def _delegate(self, agent: Agent, depth: int) -> None:
        rng = agent.rng
        others: list[Agent] = []
        if self.does(agent, "sub-agents"):
            for _ in range(rng.randint(1, 3)):
                system = agent.system if rng.random() < 0.2 else f"You help. {rng.random()}"
                tools = TOOLS[: rng.randint(1, 3)]
                others.append(
                    type(agent)(agent.client, agent.base, system, tools, seed=rng.random(), plain=agent.plain)
                )
        if self.does(agent, "fork"):
            other = agent.fork()
            other.user(f"Otherwise. {rng.random()}")
            others.append(other)
        if self.does(agent, "title"):
            system = f"You give titles. {rng.random()}"
            others.append(type(agent)(agent.client, agent.base, system, (), seed=rng.random(), plain=agent.plain))
        await asyncio.gather(*(self.agent(other, depth + 1) for other in others))

    async def _disturb(self, agent: Agent) -> None:
        rng = agent.rng
        if len(agent.history) > 2 and self.does(agent, "edit"):
            agent.edit(rng.randrange(len(agent.history)))
        if agent.tools and self.does(agent, "compact"):
            tools, agent.tools = agent.tools, []
            agent.user(f"Sum up. {rng.random()}")
            await agent.ask()
            agent.tools = tools
            agent.restart(1)
            agent.user(f"So far: {words(rng, 6)} {rng.random()}")
        if agent.tools and self.does(agent, "tools"):
            agent.tools = TOOLS[: rng.randint(1, 3)]


@dataclass
class Total:
    """The sums of many sessions."""

    did: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sessions: list[Closed] = field(default_factory=list)


async def play_session(
    served: Served, chat: Chat, seed: int, total: Total, log: list[Sampled], audit: Audit, **settings: object
) -> Closed:
    """Play a session, close it and check it alone; other sessions may play at the same time."""
    rng = random.Random(seed)
    wire = str(settings.get("wire") or rng.choice(sorted(AGENTS)))
    chances = settings.get("chances", DISTURBANCES)
    assert isinstance(chances, dict)
    since, seen = len(log), f"session {seed} ({wire})"
    base = await served.open(index=seed, group_index=seed // 4, sampling=settings.get("sampling", {}))
    play = Play(chances)
    main = AGENTS[wire](served.agents, base + rng.choice(["", "/v1"]), f"You act. {seed} {words(rng, 3)}", seed=seed)
    await play.agent(main)
    return await check_session(served, chat, base, seed, play, total, audit, since, seen)


async def check_session(
    served: Served, chat: Chat, base: str, seed: int, play: Play, total: Total, audit: Audit, since: int, seen: str
) -> Closed:
    """Close a session and check everything that it claims."""
    tree = await served.tree(base)
    closed = await served.close(base, reward=1.0)
    wrong = tree_faults(tree, closed.counts, closed.samples)
    known = len(audit.wrong)
    for sample in closed.samples:
        audit.add(sample, since)
        if (sample.rollout_id, sample.group_index, sample.reward) != (seed, seed // 4, 1.0):
            wrong.append(f"a sample has rollout_id {sample.rollout_id}, group {sample.group_index}, {sample.reward}")
    wrong += audit.wrong[known:]
    del audit.wrong[known:]
    if not play.did["hang up before"] + play.did["hang up within"] and closed.counts.get("dropped/undelivered"):
        wrong.append("turns are dropped as undelivered, and no agent hung up")
    if not play.did["title"] and closed.counts.get("dropped/side"):
        wrong.append("turns are dropped as side, and every conversation has tools")
    wrong += prompts_that_nobody_sent(chat, closed, play.agents)
    total.wrong += [f"{seen}: {fault}; it did {dict(play.did)}" for fault in wrong]
    total.did.update(play.did)
    total.counts.update(closed.counts)
    total.sessions.append(closed)
    return closed


def prompts_that_nobody_sent(chat: Chat, closed: Closed, agents: list[Agent]) -> list[str]:
    """Compare each root's prompt with the template's own rendering of a request that an agent sent."""
    wanted = {tuple(sample.tokens[: len(sample.tokens) - sample.response_length]) for sample in closed.samples}
    requests = [request for agent in agents for request in agent.requests]
    requests.sort(key=lambda variants: len(variants[0][0]))  # most roots are short
    for variants in requests:
        for messages, tools in variants:
            if not wanted:
                return []
            wanted.discard(tuple(chat.render_ids(messages, tools)))
    return [f"a root's prompt is no rendering of a request: {chat.decode(prompt)[-300:]!r}" for prompt in wanted]
