"""The formats that must be read: their parsers' names, their recorded outputs, and the templates that write them.

1. Names are SGLang's if SGLang has one (`FunctionCallParser.ToolCallParserEnum`, `ReasoningParser.DetectorMap`). Else
   they are vLLM's (`seed_oss`, `phi4_mini_json`, `hunyuan_a13b`, `granite`, `ernie45`), the model card's
   (`nemotron_json`), or continue SGLang's series (`deepseekv41`).
2. Outputs are the fixtures of `canitoolcall`. Families without fixtures have hand-made outputs in `samples.yaml`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.chat import ParsedTurn, make_parser
from agentrl.chat.parsers import TurnParser

THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Format:
    """One format of model output.

    `corpus` and `models`: the folder of fixtures, and a part of the first model's name. `tags`: a pair, which the
    generation prompt may leave open. `begins`: the text that begins a call, if there is one. `quotes`: the quotes
    of strings in calls that are JSON or Python, "" for other forms. `templates`: names of TRL's templates.
    """

    parser: str
    reasoning: str = "none"
    corpus: str = ""
    models: tuple[str, ...] = ("",)
    tags: tuple[str, str] = THINK
    begins: str = ""
    quotes: str = ""
    templates: tuple[str, ...] = ()


DSML = "<｜DSML｜"
TABLE = (
    Format("hermes", "qwen3", "qwen3-hermes", begins="<tool_call>", quotes='"', templates=(
        "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl")),
    Format("qwen3_coder", "qwen3", "qwen3-xml", begins="<function=", templates=(
        "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super",
        "nemotron_3_ultra", "nemotron_3_5_lightning")),
    Format("glm45", "think", "glm", ("GLM-4.5",), begins="<tool_call>", templates=("glm4moe",)),
    Format("glm47", "think", "glm", ("GLM-4.7", "GLM-5"), begins="<tool_call>"),
    Format("llama3", "none", "llama", ("Llama-3",), quotes='"', templates=("llama3_1", "llama3_2")),
    Format("pythonic", "none", "llama", ("Llama-4",), begins="[", quotes="'\""),
    Format("deepseekv3", "deepseek-r1", "deepseek", ("V3-0324",), begins="<｜tool▁call▁begin｜>", quotes='"', templates=(
        "deepseekv3",)),
    Format("deepseekv31", "deepseek-v3", "deepseek", ("V3.1",), begins="<｜tool▁call▁begin｜>", quotes='"'),
    Format("deepseekv32", "deepseek-v3", "deepseek", ("V3.2",), begins=f"{DSML}invoke"),
    Format("deepseekv4", "deepseek-v4", "deepseek", ("V4-",), begins=f"{DSML}invoke"),
    Format("deepseekv41", "deepseek-v4", "deepseek", ("V4.1-",), begins=f"{DSML} invoke"),
    Format("kimi_k2", "kimi_k2", "kimi", ("Kimi-K2",), begins="<|tool_call_begin|>", quotes='"'),
    Format("kimi_k3", "kimi_k3", "kimi", ("Kimi-K3",), ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
           begins="<|open|>call "),
    Format("gpt-oss", "gpt-oss", "gpt-oss", begins=" to=functions.", quotes='"', templates=("gptoss",)),
    Format("mistral", "mistral", "mistral", tags=("[THINK]", "[/THINK]"), begins="[TOOL_CALLS]", quotes='"'),
    Format("gemma4", "gemma4", "gemma4", tags=("<|channel>", "<channel|>"), begins="<|tool_call>", templates=(
        "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma")),
    Format("lfm2", "qwen3", begins="<|tool_call_start|>", quotes="'\"", templates=(
        "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")),
    Format("minimax-m2", "minimax", begins="<minimax:tool_call>"),
    Format("seed_oss", "seed_oss", tags=("<seed:think>", "</seed:think>"), begins="<seed:tool_call>"),
    Format("phi4_mini_json", "none", quotes='"'),
    Format("nemotron_json", "qwen3", begins="<TOOLCALL>", quotes='"'),
    Format("step3", "step3", begins="<｜tool_call_begin｜>"),
    Format("hunyuan", "hunyuan", begins="<tool_call>"),
    Format("hunyuan_a13b", "hunyuan_a13b", begins="<tool_calls>", quotes='"'),
    Format("cohere_command4", "cohere_command4", tags=("<|START_THINKING|>", "<|END_THINKING|>"),
           begins="<|START_ACTION|>", quotes='"'),
    Format("granite", "none", quotes='"'),
    Format("ernie45", "ernie45", begins="<tool_call>", quotes='"'),
)  # fmt: skip
NAMES = ("qwen", "qwen25", "glm")
"""SGLang's other names for tool calls that must be known."""
REASONING_NAMES = (
    "deepseek-r1", "deepseek-v3", "deepseek-v4", "glm45", "gpt-oss", "kimi_k2", "kimi_k3", "qwen3", "qwen3-thinking",
    "minimax", "step3", "step3p5", "mistral", "nemotron_3", "gemma4", "hunyuan", "cohere_command4",
)  # fmt: skip
"""SGLang's names for reasoning that must be known."""


@dataclass(frozen=True)
class Output:
    """One turn that a model wrote. `calls` is None if no call may be read."""

    id: str
    prompt: str
    text: str
    tools: list[dict[str, Any]]
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] | None = None
    complete: bool = True


def formats(rows: Sequence[Format] = TABLE) -> list[Any]:
    """Return the rows as parameters."""
    return [pytest.param(row, id=row.parser) for row in rows]


@cache
def outputs(row: Format) -> list[Output]:
    """Return the recorded outputs of a format, or the hand-made ones."""
    if not row.corpus:
        data = yaml.safe_load((Path(__file__).parent / "samples.yaml").read_text(encoding="utf-8"))
        return [_sample(f"{row.parser}/{n}", data["tools"], entry) for n, entry in enumerate(data[row.parser]["turns"])]
    return [_fixture(raw, prompt) for raw, prompt in corpus(row.corpus) if _is_of(row, raw)]


@cache
def corpus(name: str) -> list[tuple[dict[str, Any], str]]:
    """Yield every fixture of one folder, each with its generation prompt."""
    folder = files("canitoolcall") / "_data" / "fixtures" / name
    models = json.loads((folder / "family.json").read_text(encoding="utf-8"))["reference_models"]
    prompts = {entry["repo"]: entry.get("default_generation_prompt") or "" for entry in models}
    lines = [
        line
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".jsonl")
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    rows = [json.loads(line) for line in lines]
    return [(row, row.get("generation_prompt", prompts.get(row["models"][0], ""))) for row in rows]


def parser_of(row: Format, prompt: str = "") -> TurnParser:
    """Return the parser under test. It knows if the generation prompt left the reasoning open."""
    opens, closes = row.tags
    return make_parser(row.parser, row.reasoning, "").opened(prompt.rfind(opens) > prompt.rfind(closes))


def read(row: Format, output: Output, text: str | None = None) -> ParsedTurn:
    return parser_of(row, output.prompt).parse(output.text if text is None else text, output.tools)


def _is_of(row: Format, raw: dict[str, Any]) -> bool:
    return any(model in raw["models"][0] for model in row.models)


def _fixture(raw: dict[str, Any], prompt: str) -> Output:
    expected = raw.get("expected")
    if expected is None:
        return Output(raw["id"], prompt, raw["raw_output"], raw["tools"], complete=False)
    calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"] or []]
    content, reasoning = expected["content"] or "", expected.get("reasoning_content") or ""
    whole = "truncated" not in raw["tags"]
    return Output(raw["id"], prompt, raw["raw_output"], raw["tools"], content, reasoning, calls, whole)


def _sample(name: str, tools: Any, entry: dict[str, Any]) -> Output:
    calls = [(tool, arguments) for call in entry.get("calls", []) for tool, arguments in call.items()]
    return Output(
        name, entry.get("prompt", ""), entry["text"], tools, entry.get("content", ""), entry.get("reasoning", ""), calls
    )
