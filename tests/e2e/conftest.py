"""Fixtures of the e2e tests: an installation, a live service and browser pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page

from benchmarks.screenshot import NoBrowserError, find_browser, open_browser
from tests.e2e.installation import Installation, free_port
from tests.e2e.live_service import LiveService
from tests.e2e.pages import PATIENCE_MS, OpenPage

# Chromium prints this while the service is away; a page can't prevent it.
_CONNECTION_LOST = re.compile(r"net::ERR_(CONNECTION|INCOMPLETE_CHUNKED|EMPTY_RESPONSE|NETWORK)")


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """A fresh installation that leaves no process running."""
    installation = Installation(home=tmp_path / "home", port=free_port())
    yield installation
    installation.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        find_browser()
    except NoBrowserError as error:
        pytest.skip(str(error))
    with open_browser() as browser:
        yield browser


@pytest.fixture
def service_home(tmp_path: Path) -> Path:
    """The home of `service`; a module of tests may override it."""
    return tmp_path


@pytest.fixture
def service(service_home: Path) -> Iterator[LiveService]:
    service = LiveService(service_home)
    service.start()
    yield service
    service.close()


@pytest.fixture
def open_page(browser: Browser, service: LiveService) -> Iterator[OpenPage]:
    """Opens pages. Any console message that is not `expected` fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(fragment: str = "", *, width: int = 1280, height: int = 860, expected: str = "^$") -> Page:
        def note(message: ConsoleMessage) -> None:
            is_expected = _CONNECTION_LOST.search(message.text) or re.search(expected, message.text)
            if message.type in ("error", "warning") and not is_expected:
                complaints.append(message.text)

        context = browser.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{service.url}/{fragment}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
