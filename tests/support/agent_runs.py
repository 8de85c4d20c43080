"""A run of an agent program: its requests go over HTTP to a real gateway, whose model is scripted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from agentrl.buffer.store import TrajectoryStore
from agentrl.chat import Chat
from agentrl.gateway.server import Gateway
from agentrl.sample import Sample
from tests.rollout.scripted import END, build
from tests.support.tiny_models import make_tiny_model
from tests.support.viewed import EVIL

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def agent(base_url: str, sample: Sample) -> float:
    """Ask for a title, work on a task with an edit, a retry and a sub-agent, and send one request that is refused."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(*messages: Any, status: int = 200, name: str = "", **more: Any) -> Any:
            body = {"model": "m", "messages": messages, **more}
            headers = {"x-claude-code-agent-id": name} if name else {}
            answer = await client.post(f"{base_url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            return answer.json()["choices"][0]["message"] if status == 200 else None

        def user(text: str) -> dict[str, str]:
            return {"role": "user", "content": text}

        await ask(user("a title, please"))
        task = user(f"task {sample.index}")
        first = await ask(task, tools=[TOOL])
        await ask(task, first, user("go on"), tools=[TOOL])
        second = await ask(task, first, user("go on"), tools=[TOOL])
        await ask(task, first, user("go on"), second, user("and on"), tools=[TOOL])
        await ask(task, {"role": "assistant", "content": "otherwise"}, user("go on"), tools=[TOOL])
        await ask({"role": "system", "content": "help"}, user("a part"), tools=[TOOL], name=EVIL)
        await ask(user("more"), n=2, status=400)
    return float(sample.index or 0)


async def agent_groups(chat: Chat) -> list[list[Sample]]:
    """Return one group of two sessions. The model's answer to the title is hostile, all others are harmless."""

    def replies(key: str) -> list[str]:
        return [f"{EVIL}{END}" if key.endswith("-0") else f"said{END}"]

    batch, _ = build(chat, replies, environment=None, generate=agent, rollout_batch_size=1, n_samples_per_prompt=2)
    context = batch.player.context
    gateway = Gateway(chat, context.client, context_length=context.context_length)
    async with gateway.serving():
        batch.player.context = replace(context, gateway=gateway)
        return (await batch.run(0)).groups


async def write_agent_run(run: Path) -> Path:
    """Write the folder of a run that has one rollout of the agent."""
    make_tiny_model(run / "model")
    with TrajectoryStore(run / "trajectories.sqlite", 1000) as store:
        store.add("train", "", 0, await agent_groups(Chat.load(str(run / "model"))))
    return run
