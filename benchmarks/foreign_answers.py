"""Collect labelled model answers that others published, in one format: the input of `benchmarks.grader_errors`.

    python -m benchmarks.foreign_answers DIR [SOURCE...]

Clones each source's repository into DIR/git (skipped if DIR/git/OWNER+NAME is already a git directory), reads the
files of the pinned commit, and writes DIR/SOURCE.jsonl.gz: one answer a line, {"source", "grader", "id", "response",
"label", "metadata", "right"}. `right` is the verdict that was published with the answer, or null if none was. A
published verdict is another program's and sometimes wrong. Where the readers of `benchmarks.grader_errors` disagreed
with a verdict or with each other, we read the answer: our verdicts are in foreign_verdicts.tsv beside this file
(source, id, right, reason). An answer is right if its final claim equals the label, in any form. It is not right if
it states no claim, several claims, or a rounded value of an exact label. An "unclear" answer is left out.
"""

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One published answer. `id` is "MODEL:QUESTION"."""

    source: str
    grader: str
    id: str
    response: str
    label: str
    right: bool | None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Repository:
    """The files of one commit of a public repository."""

    directory: Path
    name: str
    commit: str

    def read(self, path: str) -> bytes:
        return self._git("show", f"{self.commit}:{path}")

    def rows(self, path: str) -> list[Any]:
        return [json.loads(line) for line in self.read(path).decode().splitlines() if line]

    def paths(self, under: str) -> list[str]:
        listed = self._git("ls-tree", "-r", "-z", "--name-only", self.commit, "--", under)
        return sorted(listed.decode().strip("\0").split("\0"))

    def has(self, path: str) -> bool:
        """Return true if the file's content exists: some copies of a repository lack its largest files."""
        try:
            self._git("cat-file", "-e", f"{self.commit}:{path}")
        except subprocess.CalledProcessError:
            print(f"{self.name}: {path} is not there, left out", file=sys.stderr)
            return False
        return True

    def _git(self, *command: str) -> bytes:
        home = self.directory / self.name.replace("/", "+")
        if not home.exists():
            url = f"https://github.com/{self.name}.git"
            subprocess.run(["git", "clone", "--bare", "--filter=blob:none", url, str(home)], check=True, timeout=600)
        return subprocess.run(
            ["git", f"--git-dir={home}", *command], check=True, capture_output=True, timeout=300
        ).stdout


def fraction(key: str, one_in: int) -> bool:
    """Return true for one in `one_in` keys, the same in every run."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % one_in == 0


def grade_school_math(files: Repository) -> Iterator[Answer]:
    """Yield GSM8K by GPT-3 (6B and 175B, finetuned and with a verifier): the last line is "A: 18"."""
    for at, row in enumerate(files.rows("grade_school_math/data/example_model_solutions.jsonl")):
        label = row["ground_truth"].rsplit("A:", 1)[1].strip()
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            answer = row[model]
            yield Answer("gsm8k-gpt3", "gsm8k", f"{model}:{at}", answer["solution"], label, answer["is_correct"])


def tora(files: Repository) -> Iterator[Answer]:
    """Yield GSM8K by ToRA: a program, its output, and a sentence with a box."""
    for model in ("tora-70b-v1.0", "tora-code-34b-v1.0"):
        for row in files.rows(f"src/outputs/llm-agents/{model}/gsm8k/test_tora_-1_seed0_t0.0_s0_e1319.jsonl"):
            yield Answer("gsm8k-tora", "gsm8k", f"{model}:{row['idx']}", row["code"][0], row["gt"], None)


def rho(files: Repository) -> Iterator[Answer]:
    """Yield GSM8K and 500 problems of MATH by Rho-1: announced answers, and programs followed by a box."""
    with zipfile.ZipFile(io.BytesIO(files.read("rho-1/outputs.zip"))) as packed:
        for path in sorted(name for name in packed.namelist() if name.endswith(".jsonl")):
            model, benchmark = path.split("/")[1:3]
            for line in packed.read(path).decode().splitlines():
                row = json.loads(line)
                right, name = row["score"][0], f"{model}:{row['idx']}"
                if benchmark == "gsm8k":
                    yield Answer("gsm8k-rho", "gsm8k", name, row["code"][0], row["gt"], right)
                else:
                    yield Answer("math-rho", "math", name, row["code"][0], row["answer"], right)


def qwen(files: Repository) -> Iterator[Answer]:
    """Yield 100 problems of MATH by Qwen2.5-Math, eight samples each."""
    for row in files.rows("evaluation/data/eval_rm_maj_example/math_cot_100.jsonl"):
        for at, (response, right) in enumerate(zip(row["code"], row["score"], strict=True)):
            yield Answer("math-qwen", "math", f"sample{at}:{row['idx']}", response, row["answer"], right)


def sky(files: Repository) -> Iterator[Answer]:
    """Yield MATH-500, OlympiadBench, AMC and AIME by six models that box; one reasons long and often never ends."""
    outputs = "skythought/Qwen2.5-Math/evaluation/outputs/"
    for folder, thinks in (
        ("Qwen/Qwen2.5-14B-Instruct", False),
        ("Qwen/Qwen2.5-Math-7B", False),
        ("google/gemma-2-27b-it", False),
        ("meta-llama/Llama-3.1-8B", False),
        ("icml_models/Sky-T1-math-correct-5K-32B-short-ckpts", False),
        ("home/ubuntu/skyov1-dl/Sky-T1-math-correct-5K-27B", True),
    ):
        for benchmark, kind in (
            ("math500", "math"),
            ("olympiadbench", "olympiad"),
            ("amc23", "contest"),
            ("aime24", "contest"),
        ):
            for path in files.paths(f"{outputs}{folder}/{benchmark}_eval/{benchmark}/"):
                if not path.endswith(".jsonl") or not files.has(path):
                    continue
                for row in files.rows(path):
                    name = f"{folder.rsplit('/', 1)[1]}:{benchmark}/{row['idx']}"
                    # `gt` is normalized and sometimes damaged; OlympiadBench has no other label.
                    label = row["answer"] if benchmark == "math500" else row["gt"]
                    source = f"math-sky-{'thoughts' if thinks else kind}"
                    yield Answer(source, "math", name, row["code"][0], label, row["score"][0])


def mathcoder(files: Repository) -> Iterator[Answer]:
    """Yield SVAMP and DeepMind's Mathematics by MathCoder: turns of prose, code and its output."""
    for model, benchmark, stamp in (
        ("MathCoder-CL-7b", "SVAMP", "20230917-2306"),
        ("MathCoder-L-70b", "SVAMP", "20230918-2240"),
        ("MathCoder-L-13b", "mathematics", "20230917-2337"),
        ("MathCoder-L-70b", "mathematics", "20230918-2031"),
    ):
        for at, row in enumerate(files.rows(f"outs/{model}/{benchmark}/{benchmark}_test_result-{stamp}.jsonl")):
            # The first two turns are the prompt, the last is what the authors' script extracted.
            response = "\n".join(turn["content"] for turn in row["debug_result"][2:-1])
            label = str(row["ground_truth"]["answer"])
            yield Answer(f"math-mathcoder-{benchmark.lower()}", "math", f"{model}:{at}", response, label, None)


def mmlu_pro(files: Repository) -> Iterator[Answer]:
    """Yield MMLU-Pro (up to ten choices) by 29 models: one question in 40."""
    for path in files.paths("eval_results/"):
        if not path.endswith("_5shots.zip"):
            continue
        model = path.split("model_outputs_")[1].removesuffix("_5shots.zip")
        if not files.has(path):
            continue
        packed = zipfile.ZipFile(io.BytesIO(files.read(path)))
        rows = json.loads(packed.read(next(name for name in packed.namelist() if name.endswith(".json"))))
        for row in rows:
            # One file has strings among its rows.
            if not isinstance(row, dict) or not fraction(str(row["question_id"]), 40):
                continue
            # Base models continue with a question of their own. The benchmark stops them at "Question:".
            response = (row.get("generated_text") or row.get("model_outputs") or "").split("\nQuestion:")[0]
            metadata = {"choices": row["options"]}
            name = f"{model}:{row['question_id']}"
            yield Answer("mmlu-pro", "gpqa", name, response, row["answer"], row["pred"] == row["answer"], metadata)


def big_bench_hard(files: Repository) -> Iterator[Answer]:
    """Yield the multiple-choice tasks of BIG-Bench Hard by code-davinci-002, step by step."""
    for path in files.paths("code-davinci-002-outputs/code-davinci-002-cot/"):
        if not path.endswith(".json"):
            continue
        task = path.rsplit("/", 1)[1].split("_few_shot")[0]
        for at, row in enumerate(json.loads(files.read(path))["outputs"]):
            label = re.fullmatch(r"\(([A-R])\)", row["target"])
            choices = re.findall(r"^\([A-R]\) (.*)$", row["input"].rsplit("Options:", 1)[-1], re.MULTILINE)
            if label and len(choices) > ord(label[1]) - ord("A"):
                yield Answer(
                    "big-bench-hard", "gpqa", f"{task}:{at}", row["prediction"], label[1], None, {"choices": choices}
                )


def gaokao(files: Repository) -> Iterator[Answer]:
    """Yield Chinese university entrance examinations by GPT-4: questions with one choice, and blanks in mathematics.

    The prompt asks for the marks <eoe> and <eoa>, for the benchmark's own script; they are removed.
    """
    for path in files.paths("Results/gpt_4_0314_obj/"):
        if path.endswith("MCQs.json"):
            subject = re.split(r"20\d\d_", path)[-1].removesuffix("_MCQs.json")
            for row in json.loads(files.read(path))["example"]:
                right = row["model_answer"] == row["standard_answer"] if row["model_answer"] else None
                if len(row["standard_answer"]) == 1 and re.fullmatch("[A-D]", row["standard_answer"][0]):
                    name = f"{subject}:{row['index']}"
                    yield Answer(
                        "gaokao-choice", "gpqa", name, re.sub("<eo[ea]>", "", row["model_output"]), row["standard_answer"][0], right,
                        {"valid_letters": list("ABCD")},
                    )  # fmt: skip
    for part in ("I", "II"):
        path = f"Results/gpt_4_0314_sub/gpt-4-0314_2010-2022_Math_{part}_Fill-in-the-Blank.json"
        for row in json.loads(files.read(path))["example"]:
            name, label = f"{part}:{row['index']}", row["standard_answer"].strip()
            response = re.sub("<eo[ea]>", "", row["model_output"])
            yield Answer("math-gaokao", "math", name, response, label, None)


def ifeval(files: Repository) -> Iterator[Answer]:
    """Yield IFEval by GPT-4, with the verdicts of the official checker."""
    asked = {row["prompt"]: row for row in files.rows("data/input_data.jsonl")}
    for row in files.rows("data/test_output/eval_results_strict.jsonl"):
        prompt = asked[row["prompt"]]
        metadata = {"instruction_id_list": prompt["instruction_id_list"], "kwargs": prompt["kwargs"]}
        name = f"gpt-4:{prompt['key']}"
        yield Answer("ifeval", "ifbench", name, row["response"], "", row["follow_all_instructions"], metadata)


SOURCES: dict[str, tuple[str, str, Callable[[Repository], Iterator[Answer]]]] = {
    "grade-school-math": ("openai/grade-school-math", "3101c7d5072418e28b9008a6636bde82a006892c", grade_school_math),
    "tora": ("microsoft/ToRA", "213c1c995038c73fab10343814df7a42f990f026", tora),
    "rho": ("microsoft/rho", "32965907a2aa71192e8b760fe6391b7c5246d4dc", rho),
    "qwen2.5-math": ("QwenLM/Qwen2.5-Math", "a45202bd16f1ec06f433442dc1152d0074773465", qwen),
    "sky-t1": ("NovaSky-AI/SkyThought", "9a750c725525201a16bcb2df386495da61371577", sky),
    "mathcoder": ("mathllm/MathCoder", "d6c91fbd8c02ad9f9669423f4ff331dc1605d126", mathcoder),
    "mmlu-pro": ("TIGER-AI-Lab/MMLU-Pro", "f418b116db00b065c2aea046518d8fcf74d39872", mmlu_pro),
    "big-bench-hard": ("suzgunmirac/BIG-Bench-Hard", "9ee07bd481feebf959a6b59d61ea57bdcf30964d", big_bench_hard),
    "gaokao": ("OpenLMLab/GAOKAO-Bench", "6dbb24f8d8439041e5431c4c184a582182a6ce9c", gaokao),
    "ifeval": ("Podtech-AI/IFEval", "76670a377db0f75ac8e808bbdaa8df5e6f185399", ifeval),
}


VERDICTS = Path(__file__).with_name("foreign_verdicts.tsv")


def verdicts() -> dict[tuple[str, str], bool | None]:
    """Return our verdict of each answer that we read: true if it is right, None if it is unclear."""
    known = {"true": True, "false": False, "unclear": None}
    rows = [line.split("\t") for line in VERDICTS.read_text(encoding="utf-8").splitlines()]
    return {(source, name): known[right] for source, name, right, _ in rows}


def main() -> None:
    directory, chosen = Path(sys.argv[1]), sys.argv[2:] or list(SOURCES)
    (directory / "git").mkdir(parents=True, exist_ok=True)
    read = verdicts()
    for name in chosen:
        repository, commit, answers = SOURCES[name]
        total = 0
        with gzip.open(directory / f"{name}.jsonl.gz", "wt", encoding="utf-8") as out:
            for answer in answers(Repository(directory / "git", repository, commit)):
                key = (answer.source, answer.id)
                if key in read and read[key] is None:
                    continue
                out.write(json.dumps(asdict(replace(answer, right=read.get(key, answer.right)))) + "\n")
                total += 1
        print(f"{name}: {total} answers", flush=True)


if __name__ == "__main__":
    main()
