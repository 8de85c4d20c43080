"""The report page: its content, that it needs no other file, and that no model output is interpreted."""

import json
import math
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentrl.buffer.store import TrajectoryStore
from agentrl.dumps import read_groups
from agentrl.errors import DataError
from agentrl.observability.charts import Series, collect_series, distinct, layout, number, ticks
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.report import headlines, write_report
from agentrl.observability.settings import ObservabilitySettings
from agentrl.observability.trajectories import describe_sample, split_texts
from agentrl.runfolder import EVALUATIONS, TRAJECTORIES
from agentrl.sample import Origin, Sample, Status

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
TEXTS = {1: "What?", 2: EVIL, 3: "\n", 4: "result"}


def texts(ids: Sequence[int]) -> list[str]:
    return [TEXTS[i] for i in ids]


def sample(group: int, reward: float) -> Sample:
    made = Sample(group_index=group, label=EVIL, reward=reward, status=Status.COMPLETED)
    made.set_prompt_tokens([1])
    made.append_model([2], [-0.1], EVIL, turn=1)
    made.append_observation([3], origin=Origin.CLOSE, turn=1)
    made.append_observation([4], turn=1)
    made.append_model([2], [-3.0], EVIL, turn=2)
    return made


def write_tokenizer(run: Path) -> None:
    (run / "model").mkdir()
    words = {"?": 0, **{text: number for number, text in TEXTS.items()}}
    Tokenizer(WordLevel(words, unk_token="?")).save(str(run / "model/tokenizer.json"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    with MetricsLogger(ObservabilitySettings(use_tensorboard=False), tmp_path) as logger:
        logger.log(-1, {f"eval/{EVIL[:8]}/reward": 0.25})
        for step in range(6):
            logger.log(step, {"rollout/reward": step / 5, "train/loss": math.nan if step == 2 else 0.1, "odd<b>": 1})
        logger.log(5, {f"eval/{EVIL[:8]}/reward": 0.75})
    (tmp_path / "settings.json").write_text(json.dumps({"rollout": {"env": EVIL}}))
    return tmp_path


@pytest.fixture
def evaluated(run: Path) -> Path:
    with stored(run) as store:
        for step in range(2):
            store.add("eval", "dev", step, [[sample(0, step)]])
    return run


class Tags(HTMLParser):
    """Collects tags, attributes and the text inside token spans."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parse(page: Path) -> Tags:
    tags = Tags()
    tags.feed(page.read_text())
    return tags


def test_nothing_a_model_wrote_is_interpreted(evaluated: Path) -> None:
    page = write_report(evaluated, title=EVIL)
    tags = parse(page)
    assert "script" not in tags.tags
    assert "img" not in tags.tags
    assert not any(name.startswith("on") for name, _ in tags.attributes)
    assert EVIL in tags.texts, "it is shown as it is"


def test_the_page_stands_alone(evaluated: Path) -> None:
    page = write_report(evaluated)
    tags = parse(page)
    assert not {"link", "script", "iframe"} & set(tags.tags)
    assert [v for n, v in tags.attributes if n in ("src", "href")] == []
    assert "url(" not in page.read_text()
    assert "prefers-color-scheme: dark" in page.read_text()


def test_tokens_tell_who_wrote_them(evaluated: Path) -> None:
    page = write_report(evaluated)
    classes = [value for name, value in parse(page).attributes if name == "class"]
    for origin in ("prompt", "model", "close", "env", "model unsure"):
        assert origin in classes
    notes = [value or "" for name, value in parse(page).attributes if name == "data-note"]
    assert any("id 2 · log-prob -0.100 (p 90.5%) · weights" in note for note in notes)


def test_without_trajectories_the_page_says_why(run: Path) -> None:
    text = write_report(run).read_text()
    assert "no trajectories.sqlite lies in this folder" in text
    assert "Reward in training" in text


def stored(folder: Path) -> TrajectoryStore:
    return TrajectoryStore(folder / TRAJECTORIES, 1000)


def test_evaluations_are_paired_by_prompt_and_shown_in_order(run: Path) -> None:
    with stored(run) as store:
        for done, reward in ((0, 0.0), (3, 0.5), (6, 1.0)):
            store.add("eval", "dev", done, [[sample(g, reward)] for g in range(9)])
    text = write_report(run).read_text()
    assert "Prompt 6 " in text
    assert "Prompt 7 " not in text
    assert 'reward <span class="muted">0</span>' in text
    assert 'reward <span class="good">1</span>' in text


def test_pairs_have_the_reward_that_counts_and_one_prompt(run: Path) -> None:
    with stored(run) as store:
        for step in range(2):
            made = [sample(group, 0.0) for group in range(2)]
            for one in made:
                one.reward = {"format": 1.0, "right": 0.25 + step / 2}
            made[1].prompt = f"another file's prompt {step}"
            store.add("eval", "dev", step, [[one] for one in made], reward_key="right")
    text = write_report(run).read_text()
    assert "Prompt 1 " in text
    assert "Prompt 2 " not in text, "the rows have one number and different prompts"
    before, after = text.split('<article class="side">')[1:3]
    assert 'reward <span class="good">0.25</span>' in before
    assert 'reward <span class="good">0.75</span>' in after


def test_ones_own_are_shown_the_best_the_worst_and_what_failed(run: Path) -> None:
    with stored(run) as store:
        failed = sample(7, 0.0)
        failed.status, failed.metadata["failure"] = Status.FAILED, {"blame": "tool", "kind": EVIL, "message": ""}
        store.add("train", "", 0, [[failed]])
        store.drop([sample(5, 0.5)], "zero_std")
        store.add("train", "", 1, [[sample(g, g / 10)] for g in (1, 2, 3, 4, 6)])
        store.add_details(1, {"log_probs": np.full(20, -0.5, np.float16), "advantages": np.full(20, 2, np.float16)})
    page = write_report(run)
    tags, text = parse(page), page.read_text()
    shown = [one for one in tags.texts if " · group " in one]
    assert shown == [
        f"failed: tool/{EVIL} · group 7",
        *("best · group 6", "best · group 4", "worst · group 1", "worst · group 2", "dropped: zero_std · group 5"),
    ]
    assert "Trajectories of training, rollout 2" in text
    assert "in training -0.500 · advantage +2.000" in text
    assert "script" not in tags.tags


def test_long_parts_are_cut_and_say_so(run: Path) -> None:
    long = sample(0, 1.0)
    long.append_model([2] * 4999 + [4], [-0.1] * 5000, turn=3)
    with stored(run) as store:
        store.add("rollout", "", 0, [[long]])
    text = write_report(run).read_text()
    assert text.index("3500 tokens are left out here") < text.rindex("> result<"), "the middle is left out, not the end"
    assert text.count("data-note") < 1600


def test_the_folders_below_a_run_have_reports_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rollouts, evaluation = tmp_path / "rollouts", tmp_path / "evaluation"
    with MetricsLogger(ObservabilitySettings(use_tensorboard=False), rollouts) as logger:
        logger.log(0, {"rollout/reward": 0.5})
    with stored(rollouts) as store:
        store.add("rollout", "", 0, [[sample(1, 0.5)]])
    with stored(evaluation) as store:
        for number in range(2):
            store.add("eval", "dev", number, [[sample(1, number)]])
    row = {"time": 1.0, "set": EVIL, "checkpoint": "model"}
    lines = [{**row, "step": number, "metrics": {"reward": number}} for number in range(2)]
    (evaluation / EVALUATIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    above, below, figures = (write_report(f).read_text() for f in (tmp_path, rollouts, evaluation))
    for text in (above, below):
        assert "agentrl rollout, rollout 1" in text
    for text in (above, figures):
        assert "Trajectories of evaluation 1 of dev" in text
        assert "<td>model</td><td>1</td>" in text
    assert "Trajectories before and after" in figures


def test_wall_time_holds_the_first_step(tmp_path: Path) -> None:
    rows = [{"step": n, "time": 90.0 * n, "rollout/reward": 0.0, "perf/step_seconds": 10.0} for n in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<dt>wall time, without starting</dt><dd>0:01:40</dd>" in write_report(tmp_path).read_text()


def test_without_a_tokenizer_the_ids_are_shown(evaluated: Path) -> None:
    (evaluated / "model/tokenizer.json").unlink()
    text = write_report(evaluated).read_text()
    assert ">4 </span>" in text


def test_no_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected the --output-dir of a run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no metrics yet"):
        write_report(tmp_path)


def test_a_broken_dump_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "0.jsonl"
    file.write_text(json.dumps(sample(0, 1.0).to_dict()) + '\n{"no": 1}\n')
    with pytest.raises(DataError, match=r"0.jsonl line 2"):
        read_groups(file)


def test_headlines_are_first_and_last_of_the_evaluation() -> None:
    rows = [{"step": -1, "eval/dev/reward": 0.25}, {"step": 3, "eval/dev/reward": 0.5}]
    found = headlines(collect_series(rows))
    assert [(h.label, h.before, h.after) for h in found] == [("dev: mean reward", "0.25", "0.5")]
    parts = ["math/easy/reward", "math/hard/reward", "math/hard/env/shop/reward"]
    rows = [{"step": step, **{f"eval/{part}": 0.5 for part in parts}} for step in range(2)]
    assert [h.label for h in headlines(collect_series(rows))] == [
        "math/easy: mean reward",
        "math/hard: mean reward",
        "math/hard/env/shop: mean reward",
    ]
    only = headlines(collect_series([{"step": 0, "rollout/reward": 0.1}, {"step": 1, "rollout/reward": 0.9}]))
    assert [(h.before, h.after) for h in only] == [("0.1", "0.9")]
    assert headlines(collect_series([{"step": 0, "rollout/reward": 0.1}])) == [], "nothing before it"


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    series = Series("loss", ((1.0, 0.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0)))
    line = layout("loss", [("loss", series)]).lines[0]
    assert line.path.count("M") == 2
    assert len(line.dots) == 3
    assert "nan" not in line.path


@pytest.mark.parametrize("large", [1e308, 1e300])
def test_values_as_large_as_floats_get_are_drawn_or_a_gap(large: float) -> None:
    series = Series("loss", ((1.0, -large), (2.0, large), (3.0, 0.0)))
    chart = layout("loss", [("loss", series)])
    assert chart.lines[0].path.count("M") == 1
    assert len(chart.lines[0].dots) == (3 if large == 1e300 else 1)


def test_rows_of_one_step_are_one_point_and_empty_series_vanish() -> None:
    found = collect_series([{"step": 0, "a": 1.0}, {"step": 0, "b": 2.0}, {"step": 1, "c": math.nan}])
    assert set(found) == {"a", "b"}


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.3, 0.98), (-5, 5), (2, 2), (0, 0), (1e-9, 3e-9), (1e7, 3e7), (-1e7, -1e7)]
)
def test_ticks_enclose_the_values_with_round_steps(low: float, high: float) -> None:
    found = ticks(low, high, 4)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8


@pytest.mark.parametrize(
    "values", [[6.0701, 6.0702, 6.0703], [4.31e-7, 4.32e-7], [1000.5, 1001.0, 1001.5], [0, 0.5, 1]]
)
def test_ticks_are_told_apart(values: list[float]) -> None:
    shown = distinct(values)
    assert len(set(shown)) == len(values)
    assert [float(text.replace(",", "")) for text in shown] == pytest.approx(values)


def test_numbers_for_people() -> None:
    assert [number(v) for v in (0.0, 12.0, 1234567.0, 0.12345, 1234.5, 0.00012, math.nan)] == [
        "0",
        "12",
        "1,234,567",
        "0.123",
        "1,234",
        "1.2e-04",
        "nan",
    ]


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    raw = {1: b"a", 2: "日".encode()[:1], 3: "日".encode()[1:2], 4: "日".encode()[2:], 5: b"b"}
    pieces = split_texts([1, 2, 3, 4, 5], lambda ids: b"".join(raw[i] for i in ids).decode(errors="replace"))
    assert pieces == ["a", "", "", "日", "b"]


def test_a_sample_of_user_code_without_segments_tells_by_its_mask() -> None:
    made = Sample(tokens=[1, 2, 4], response_length=2, loss_mask=[1, 0], rollout_log_probs=[-0.1, 0.0])
    assert [t.origin for t in describe_sample(made, texts).tokens] == ["prompt", "model", "env"]


def test_token_texts_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(DataError, match="one text a token"):
        describe_sample(sample(0, 1.0), lambda ids: ["x"])
