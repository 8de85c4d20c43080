"""The viewer's lists, filters and searches, without a browser."""

import html
import math
import re
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from urllib.parse import parse_qsl, urlsplit

import pytest
from click.testing import CliRunner

from agentrl.buffer.reader import Filter
from agentrl.buffer.store import TrajectoryStore
from agentrl.cli.main import run as agentrl
from agentrl.cli.view import command
from agentrl.errors import DataError, SettingsError
from agentrl.viewer import curves, table, trajectory
from agentrl.viewer.library import Library
from agentrl.viewer.query import Query, parse_range
from agentrl.viewer.search import TextIndex
from tests.support.viewed import EVIL, write_metrics, write_run, write_step
from tests.support.viewed import trajectory as viewed_trajectory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", (3, 3)),
        (" 2..5 ", (2, 5)),
        ("2..", (2, None)),
        ("..-5", (None, -5)),
        (">=0.5", (0.5, None)),
        ("<1e3", (None, math.nextafter(1e3, 0))),
        (">0", (math.nextafter(0, 1), None)),
    ],
)
def test_ranges_as_people_write_them(text: str, expected: tuple[float, float]) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", ["high", "..", "1..2..3", "=3", "1.2.3", ">", EVIL])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"is no range: write 3, 2\.\.5"):
        parse_range(text)


def test_a_query_is_a_filter_and_its_address() -> None:
    query = Query({"kind": "eval dev set", "status": "failed", "dropped": "(none)", "reward": ">=0", "page": "x"})
    equal = {"kind": "eval", "name": "dev set", "status": "failed", "dropped": ""}
    assert query.filter([3]) == Filter(equal, {"reward": (0, None)}, ids=[3])
    assert (query.page, query.source, query.order, query.at) == (1, 0, "-id", None)
    assert Query({"status": "failed", "page": "2"}).url(page=None, tool="a&b") == "/?status=failed&tool=a%26b"


def test_runs_are_found_in_folders_of_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=1)
    write_run(tmp_path / "more" / "c", steps=1)
    (tmp_path / "nothing").mkdir()
    library = Library([tmp_path, tmp_path / "a"])
    assert [run.name for run in library.runs] == ["a", "c"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "rollouts").mkdir()
    shutil.move(tmp_path / "b" / "trajectories.sqlite", tmp_path / "b" / "rollouts")
    library.refresh()
    assert [source.name for source in library.sources] == ["a", "c", "b/rollouts"]
    with pytest.raises(SettingsError, match=r"nothing: no run here; give the --output-dir"):
        Library([tmp_path / "nothing"])


def test_a_folder_without_runs_is_told_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agentrl(["view", str(tmp_path)]) == 2
    assert f"{tmp_path}: no run here" in capsys.readouterr().err
    assert "FOLDER" in CliRunner().invoke(command, ["--help"]).output


def test_a_store_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    source = Library([write_run(tmp_path / "a", steps=2)]).sources[0]
    assert source.reader.count() == 26
    before = source.stamp
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(DataError, match="is not there any more"):
        _ = source.reader
    write_run(tmp_path / "a", steps=1)
    assert source.reader.count() == 14
    assert source.stamp != before


def found(index: TextIndex, words: str) -> list[int]:
    """Return the results after everything has been read."""
    index.find(words)
    assert index.wait(120)
    return index.find(words)


def test_texts_are_found_also_those_added_since(tmp_path: Path) -> None:
    source = Library([write_run(tmp_path / "a", steps=1)]).sources[0]
    wrong = [row.id for row in source.reader.query(Filter(within={"reward": (0, 0)}))]
    assert found(source.index, "SEV times") == wrong
    assert source.index.note() == ""
    assert found(source.index, "seven nowhere") == found(source.index, ' "( ') == []
    with TrajectoryStore(source.path, 1000) as store:
        write_step(store, 1)
    assert len(found(source.index, "seven")) == len(wrong) + 3 + 1  # and the one that failed
    again = TextIndex(source.path)
    assert again.find("seven") == source.index.find("seven"), "the file is kept"


def test_an_index_that_failed_is_tried_again_when_there_is_more(tmp_path: Path) -> None:
    source = Library([write_run(tmp_path / "a", steps=1)]).sources[0]
    source.index.path.mkdir()  # at its place
    source.index._start()
    assert source.index.wait(120)
    with pytest.raises(DataError, match="cannot be indexed"):
        source.index.find("seven")
    source.index.path.rmdir()
    with TrajectoryStore(source.path, 1000) as store:
        write_step(store, 1)
    assert found(source.index, "seven")


def test_two_make_the_same_index_at_once(tmp_path: Path) -> None:
    for i in range(20):
        store, together = tmp_path / str(i) / "trajectories.sqlite", Barrier(2)
        store.parent.mkdir()

        def begin(store: Path = store, together: Barrier = together) -> None:
            together.wait(120)
            with closing(TextIndex(store)._open()) as db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO state VALUES ('it', 1)")
                db.execute("COMMIT")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: begin(), range(2)))
        with closing(TextIndex(store)._open()) as db:
            assert db.execute("SELECT count(*) FROM state").fetchone() == (2,)
        assert [file.name for file in store.parent.iterdir()] == ["trajectories.texts.sqlite"]


def test_names_with_underscores_are_found_by_their_words(tmp_path: Path) -> None:
    index = Library([write_run(tmp_path / "a", steps=1)]).sources[0].index
    assert found(index, "seven_times") == found(index, "seven times")
    assert found(index, "__seven__")


def test_the_table_and_its_choices_follow_the_store(tmp_path: Path) -> None:
    library = Library([write_run(tmp_path / "a", steps=1)])
    source, query = library.sources[0], Query({"search": "seven"})
    found(source.index, "seven")
    assert "\n4 trajectories" in f"\n{re.sub('<.*?>', '', table.rows(library, query)).strip()}"
    assert "train (12)" in table.form(library, query)
    with TrajectoryStore(source.path, 1000) as store:
        write_step(store, 1)
    assert "train (24)" in table.form(library, query)


def test_an_index_of_another_store_is_made_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=3)
    count = len(found(TextIndex(folder / "trajectories.sqlite"), "times"))
    write_run(tmp_path / "b", steps=1)
    shutil.move(tmp_path / "b" / "trajectories.sqlite", folder / "trajectories.sqlite")
    assert len(found(TextIndex(folder / "trajectories.sqlite"), "times")) == count - 24


def test_without_a_writable_folder_the_index_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert TextIndex(tmp_path / "trajectories.sqlite").path.parent == tmp_path / "cache" / "agentrl"


def test_neighbours_follow_the_table(tmp_path: Path) -> None:
    library = Library([write_run(tmp_path / "a", steps=1)])
    source = library.sources[0]
    query = Query({"order": "-reward", "kind": "train ", "at": "3"})
    rows = source.reader.query(query.filter(None), query.order)
    for at, row in enumerate(rows):
        found, before, after = table.neighbours(library, query, (source.number, row.id))
        assert found == at
        assert before == ((source, rows[at - 1]) if at else None)
        assert after == ((source, rows[at + 1]) if at + 1 < len(rows) else None)
    assert table.neighbours(library, Query({"kind": "eval "}), (source.number, rows[0].id))[1:] == (None, None)


@pytest.mark.parametrize("groups", [2, 40])
def test_neighbours_stay_while_a_run_adds_rows(tmp_path: Path, groups: int) -> None:
    library = Library([write_run(tmp_path / "a", steps=1)])
    source, query = library.sources[0], Query({"at": "1"})
    rows = source.reader.query(Filter(), query.order)
    with TrajectoryStore(source.path, 1000) as store:
        write_step(store, 1, groups=groups)
    at, before, after = table.neighbours(library, query, (source.number, rows[1].id))
    assert at == 1 + 4 * groups
    assert (before, after) == ((source, rows[0]), (source, rows[2]))
    page = trajectory.one(library, (source.number, rows[1].id), query)
    assert re.findall(r'rel="(prev|next)" href="([^"]*)"', page) == [
        ("prev", f"/t/{source.number}/{rows[0].id}?at={at - 1}"),
        ("next", f"/t/{source.number}/{rows[2].id}?at={at + 1}"),
    ]


def test_the_group_in_columns_begins_with_the_open_one_and_leads_back(tmp_path: Path) -> None:
    library = Library([write_run(tmp_path / "a", steps=1, groups=1, size=16)])
    page = trajectory.one(library, (0, 12), Query({"at": "3", "status": "completed"}))
    assert '/t/0/2?at=3&amp;status=completed"' in page, "links to the group keep the table"
    link = re.findall(r'class="side" href="([^"]*)"', page)[0]
    query = Query(dict(parse_qsl(urlsplit(html.unescape(link)).query)))
    columns = trajectory.beside(library, trajectory.read_places(query.given["rows"]), query)
    assert columns.count("<article") == 8
    assert "8 more, left out" in columns
    back = '"/t/0/12?at=3&amp;status=completed"'
    assert f'<a class="up" href={back}' in columns
    assert columns.partition("<article")[2].partition("<h2>")[2].startswith(f"<a href={back}>a · train 0 · 0·11</a>")


def damage_metrics(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\0\n")


def make_older(run: Path) -> None:
    with closing(sqlite3.connect(run / "trajectories.sqlite")) as db:
        db.execute("PRAGMA user_version=3")


@pytest.mark.parametrize("harm", [damage_metrics, make_older, shutil.rmtree])
def test_a_bad_run_does_not_hide_the_others(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    write_run(tmp_path / "a", steps=2)
    write_run(tmp_path / "b", steps=3)
    library = Library([tmp_path])
    a, b = library.sources
    harm(tmp_path / "a")
    library = library if harm is shutil.rmtree else Library([tmp_path])
    library.refresh()
    first = a if harm is damage_metrics else b
    assert library.source(0).name == first.name
    assert f'<option value="{first.number}" selected>' in table.form(library, Query({}))
    every = table.rows(library, Query({"source": "all"}))
    assert ("cannot be opened: a" in every) == (first is b)
    assert f"{a.name}</td>" in every or first is b
    runs = curves.overview(library)
    assert "b (38)" in runs
    assert ("metrics.jsonl line 3: not valid JSON" in runs) == (harm is damage_metrics)
    assert ("a (cannot be opened)" in runs) == (harm is make_older)
    assert len(curves.charts(library, everything=False)["Loss"]["series"]) == 1 + (harm is make_older)
    if harm is make_older:
        with pytest.raises(DataError, match="expected a trajectory store of layout 4, got 3"):
            table.form(library, Query({"source": str(a.number)}))


def test_chinese_and_japanese_are_found_by_their_characters(tmp_path: Path) -> None:
    said = ["请计算三加五等于几？", "東京の人口は何人ですか", "서울의 인구", "plain 7"]
    with TrajectoryStore(tmp_path / "trajectories.sqlite", 100) as store:
        store.add("train", "", 0, [[replace(viewed_trajectory(0, 0), prompt=prompt)] for prompt in said])
    index = TextIndex(tmp_path / "trajectories.sqlite")
    texts = {
        "三加五": [1],
        "计": [1],
        "人口": [2],
        "ですか": [2],
        "東京三": [],
        "인구": [3],
        "plain": [4],
        "pla 7": [4],
    }
    assert {text: found(index, text) for text in texts} == texts


def test_an_index_of_an_earlier_form_is_made_anew(tmp_path: Path) -> None:
    source = Library([write_run(tmp_path / "a", steps=1)]).sources[0]
    assert found(source.index, "seven")
    with closing(source.index._open()) as db:
        (identity,) = db.execute("SELECT store FROM state").fetchone()
        db.execute("UPDATE state SET store=?", (identity.split()[0],))
        db.execute("INSERT INTO texts(texts) VALUES ('delete-all')")
    assert found(TextIndex(source.path), "seven")


def test_an_address_means_the_same_run_in_each_viewer(tmp_path: Path) -> None:
    write_run(tmp_path / "z", steps=1)
    first = Library([tmp_path])
    write_run(tmp_path / "a", steps=1)
    first.refresh()
    for number, path in ((source.number, source.path) for source in first.sources):
        assert Library([tmp_path]).source(number).path == path


def test_a_folder_of_another_user_hides_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", steps=1)
    (tmp_path / "private").mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    library = Library([tmp_path])
    library.refresh()
    assert [one.folder for one in library.runs] == [run]


def test_all_sources_are_one_table(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steps=3)
    write_run(tmp_path / "b", steps=2)
    library = Library([tmp_path])
    a, b = library.sources
    every = [(source, row) for source in (a, b) for row in source.reader.query()]
    query = Query({"source": "all", "order": "-reward"})
    shown = table._read(table.search(library, query)[0], query.order, 1000, 0)
    for at, (source, row) in enumerate(shown):
        around = (shown[at - 1] if at else None, shown[at + 1] if at + 1 < len(shown) else None)
        assert table.neighbours(library, query, (source.number, row.id)) == (at, *around)
    rewards = [one[1].reward for one in shown]
    assert sorted(map(repr, shown)) == sorted(map(repr, every)), "each once"
    assert rewards == [1.0] * rewards.count(1.0) + [0.0] * rewards.count(0.0) + [None] * 2
    pages = [table.rows(library, Query({**query.given, "page": page})) for page in "12"]
    assert [page.count('class="row"') for page in pages] == [50, len(every) - 50]
    links = re.findall(r'href="/t/(\d+)/(\d+)\?', "".join(pages))
    assert links == [(str(one[0].number), str(one[1].id)) for one in shown]
    assert f"{len(every)} trajectories" in pages[0]
    first = pages[0].partition("<tbody>")[2].partition("</tr>")[0]
    assert first.count("<td") == pages[0].count("<th ") + pages[0].count("<th>")
    form = table.form(library, query)
    assert '<option value="all" selected>' in form
    assert "train (60)" in form
    middle = trajectory.one(library, (shown[40][0].number, shown[40][1].id), Query({**query.given, "at": "40"}))
    assert (
        len(re.findall(r'rel="(?:prev|next)" href="/t/\d+/\d+\?source=all&amp;order=-reward&amp;at=(?:39|41)"', middle))
        == 2
    )
    newest = re.findall(r'href="/t/(\d+)/', table.rows(library, Query({"source": "all"})))[0]
    assert newest == str(b.number), "by the time of storing"
    (tmp_path / "a" / "trajectories.sqlite").unlink()
    assert table.rows(library, query).count('class="row"') == b.reader.count()


def test_a_reward_of_zero_is_not_coloured(tmp_path: Path) -> None:
    page = table.rows(Library([write_run(tmp_path / "a", steps=1)]), Query({"reward": "0"}))
    assert '<td class="muted">0</td>' in page
    assert 'class="bad"' not in page


def test_the_page_begins_with_label_and_parts_of_the_reward(tmp_path: Path) -> None:
    sample = viewed_trajectory(0, 0)
    sample.reward = {"total": 0.5, "format": -1.0}
    sample.metadata["grade"] = {"parts": {"recall": 0.25}, "extracted": EVIL, "reason": "one of two"}
    with TrajectoryStore(tmp_path / "trajectories.sqlite", 10, reward_key="total") as store:
        store.add("train", "", 0, [[sample]])
    page = trajectory.one(Library([tmp_path]), (0, 1), Query({})).partition("<article")[0]
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    for said in (
        "reward 0.5",
        "recall 0.25",
        "total 0.5",
        "format -1",
        "label 42",
        f"extracted {EVIL}",
        "reason one of two",
    ):
        assert said in text
    assert '<span class="bad">-1' in page


def test_pages_name_what_is_gone_and_what_is_not_known(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=1)
    library = Library([folder])
    with pytest.raises(DataError, match="has trajectory 999 no more: the oldest go first"):
        trajectory.one(library, (0, 999), Query({}))
    with pytest.raises(DataError, match="no trajectories here yet"):
        library.source(5)
    with pytest.raises(DataError, match="nothing to compare"):
        trajectory.beside(library, trajectory.read_places(f"x,1,1.2.3,-1.2,0.{10**20}"), Query({}))
    shutil.rmtree(folder / "model")
    page = trajectory.one(Library([folder]), (0, 1), Query({}))
    assert "no tokenizer.json where it was: token ids are shown" in page


def test_a_page_of_several_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([write_run(tmp_path / "a", steps=1)])
    places = [(0, row) for row in range(1, 5)]
    assert trajectory.beside(library, places, Query({})).count("<article") == 4
    monkeypatch.setattr(trajectory, "_MOST", 150)  # they have 16 and 106 tokens alternately
    page = trajectory.beside(library, places, Query({}))
    assert page.count("<article") == 3
    assert "1 more, left out" in page


def test_runs_share_charts_and_colours(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 2)):
        write_run(tmp_path / name, steps=steps)
    library = Library([tmp_path])
    shown = curves.charts(library, everything=False)
    assert [line["name"] for line in shown["Loss"]["series"]] == ["a", "b"]
    assert [len(line["data"]) for line in shown["Loss"]["series"]] == [3, 2]
    assert EVIL in curves.charts(library, everything=True)
    write_metrics(tmp_path / "b", [2, 3])
    assert len(curves.charts(library, everything=False)["Loss"]["series"][1]["data"]) == 4
