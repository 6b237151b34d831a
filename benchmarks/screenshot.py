"""Takes a screenshot of a running service's dashboard: `python -m benchmarks.screenshot URL FILE.png`"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Selects elements that appear when the page is complete: a job with its curve or a note, help to start the first job,
# or boxes.
_SETTLED = ", ".join(
    (
        "#chart:visible .main-svg",
        "#chart-note:visible:not(:text('Reading'))",
        "#detail-none:visible",
        "#empty:visible",
        ".box:visible",
    )
)
_SETTLE_MS = 800


class NoBrowserError(RuntimeError):
    """Raised if no Chromium is installed."""


def find_browser() -> str:
    """Returns the path of an installed Chromium. Raises NoBrowserError if there is none."""
    for name in _BROWSERS:
        if path := shutil.which(name):
            return path
    raise NoBrowserError(f"none of {', '.join(_BROWSERS)} is installed; on Debian: apt-get install chromium")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Opens a headless browser without background network traffic."""
    path = find_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def take_screenshot(page: Page, path: Path) -> None:
    """Writes a screenshot once the page is complete."""
    page.wait_for_selector(_SETTLED)
    page.wait_for_timeout(_SETTLE_MS)
    page.screenshot(path=path)


def main() -> None:
    """Takes a screenshot with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshot", description=__doc__)
    parser.add_argument(
        "url",
        help="the dashboard; with #/jobs/ID a certain job, with #/boxes the boxes, else one that trains or the newest",
    )
    parser.add_argument("path", type=Path, help="the PNG to write")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=860)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with open_browser() as browser:
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto(options.url)
        take_screenshot(page, options.path)
    print(f"{options.path}: {options.path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
