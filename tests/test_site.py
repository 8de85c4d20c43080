"""The documentation as a site: built without a warning, and without external resources."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from agentrl.config.fields import all_fields

ROOT = Path(__file__).parents[1]
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|link(?=[^>]*stylesheet))[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)

_HREF = re.compile(r"<a\b[^>]*?\bhref=[\"']?([^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr  # strict does not count what -q hides
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert {url for page in site.rglob("*.html") for url in _LOADED.findall(page.read_text())} == set()
    assert [
        sheet.name for sheet in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", sheet.read_text())
    ] == []


@pytest.mark.slow
def test_internal_links_lead_to_pages_and_places(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    places = {page: set(re.findall(r"\bid=[\"']?([^\"'\s>]+)", text)) for page, text in pages.items()}
    links = [(page, html.unescape(link)) for page, text in pages.items() for link in _HREF.findall(text)]
    inside = [(page, link) for page, link in links if not re.match(r"[a-z]+:", link)]
    lost = []
    for page, link in inside:
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (place and unquote(place) not in places.get(target, {unquote(place)})):
            lost.append(f"{page.name}: {link}")
    assert len(inside) > 1000
    assert lost == []


@pytest.mark.slow
def test_every_setting_and_formula_is_there(site: Path) -> None:
    settings = (site / "settings.html").read_text()
    assert [name for name in all_fields() if f'id="{name}"' not in settings] == []
    algorithms = (site / "algorithms.html").read_text()
    assert algorithms.count('<svg class="formula"') > 50
    assert "\\frac" not in re.sub(r'aria-label="[^"]*"', "", algorithms)
