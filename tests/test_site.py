"""The documentation as a site: built without a warning, and without anything from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.fields import all_fields

ROOT = Path(__file__).parents[1]
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|link(?=[^>]*stylesheet))[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert {url for page in site.rglob("*.html") for url in _LOADED.findall(page.read_text())} == set()
    assert [
        sheet.name for sheet in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", sheet.read_text())
    ] == []


@pytest.mark.slow
def test_every_setting_and_formula_is_there(site: Path) -> None:
    settings = (site / "settings.html").read_text()
    assert [name for name in all_fields() if f'id="{name}"' not in settings] == []
    algorithms = (site / "algorithms.html").read_text()
    assert algorithms.count('<svg class="formula"') > 50
    assert "\\frac" not in re.sub(r'aria-label="[^"]*"', "", algorithms)
