"""The tool-call formats of known models, one row each. Sources: published chat templates; notes of SGLang and vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape

from agentrl.chat.parsers.base import Parsed, ToolCallParser
from agentrl.chat.parsers.harmony import parse_harmony
from agentrl.chat.parsers.marked import marked, read_gemma, read_python
from agentrl.chat.parsers.tagged import tagged


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """One output format."""

    name: str  # its name in `--tool-call-parser`
    parse: ToolCallParser  # reads a turn without its reasoning
    begins: tuple[str, ...] = ()  # texts with which calls begin; none if a call has no mark
    known_by: tuple[str, ...] = ()  # texts that each template of this format contains
    aliases: tuple[str, ...] = ()  # further names: those of SGLang and vLLM
    answers: tuple[str, ...] = ()  # texts with which the answer itself begins


_FUNCTION = r"<function=(?P<name>[^<>\n]+)>"
_PARAMETER = r"<parameter=(?P<key>[^<>\n]+)>\n?", "\n?</parameter>", "</function>"
_PAIR = r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>"
_SECTION_OF_DSML = "｜DSML｜ ?(?:function_calls|tool_calls|calls)>"
_deepseek = marked(
    "<｜tool▁call▁begin｜>",
    r"(?P<v3>function<｜tool▁sep｜>(?=[^\s<{]+\n))?(?P<name>[^\s<{]+)(?(v3)\n```json\n|<｜tool▁sep｜>)",
    "(?:\n```)?<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
)  # fmt: skip
_dsml = tagged(
    r'<｜DSML｜ ?invoke name="(?P<name>[^"<>]+)"(?:>|(?=/>))',
    r'<｜DSML｜ ?parameter name="(?P<key>[^"<>]+)" string="(?P<type>true|false)">',
    "</｜DSML｜ ?parameter>", "(?:/>|</｜DSML｜ ?invoke>)",
    call="<｜DSML｜ ?invoke", until="</｜DSML｜ ?invoke>", begin=f"<{_SECTION_OF_DSML}", end=f"</{_SECTION_OF_DSML}",
)  # fmt: skip
_kimi_k2 = marked(
    r"<\|tool_call_begin\|>",
    r"\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>",
    begin=r"<\|tool_calls_section_begin\|>", end=r"<\|tool_calls_section_end\|>",
)  # fmt: skip
_kimi_k3 = tagged(
    r'<\|open\|>call tool="(?P<name>[^"<>]+)"(?: index="\d+")?<\|sep\|>',
    r'<\|open\|>argument key="(?P<key>[^"<>]+)" type="(?P<type>\w+)"<\|sep\|>',
    r"<\|close\|>argument<\|sep\|>", r"<\|close\|>call<\|sep\|>",
    call=r"<\|open\|>call ", begin=r"<\|open\|>tools<\|sep\|>", end=r"<\|close\|>tools<\|sep\|>",
    drop=r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>", lost='argument key="', decode=unescape,
)  # fmt: skip
_mistral = marked(r"\[TOOL_CALLS\]", r"\s*(?:(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\]\w*)?\[ARGS\])?")
_qwen_agent = marked(r"✿FUNCTION✿\s?:\s{0,4}", r"(?P<name>[^\s✿]+)\s{0,4}✿ARGS✿\s?:", drop="✿(?:RESULT|RETURN)✿")
_gemma4 = marked(r"<\|tool_call>", r"call:(?P<name>[^\s{}<>]+)(?=\{)", r"<tool_call\|>", read=read_gemma, raw=True)
_llama3 = marked(
    r'<\|python_tag\|>|\A\s*(?=\{\s*"name"\s*:|\{\s*"type"\s*:\s*"function")', more=r"\s*;?\s*(?=\{\s*\"name\"\s*:)"
)
_llama4 = marked(
    r"<\|python_start\|>|\A\s*(?=\[\s*(?:[^\W\d][\w.-]*(?:\(|\Z)|\Z))", "", r"<\|python_end\|>",
    optional=True, read=read_python,
)  # fmt: skip
_qwen_xml = tagged(
    rf"(?:<tool_call>\s*)?{_FUNCTION}", *_PARAMETER,
    call="<tool_call>|<function=", tail=r"\s*(?:</tool_call>|(?=<tool_call>|<function=|\Z))",
    unclosed=r"\n?(?=\n(?:<parameter=|</function>))", lost=r"(?:\A|\n)<parameter=", until="</tool_call>",
)  # fmt: skip
_seed = tagged(_FUNCTION, *_PARAMETER, call="<function=", begin="<seed:tool_call>", end="</seed:tool_call>")
_glm = tagged(
    r"<tool_call>\s*(?P<name>[^<\s]+)", *_PAIR, call="<tool_call>", lost="</arg_key>",
    unclosed=r"(?=</tool_call>\s*(?:<tool_call>|\Z))",
)  # fmt: skip
_hunyuan = tagged(
    r"<tool_call>\s*(?P<name>[^<\s]+)\s*<tool_sep>", *_PAIR, call="<tool_call>", lost="</arg_key>",
    begin="<tool_calls>", end="</tool_calls>",
)  # fmt: skip
_minimax = tagged(
    r'<invoke name="?(?P<name>[^"<>]+)"?>', r'<parameter name="?(?P<key>[^"<>]+)"?>', "</parameter>", "</invoke>",
    call="<invoke name=", begin="<minimax:tool_call>", end="</minimax:tool_call>",
)  # fmt: skip
_step3 = tagged(
    r'<｜tool_call_begin｜>\s*function<｜tool_sep｜>\s*<steptml:invoke name="(?P<name>[^"<>]+)">',
    r'<steptml:parameter name="(?P<key>[^"<>]+)">', "</steptml:parameter>", "</steptml:invoke>",
    call="<｜tool_call_begin｜>", tail=r"\s*<｜tool_call_end｜>", begin="<｜tool_calls_begin｜>", end="<｜tool_calls_end｜>",
)  # fmt: skip
_lfm2 = marked(r"<\|tool_call_start\|>", "", r"<\|tool_call_end\|>", read=read_python)
_nemotron = marked("<TOOLCALL>", "", "</TOOLCALL>")
_hunyuan_a13b = marked("<tool_calls>", "", "</tool_calls>", drop=r"\A\s*<answer>|</answer>\s*\Z")
_phi4 = marked(r"<\|tool_call\|>|\Afunctools(?=\[)", "", r"<\|/tool_call\|>", optional=True)
_granite = marked(r"<\|tool_call\|>|<tool_call>", "", "</tool_call>", optional=True)
_hermes = marked("<tool_call>", "", "</tool_call>")
_ernie = marked("<tool_call>", "", "</tool_call>", drop=r"\A\s*<response>|</response>\s*(?=<tool_call>|\Z)")
_command = marked(r"<\|START_ACTION\|>", "", r"<\|END_ACTION\|>", drop=r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")
_ROWS = (
    OutputFormat("gpt-oss", parse_harmony, (), ("<|channel|>analysis", "<|message|>"), answers=("<|channel|>",)),
    OutputFormat("dsml", _dsml, ("<｜DSML｜",), ("｜DSML｜",), ("deepseekv32", "deepseekv4", "deepseekv41")),
    OutputFormat("deepseekv3", _deepseek, ("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",), ("deepseekv31",)),
    OutputFormat("kimi_k2", _kimi_k2, ("<|tool_calls_section_begin|>",), ("<|tool_call_argument_begin|>",)),
    OutputFormat(
        "kimi_k3", _kimi_k3, ("<|open|>tools<|sep|>",), ("<|open|>", "<|sep|>"), (), ("<|open|>response<|sep|>",)
    ),
    OutputFormat("mistral", _mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)),
    OutputFormat("qwen_agent", _qwen_agent, ("✿FUNCTION✿",), ("✿FUNCTION✿",)),
    OutputFormat("gemma4", _gemma4, ("<|tool_call>",), ("<|tool_call>call:",)),
    OutputFormat("minimax-m2", _minimax, ("<minimax:tool_call>",), ("<minimax:tool_call>",)),
    OutputFormat("seed_oss", _seed, ("<seed:tool_call>",), ("<seed:tool_call>",)),
    OutputFormat("step3", _step3, ("<｜tool_calls_begin｜>",), ("<steptml:",)),
    OutputFormat("lfm2", _lfm2, ("<|tool_call_start|>",), ("<|tool_call_start|>",)),
    OutputFormat(
        "command", _command, ("<|START_ACTION|>", "<|START_RESPONSE|>"), ("<|START_ACTION|>",), ("cohere_command4",)
    ),
    OutputFormat("nemotron", _nemotron, ("<TOOLCALL>",), ("<TOOLCALL>",), ("nemotron_json",)),
    OutputFormat("hunyuan", _hunyuan, ("<tool_calls>",), ("<tool_calls>", "<tool_sep>")),
    OutputFormat("hunyuan_a13b", _hunyuan_a13b, ("<tool_calls>",), ("<tool_calls>", "<answer>"), (), ("<answer>",)),
    OutputFormat("phi4", _phi4, ("<|tool_call|>", "functools["), ("<|tool|>", "<|/tool|>"), ("phi4_mini_json",)),
    OutputFormat("granite", _granite, ("<|tool_call|>", "<tool_call>"), ("<|start_of_role|>", "<|tool_call|>")),
    OutputFormat("qwen_xml", _qwen_xml, ("<tool_call>",), ("<function=", "<parameter="), ("qwen3_coder", "step3p5")),
    OutputFormat("glm", _glm, ("<tool_call>",), ("<arg_key>", "<arg_value>"), ("glm45", "glm47")),
    OutputFormat("ernie", _ernie, ("<tool_call>",), ("<tool_call>", "<response>"), ("ernie45",), ("<response>",)),
    OutputFormat("hermes", _hermes, ("<tool_call>",), ("<tool_call>", '"arguments"'), ("qwen", "qwen25", "qwen3")),
    OutputFormat("llama4", _llama4, (), ("<|python_start|>",), ("pythonic",)),
    OutputFormat("llama3", _llama3, (), ('"parameters": ', "<|start_header_id|>"), ("llama3_json",)),
    OutputFormat("none", lambda text, tools: Parsed(text)),
)
FAMILIES: Mapping[str, OutputFormat] = {name: row for row in _ROWS for name in (row.name, *row.aliases)}
"""Tool-call formats by name."""


def detect_family(template: str) -> OutputFormat:
    """Return the tool-call format that a chat template writes; `none` if no row matches."""
    found = (row for row in _ROWS if row.known_by and all(text in template for text in row.known_by))
    return next(found, FAMILIES["none"])
