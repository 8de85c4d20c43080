"""The prompt files, one JSON object a line: `prompt` (chat messages), `label`, `metadata`.

python -m examples.search_r1.data hotpotqa --output-dir data/search_r1    # for models that read English
python -m examples.search_r1.data made-up --output-dir data/made_up
"""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from agentrl import Message
from examples.search_r1.knowledge import Question, ask, questions
from examples.search_r1.lessons import demonstrate

HERE = Path(__file__).parent
CORPUS = HERE / "hotpotqa" / "paragraphs.jsonl"
TRAIN_QUESTIONS, TEST_QUESTIONS = 1024, 200
HOTPOT_TEST = 20
FORMAT_SCORES = {"structure_format_score": 0.2, "final_format_score": 0.1}
"""The reward of a well-formed trajectory without the right answer (Jin et al. 2025, arXiv:2505.15117)."""

TAGS = (
    "Answer the given question. First reason inside <think> and </think>. If you lack knowledge, search with "
    "<search> query </search>; the results come between <information> and </information>. Reason again after each "
    "search; you may search several times. Give the final answer inside <answer> and </answer>, without explanation, "
    "for example <answer> Beijing </answer>. Question: "
)
TOOLS = (
    "Answer the given question. Look up what you do not know with the tool `search`; you may search several times. "
    "Give the final answer inside <answer> and </answer>, without explanation, for example <answer> Beijing </answer>. "
    "Question: "
)
"""The instructions of `SearchR1Env` and `SearchR1ToolEnv` for a model that reads English."""


def write_train_and_test(folder: Path, seed: int, shots: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `test.jsonl` of the made-up world; the test questions are the same for every seed.

    Every prompt begins with `shots` worked examples, for models that were not taught the format.
    """
    rng = random.Random("worked")
    before = [message for _ in range(shots) for message in demonstrate(ask(rng), "good", rng)]
    train, test = questions(TRAIN_QUESTIONS, "train", seed), questions(TEST_QUESTIONS, "test", 0)
    train_file = write_rows(folder / "train.jsonl", (_made_up(question, before) for question in train))
    return train_file, write_rows(folder / "test.jsonl", (_made_up(question, before) for question in test))


def write_hotpotqa(folder: Path, instruction: str = TAGS) -> tuple[Path, Path]:
    """Write 80 training and 20 held-out questions of HotpotQA, answered by the 1,000 paragraphs beside this file."""
    with (HERE / "hotpotqa" / "questions.jsonl").open(encoding="utf-8") as lines:
        rows = [_hotpotqa(json.loads(line), instruction) for line in lines]
    train = write_rows(folder / "train.jsonl", rows[HOTPOT_TEST:])
    return train, write_rows(folder / "test.jsonl", rows[:HOTPOT_TEST])


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write `rows` as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _made_up(question: Question, before: list[Message]) -> dict[str, Any]:
    return _row(question.text, question.answer, {"passages": question.passages}, before)


def _hotpotqa(entry: dict[str, Any], instruction: str) -> dict[str, Any]:
    return _row(instruction + entry["question"], entry["answer"], {"corpus": str(CORPUS), "titles": entry["titles"]})


def _row(text: str, label: str, metadata: dict[str, Any], before: Sequence[Message] = ()) -> dict[str, Any]:
    prompt = [*before, {"role": "user", "content": text}]
    return {"prompt": prompt, "label": label, "metadata": {**metadata, **FORMAT_SCORES}}


@click.command()
@click.argument("what", type=click.Choice(["hotpotqa", "made-up"]))
@click.option("--output-dir", required=True, type=click.Path(path_type=Path), help="For train.jsonl and test.jsonl.")
@click.option("--tools", is_flag=True, help="HotpotQA for SearchR1ToolEnv: tool calls in place of the paper's tags.")
@click.option("--seed", default=0, help="Of the made-up training questions.")
@click.option("--shots", default=0, help="Worked examples before each made-up question.")
def main(what: str, output_dir: Path, tools: bool, seed: int, shots: int) -> None:
    """Write the prompts of one of the two tasks."""
    if (shots or seed) if what == "hotpotqa" else tools:
        raise click.UsageError("--shots and --seed are of made-up, --tools is of hotpotqa")
    if what == "hotpotqa":
        files = write_hotpotqa(output_dir, TOOLS if tools else TAGS)
    else:
        files = write_train_and_test(output_dir, seed, shots)
    click.echo("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
