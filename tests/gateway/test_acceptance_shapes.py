"""Orders of roles that agents send, with real chat templates: every text is shown once and in order, or the request is
refused by name. No text is lost silently.

Many templates raise at a second system message, drop it, or cannot show calls. `make test` has a few templates.
"""

import re
from typing import Any

import pytest

from tests.gateway.acceptance_engine import LoggingEngine
from tests.gateway.acceptance_gateway import Served, serving
from tests.support.agent_clients import Json
from tests.support.assets import chat_templates
from tests.support.chats import make_chat

FEW = ("qwen3", "qwen3_8", "gptoss", "llama3_1", "gemma3", "deepseekv3", "lfm2")
"""One of each kind: shows all; raises at a late system message; drops it; one call a turn; strict turns; no tools."""
TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
]  # fmt: skip


def says(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def call(text: str, *numbers: int) -> Json:
    calls = [
        {
            "id": f"call{n:05d}",
            "type": "function",
            "function": {"name": "bash", "arguments": f'{{"command": "zzarg{n}"}}'},
        }
        for n in numbers
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(number: int) -> Json:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": f"zzresult{number}"}


CALLED = [call("zzstep", 1), result(1)]
SHAPES: dict[str, list[Json]] = {
    "user": [says("user", "zzA")],
    "system, user": [says("system", "zzA"), says("user", "zzB")],
    "developer, user": [says("developer", "zzA"), says("user", "zzB")],
    "Claude Code: system, user, system": [says("system", "zzA"), says("user", "zzB"), says("system", "zzC")],
    "Claude Code: tool, system": [says("system", "zzA"), says("user", "zzB"), *CALLED, says("system", "zzC")],
    "Claude Code: a system message twice behind calls": [
        *(says("system", "zzA"), says("user", "zzB"), *CALLED, says("system", "zzC")),
        *(call("zzlater", 2), result(2), says("system", "zzD")),
    ],
    "Codex: developer twice, user twice": [
        *(says("developer", "zzA"), says("developer", "zzB"), says("user", "zzC"), says("user", "zzD")),
    ],
    "Codex: system and developer": [says("system", "zzA"), says("developer", "zzB"), says("user", "zzC")],
    "Codex: compacted": [
        *(says("developer", "zzA"), says("developer", "zzB"), says("user", "zzC"), says("user", "zzD"), says("user", "zzE")),
    ],
    "tool, user": [says("system", "zzA"), says("user", "zzB"), *CALLED, says("user", "zzC")],
    "tool, user, user": [says("user", "zzB"), *CALLED, says("user", "zzC"), says("user", "zzD")],
    "user, assistant, user, user": [says("user", "zzA"), says("assistant", "zzB"), says("user", "zzC"), says("user", "zzD")],
    "assistant twice": [says("user", "zzA"), says("assistant", "zzB"), says("assistant", "zzC"), says("user", "zzD")],
    "a call and its result": [says("user", "zzB"), *CALLED],
    "two calls and their results": [says("user", "zzB"), call("zzstep", 1, 2), result(1), result(2)],
    "a call, its result and an answer": [says("user", "zzB"), *CALLED, says("assistant", "zzC"), says("user", "zzD")],
    "assistant first": [says("assistant", "zzA"), says("user", "zzB")],
    "system alone": [says("system", "zzA")],
    "system last": [says("user", "zzA"), says("assistant", "zzB"), says("system", "zzC")],
}  # fmt: skip


def texts(messages: list[Json]) -> list[str]:
    """Return everything that a prompt must show, in order. A call's text may be before or after its arguments."""
    found: list[str] = []
    for message in messages:
        found.append(message["content"])
        found += [re.findall(r"zzarg\d", one["function"]["arguments"])[0] for one in message.get("tool_calls", ())]
    return found


async def shown(served: Served, engine: LoggingEngine, base: str, messages: list[Json], tools: list[Any]) -> str | None:
    """Return the fault in the answer to a shape; None if there is none."""
    asked = len(engine.log)
    body: Json = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
    response = await served.agents.post(f"{base}/chat/completions", json=body)
    if response.status_code != 200:
        said = response.json()["error"]["message"]
        named = response.status_code == 400 and re.search(r"(?i)role|system|developer|tool|call|assistant|user", said)
        return None if named and len(engine.log) == asked else f"{response.status_code}: {said}"
    prompt = engine.chat.decode(engine.log[-1].prompt)
    wanted = texts(messages)
    times = {text: prompt.count(text) for text in wanted}
    if any(count != 1 for count in times.values()):
        return f"not once: { ({text: count for text, count in times.items() if count != 1}) }"
    order = sorted(wanted, key=prompt.index)
    roles = [re.sub(r"zzstep|zzlater|zzarg\d", "a turn", text) for text in order]
    return None if roles == [re.sub(r"zzstep|zzlater|zzarg\d", "a turn", text) for text in wanted] else f"order {order}"


async def shapes_of(name: str) -> tuple[list[str], set[str]]:
    """Return the faults of a template, and the shapes that it shows."""
    chat = make_chat(name)
    engine = LoggingEngine(chat, lambda rng, prompt, params: "yes", damage=False)
    wrong: list[str] = []
    fine: set[str] = set()
    async with serving(chat, engine) as served:
        for shape, messages in SHAPES.items():
            base = await served.open(index=0, group_index=0)
            has_calls = any(message.get("tool_calls") for message in messages)
            asked = len(engine.log)
            if fault := await shown(served, engine, base, messages, TOOLS if has_calls else []):
                wrong.append(f"{shape}: {fault}")
            elif len(engine.log) > asked:
                fine.add(shape)
    return wrong, fine


ALL_NAMES = [
    "cohere cohere2 cohere2_training cohere_training deepseek_r1_distill deepseek_r1_distill_training deepseekv3 deepseekv3_training",
    "diffusion_gemma diffusion_gemma_training gemma gemma3 gemma3_training gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 gemma_training",
    "glm4moe glm4moe_training gptoss gptoss_training idefics3 idefics3_training lfm2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_training",
    "lfm2_v2 lfm2_v2_training llama3 llama3_1 llama3_2 llama3_training llava_next llava_next_training muse_glimmer muse_glimmer_training",
    "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training nemotron_3_super",
    "nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training phi3 phi3_5 phi3_5_training phi3_training qwen2_5",
    "qwen2_5_training qwen2_5_vl qwen2_5_vl_training qwen3 qwen3_5_nothink qwen3_5_nothink_training qwen3_5_think",
    "qwen3_5_think_training qwen3_6 qwen3_6_training qwen3_8 qwen3_8_training qwen3_instruct_2507 qwen3_instruct_2507_training",
    "qwen3_training qwen3_vl qwen3_vl_training smolvlm smolvlm_training",
]
REST = [pytest.param(name, marks=pytest.mark.slow) for name in " ".join(ALL_NAMES).split() if name not in FEW]
PLAIN = {"user", "system, user", "Claude Code: system, user, system", "Codex: developer twice, user twice"}
"""Shapes without calls and later turns. These can be folded with any template."""


@pytest.mark.parametrize("name", [*FEW, *REST])
async def test_no_text_of_a_shape_is_lost_in_silence(name: str) -> None:
    wrong, fine = await shapes_of(name)
    assert not wrong, f"{len(wrong)} of {len(SHAPES)} shapes:\n" + "\n".join(wrong)
    if name == "llama3":  # it needs a BOS token, which the test's tokenizer does not have
        assert not fine
        return
    assert fine >= PLAIN, f"refused, though they can be folded: {sorted(PLAIN - fine)}"
    if name.startswith("qwen3") and make_chat(name).report.can.tool_messages:  # these show text beside calls
        agents = {shape for shape in SHAPES if shape.startswith(("Claude Code", "Codex"))}
        assert fine >= agents, f"shapes of agents that are refused: {sorted(agents - fine)}"


def test_every_template_is_named_here() -> None:
    assert sorted(" ".join(ALL_NAMES).split()) == sorted(chat_templates())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_8", "gptoss"])
async def test_a_conversation_with_folded_messages_goes_on(name: str) -> None:
    """A message that is folded in one turn is folded in the same way later, so that the next turn extends it."""
    chat = make_chat(name)
    engine = LoggingEngine(chat, lambda rng, prompt, params: "yes", damage=False)
    async with serving(chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        history = [says("developer", "zzA"), says("developer", "zzB"), says("user", "zzC"), says("system", "zzD")]
        for turn in range(3):
            response = await served.agents.post(f"{base}/chat/completions", json={"model": "m", "messages": history})
            assert response.status_code == 200, response.text
            history += [
                response.json()["choices"][0]["message"],
                says("user", f"zzU{turn}"),
                says("system", f"zzS{turn}"),
            ]
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend", "extend"]
        prompt = chat.decode(engine.log[-1].prompt)
        found = re.findall(r"zz\w+", prompt)
        assert found == ["zzA", "zzB", "zzC", "zzD", "zzU0", "zzS0", "zzU1", "zzS1"]
