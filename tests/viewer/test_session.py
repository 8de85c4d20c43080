"""The session of an agent on the page of a trajectory, and the columns and filters of agents."""

import re
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentrl.groups import Group
from agentrl.sample import Sample
from agentrl.viewer import table, trajectory
from agentrl.viewer.library import Library
from agentrl.viewer.query import Query, macro
from agentrl.viewer.session import session_of
from agentrl.viewer.trajectory import load
from tests.support.agent_runs import write_agent_run
from tests.support.viewed import EVIL, write_run


class Elements(HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes = set[str](), set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def plain(text: str) -> str:
    """Return the text of a piece of HTML."""
    return " ".join(unescape(re.sub(r"<.*?>", "", text)).split())


def panel(page: str) -> list[list[str]]:
    """Return the texts of the cells of the session's table, row by row."""
    text = page.partition('class="about session"')[2].partition("</table>")[0]
    rows = re.findall(r"<tr.*?</tr>", text, re.S)
    return [[plain(cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.S)] for row in rows]


async def test_a_page_shows_the_whole_session_with_dropped_turns(tmp_path: Path) -> None:
    library = Library([await write_agent_run(tmp_path / "run")])
    found = library.sources[0].reader.query()
    each = [("main", "new_agent"), ("main", "retry"), ("main", "edited"), ("subagent", "new_agent")]
    assert [(row.role, row.branch) for row in found] == each * 2
    first, second, other = found[0], found[1], found[4]
    page = trajectory.one(library, (0, second.id), Query({}))
    _, (side,), title, (main,), begun, retried, again, last, (more,), edited, (sub,), helped = panel(page)
    assert (side, main, more, sub) == ("side", "main", "main", f"subagent · {EVIL}")
    assert title[:2] == ["0", "first"]
    assert title[-1].startswith(f"dropped: side {EVIL}")
    names = [(row[0], row[1], row[4], row[5]) for row in (begun, retried, again, last, edited, helped)]
    assert names == [
        ("1", "new_agent", "stop", "sample 0 sample 1"),
        ("2", "extend", "stop", "sample 0"),
        ("3", "retry", "stop", "sample 1"),
        ("4", "extend", "stop", "sample 1"),
        ("5", "edited", "stop", "sample 2"),
        ("6", "new_agent", "stop", "sample 3"),
    ]
    turns = (title, begun, retried, again, last, edited, helped)
    sample = library.sources[0].reader.group(second.key)[0]
    assert sum(int(row[3]) for row in turns) == sample.metadata["counters"]["agent/sampled"]
    assert int(begun[2]) == sample.prompt_length
    assert page.count("<tr class=here>") == 3, "the turns of this sample"
    assert f'<a href="/t/0/{first.id}">sample 0</a>' in page
    assert re.search(r"<details class=\"about session\" open><summary>(.*?)</summary>", page)
    said = f"7 turns, 4 roots, 4 samples, 1 refused request, {title[3]} tokens dropped: side"
    assert f"session of an agent: {said}" in page
    assert re.search(r"refused:</span> .*\bn\b", page)
    assert "sample 4" not in str(panel(page)), "another session of the group"
    assert "sample 4" in str(panel(trajectory.one(library, (0, other.id), Query({}))))


async def test_texts_of_agents_and_models_are_never_html(tmp_path: Path) -> None:
    library = Library([await write_agent_run(tmp_path / "run")])
    for row in library.sources[0].reader.query():
        page = trajectory.one(library, (0, row.id), Query({}))
        elements = Elements(page)
        assert plain(page).count(EVIL) >= 2, "the agent's name and the dropped text"
        assert not elements.tags & {"script", "img", "style"}
        assert not [name for name in elements.attributes if name.startswith("on") or name == "style"]


def cells(page: str) -> int:
    """Return the number of cells in the first row."""
    return page.partition("<tbody>")[2].partition("</tr>")[0].count("<td")


async def test_the_table_filters_by_role_and_branch(tmp_path: Path) -> None:
    library = Library([await write_agent_run(tmp_path / "run"), write_run(tmp_path / "other", steps=1)])
    form = table.form(library, Query({"branch": "retry"}))
    assert 'value="subagent">subagent (2)' in form
    assert 'value="retry" selected>retry (2)' in form
    for given, count in (({"role": "subagent"}, 2), ({"role": "main"}, 6), ({"branch": "edited", "role": "main"}, 2)):
        page = table.rows(library, Query(given))
        assert page.count('class="row"') == count
        assert "<td>main</td>" in page or "<td>subagent</td>" in page
        assert page.count("<th ") + page.count("<th>") == cells(page)
    other = Query({"source": str(library.sources[1].number)})
    page = table.rows(library, other)
    assert "order=-role" not in page
    assert page.count("<th ") + page.count("<th>") == cells(page)
    assert 'name="role"' not in table.form(library, other)


def turn(number: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    return {"number": number, "parent": parent, "reason": "extend", "prompt_tokens": 9, "sampled_tokens": 2, **more}


def sample(index: int, nodes: list[int], **about: Any) -> Sample:
    made = Sample(index=index, rollout_id=0)
    made.metadata["gateway"] = {"nodes": nodes, **about}
    return made


def record(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"turns": [*turns]}


def places(group: Group, place: int = 0) -> list[tuple[int, int, Sequence[int]]]:
    """Return number, depth and samples of each turn."""
    shown = session_of(group, place)
    assert not isinstance(shown, str)
    return [(one.record.number, one.depth, one.samples) for one in shown.turns]


def test_the_longest_branch_keeps_its_depth() -> None:
    session = record(turn(0), turn(1, 0), turn(2, 0), turn(3, 2), turn(4, 1), turn(5, 3), turn(6, 2), turn(7))
    group = [sample(0, [0, 1, 4], session=session), sample(0, [0, 2, 3, 5]), sample(0, [0, 2, 6])]
    assert places(group) == [
        (0, 0, [0, 1, 2]),
        (1, 1, [0]),
        (4, 1, [0]),
        (2, 0, [1, 2]),
        (6, 1, [2]),
        (3, 0, [1]),
        (5, 0, [1]),
        (7, 0, []),
    ]
    deep = [turn(number, (number - 1) // 2 if number else None) for number in range(255)]
    found = places([sample(0, [0], session=record(*deep))])
    assert max(depth for _, depth, _ in found) == 6, "of seven levels"
    assert sorted(number for number, _, _ in found) == [*range(255)]


def test_a_turn_of_many_samples_has_some_links() -> None:
    group = [sample(0, [0], session=record(turn(0), turn(1, 0))), *(sample(0, [0]) for _ in range(8))]
    page = macro("page.html", "session")(session_of(group, 0), {at: f"/t/0/{at}" for at in range(9)})
    assert re.findall(r"/t/0/(\d)", page) == [*"012345"]
    assert "and 3 more" in page
    assert page.count("in no stored sample") == 1


def test_a_session_is_one_path_of_a_group() -> None:
    group = [sample(0, [0], session=record(turn(0))), Sample(index=1, rollout_id=1)]
    assert session_of(group, 1) == ""
    shown = session_of(group, 0)
    assert not isinstance(shown, str)
    assert shown.plain


@pytest.mark.parametrize("given", ["text", {"turns": 1}, record(turn(0, 0)), record(turn(0), turn(0))])
def test_a_record_that_cannot_be_read_is_told(given: Any) -> None:
    assert session_of([sample(0, [0], session=given)], 0) == "The record of this agent's session cannot be read."


async def test_the_page_of_a_store_without_sessions_has_no_panel(tmp_path: Path) -> None:
    library = Library([write_run(tmp_path / "run", steps=1)])
    assert "session of an agent" not in trajectory.one(library, (0, 1), Query({}))


async def test_metadata_does_not_repeat_the_session(tmp_path: Path) -> None:
    library = Library([await write_agent_run(tmp_path / "run")])
    about = load(library, (0, library.sources[0].reader.query()[0].id), Query({})).about
    assert '"role": "main"' in about
    assert '"turns"' not in about
