"""Take the pictures of docs/viewing.md with a browser (`apt install chromium`).

    python scripts/pictures.py RUNS [--trajectory 0/3160] [--out docs]

RUNS is a folder of runs, for example `runs/demo` after `make demo`. `--trajectory` names the source and the row of the
trajectory in the pictures, as in the address of its page. By default it is the last trained one without a reward.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

PHONE = 420
"""Width of a narrow picture."""


def take(browser: Browser, url: str, file: Path, width: int, height: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(url)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1000)  # curves are drawn with an animation
    page.screenshot(path=file)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs")
    parser.add_argument("--trajectory", default="")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "agentrl", "view", options.runs, "--port", "0", "--no-browser"]
    viewer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert viewer.stdout is not None
    try:
        base = next(found[0] for line in viewer.stdout if (found := re.search(r"http://\S+", line)))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), chromium_sandbox=False)
            page, chosen = browser.new_page(), f"/t/{options.trajectory}"
            if not options.trajectory:
                page.goto(f"{base}/?kind=train&reward=<=0")
                chosen = str(page.locator("a.row").first.get_attribute("href"))
            page.goto(base + chosen)
            beside = str(page.locator("a.side").get_attribute("href"))
            for name, path, width, height in (
                ("table", "/?kind=train", 1300, 640),
                ("table-narrow", "/?kind=train", PHONE, 760),
                ("trajectory", chosen, 1300, 760),
                ("trajectory-narrow", chosen, PHONE, 860),
                ("beside", beside, 1300, 640),
                ("curves", "/curves", 1300, 800),
            ):
                take(browser, base + path, options.out / f"viewing-{name}.png", width, height)
    finally:
        viewer.terminate()
        viewer.wait()


if __name__ == "__main__":
    main()
