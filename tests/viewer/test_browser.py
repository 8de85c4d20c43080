"""`agentrl view` in a browser: what people see, type and press."""

import asyncio
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from agentrl.buffer.store import TrajectoryStore
from tests.support.agent_runs import write_agent_run
from tests.support.viewed import EVIL, write_metrics, write_run, write_step
from tests.viewer.conftest import viewed

pytestmark = pytest.mark.browser
PAGES = ["/", "/curves", "/t/0/2?at=1", "/side?rows=0.1,0.2,0.3,0.4"]


def counted(page: Page) -> Locator:
    return page.locator(".counted")


def type_in(page: Page, field: str, text: str) -> None:
    page.fill(f"input[name={field}]", text)
    page.press(f"input[name={field}]", "Enter")


def test_filter_and_search(page: Page) -> None:
    page.goto("/")
    expect(counted(page)).to_have_text("50 trajectories")
    page.select_option("select[name=status]", "failed")
    expect(counted(page)).to_have_text("1 trajectory")
    expect(page.locator("tbody tr")).to_contain_text("tool/timeout")
    page.click("text=clear")
    expect(counted(page)).to_have_text("50 trajectories")
    type_in(page, "reward", "<1")
    expect(counted(page)).to_have_text("12 trajectories")
    type_in(page, "search", "SEVEN")
    expect(counted(page)).to_have_text("12 trajectories")
    type_in(page, "search", "nowhere")
    expect(page.locator(".empty")).to_be_visible()
    page.go_back()
    expect(counted(page)).to_have_text("12 trajectories")
    assert page.input_value("input[name=search]") == "SEVEN"


def test_a_range_that_is_none_is_told(page: Page) -> None:
    page.goto("/?reward=high")
    expect(page.get_by_role("alert")).to_contain_text("'high' is no range: write 3, 2..5")


def test_sort_and_turn_pages(page: Page) -> None:
    page.goto("/?kind=train+&order=id")
    page.click("th >> text=tokens")
    expect(page.locator("tbody tr").first).to_contain_text("106")
    page.click("th >> text=tokens")
    expect(page.locator("tbody tr").first).to_contain_text("16")
    page.goto("/")
    expect(page.locator(".pages")).to_have_count(0)


def test_open_one_and_point_at_its_tokens(page: Page) -> None:
    page.goto("/?kind=train+&order=id")
    page.click("tbody tr:nth-child(2)")
    expect(page.locator("h1")).to_have_text("first · train 0 · group 0 · sample 1")
    page.locator(".model-part .model").first.hover()
    expect(page.locator("#note")).to_contain_text(
        re.compile(r"model · id 7 · log-prob -0.100 \(p 90.5%\) · in training -1.\d+ · advantage \+1.\d+ · weights 0")
    )
    folded = page.locator("details.env-part")
    expect(folded.locator(".tokens")).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.locator(".tokens")).to_be_visible()


def test_keys(page: Page) -> None:
    page.goto("/?kind=train+&order=id")
    page.locator("a.row").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    title = page.locator("h1")
    expect(title).to_contain_text("group 0 · sample 1")
    page.keyboard.press("j")
    expect(title).to_contain_text("group 0 · sample 2")
    page.keyboard.press("k")
    expect(title).to_contain_text("group 0 · sample 1")
    page.keyboard.press("o")
    expect(page.locator("details.env-part .tokens")).to_be_visible()
    page.locator(".model-part .tokens").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#note")).to_contain_text("multiply")
    page.keyboard.press("s")
    expect(page.locator(".columns .card")).to_have_count(4)
    page.keyboard.press("Escape")
    expect(title).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("a.row").first.wait_for()
    page.keyboard.press("/")
    expect(page.locator("input[name=search]")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()


def test_a_run_is_shown_while_it_goes_on(page: Page, runs: Path) -> None:
    page.goto(f"/?source={1 + zlib.crc32(b'young/trajectories.sqlite') % 10**8}")
    expect(page.get_by_role("alert")).to_contain_text("no trajectories here yet")
    run = write_run(runs / "young", steps=1)
    expect(counted(page)).to_have_text("14 trajectories")
    assert page.locator("select[name=source] option:checked").inner_text() == "young"
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.dataset.id")
    with TrajectoryStore(run / "trajectories.sqlite", 1000) as store:
        write_step(store, 1)
        expect(counted(page)).to_have_text("26 trajectories")
        assert page.evaluate("document.activeElement.dataset.id") == focused
    page.goto("/curves")
    steps = page.locator(".runs tbody tr").nth(2).locator("td").nth(1)
    expect(steps).to_have_text("1")
    write_metrics(run, range(1, 5))
    expect(steps).to_have_text("5")
    expect(page.locator(".charts canvas")).to_have_count(4)


def test_what_a_model_wrote_is_shown_and_never_run(page: Page) -> None:
    page.goto("/?kind=eval+dev+set&order=id")
    page.click("tbody tr:first-child")
    token = page.locator(".model-part .model").nth(2)
    expect(token).to_have_text(EVIL)
    token.hover()
    expect(page.locator("#note")).to_contain_text("onerror=window.hurt=1>")
    page.click(".about summary")
    expect(page.locator(".about pre")).to_contain_text("onerror")
    for path in (*PAGES, "/curves?all=1", "/t/0/50", f"/?search={EVIL}&kind={EVIL}&status={EVIL}", f"/t/{EVIL[1:7]}/1"):
        page.goto(path)
        page.locator(".page > *").first.wait_for()
        assert page.evaluate("window.hurt") is None, path
        assert page.locator(".page img, .page script").count() == 0


def test_the_session_of_an_agent(page: Page, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:  # this thread has Playwright's event loop
        run = pool.submit(asyncio.run, write_agent_run(tmp_path / "agents")).result()
    with viewed(run, None) as address:
        own = page.context.browser
        assert own is not None
        other = own.new_page(base_url=address, viewport={"width": 420, "height": 860})
        other.goto("/?order=id")
        other.select_option("select[name=branch]", "retry")
        expect(counted(other)).to_have_text("2 trajectories")
        other.click("tbody tr:first-child")
        panel = other.locator("details.session")
        expect(panel.locator("summary")).to_contain_text("7 turns, 4 roots, 4 samples")
        expect(panel).to_contain_text(EVIL)
        assert other.evaluate("document.documentElement.scrollWidth") == 420
        panel.locator("a", has_text="sample 2").click()
        expect(other.locator("h1")).to_contain_text("sample 2")
        expect(panel.locator("tr.here")).to_have_count(1)
        assert other.evaluate("window.hurt") is None
        other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_narrow_screens_and_both_schemes(page: Page, path: str, scheme: str) -> None:
    page.set_viewport_size({"width": 420, "height": 860})
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(path)
    page.locator(".page > *").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert not page.locator(".wide").first.is_visible()
    background = "getComputedStyle(document.body).backgroundColor"
    both = ("rgb(255, 255, 255)", "rgb(15, 18, 22)")
    first, second = both if scheme == "light" else both[::-1]
    assert page.evaluate(background) == first
    page.keyboard.press("d")
    assert page.evaluate(background) == second
