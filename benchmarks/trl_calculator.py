"""The calculator demo with TRL's GRPOTrainer, for `benchmarks.time_to_reward`; it runs in TRL's own venv.

    python benchmarks/trl_calculator.py --model DIR --data DIR [--steps 20] [--threads 2]

Model, prompts, tool, reward, batch (16 prompts x 8 samples in one optimizer step), loss, optimizer and the number of
evaluations are those of `agentrl.demo`. Generation is what TRL does by default, in the training process. Prints
`evaluation SUCCESS` after each evaluation.
"""

import argparse
import ast
import json
import operator
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.chat_template_utils import qwen3_schema, qwen3_template  # type: ignore[import-not-found]

BATCH_PROMPTS, SAMPLES = 16, 8
OPERATIONS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
QUESTION = [{"role": "user", "content": "How much is 1+2?"}]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
"""The tool's schema from the warm start; TRL's own rendering of the function has other descriptions."""


def value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    raise ValueError("only integers, + - * and brackets are allowed")


def calculator(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: the expression
    """
    if len(expression) > 40:
        raise ValueError("the expression is longer than 40 characters")
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def reward(completions: list[list[dict[str, Any]]], label: list[str], **rest: Any) -> list[float]:
    """Return 1 for exactly one `<answer>` in the last turn that equals the label, else 0."""
    texts = [c[-1].get("content") or "" if c[-1]["role"] == "assistant" else "" for c in completions]
    return [float(ANSWER.findall(text) == [str(want)]) for text, want in zip(texts, label, strict=True)]


def load_tokenizer(folder: str) -> Any:
    """Load the model's tokenizer. Its template shows the tool as in the warm start."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_schema, tokenizer.response_template = qwen3_schema, qwen3_template
    wanted = render(tokenizer, [SCHEMA])
    system, _, _ = wanted.partition("<|im_start|>user")
    before, tools, rest = tokenizer.chat_template.partition("{%- if tools %}")
    _, other, rest = rest.partition("{%- elif messages[0]")
    tokenizer.chat_template = f"{before}{tools}{{{{- {json.dumps(system)} }}}}\n{other}{rest}"
    if render(tokenizer, [calculator]) != wanted:
        raise SystemExit(f"the chat template of {folder} is not one that this script knows how to change")
    return tokenizer


def render(tokenizer: Any, tools: list[Any]) -> str:
    text: str = tokenizer.apply_chat_template(QUESTION, tools=tools, tokenize=False, add_generation_prompt=True)
    return text


def prompts(path: Path) -> Dataset:
    rows = map(json.loads, path.read_text().splitlines())
    return Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--output", required=True, help="folder for what TRL writes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held_out = prompts(options.data / "test.jsonl")
    config = GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=BATCH_PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        max_completion_length=160,
        max_tool_calling_iterations=2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eval_strategy="steps",
        eval_steps=min(10, options.steps),
        eval_on_start=True,
        per_device_eval_batch_size=len(held_out),
        num_generations_eval=1,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
    )

    class Printing(GRPOTrainer):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)
            print(f"evaluation {metrics['eval_reward']:.3f}", flush=True)
            return metrics

    Printing(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=load_tokenizer(options.model),
        args=config,
        train_dataset=prompts(options.data / "train.jsonl"),
        eval_dataset=held_out,
        reward_funcs=reward,
        tools=[calculator],
    ).train()


if __name__ == "__main__":
    main()
