"""Debian's Chromium, driven by Playwright, and pages that note their faults."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    expect,
    sync_playwright,
)

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
SECONDS = 120.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a module."""
    program = shutil.which("chromium")
    assert program, "apt-get install chromium"
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page in the browser, and what was wrong with it.

    Attributes:
        page: The page.
        faults: Dialogs, errors of scripts, and what the content security policy stopped.
    """

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(SECONDS * 1000)
        self.page: Page = context.new_page()
        self.faults: list[str] = []
        self.page.on("dialog", self._refuse)
        self.page.on("pageerror", lambda error: self._fault(str(error)))
        self.page.on("console", self._hear)

    def _fault(self, words: str) -> None:
        self.faults.append(words)

    def _refuse(self, dialog: Dialog) -> None:
        self._fault(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _hear(self, message: ConsoleMessage) -> None:
        if "Content Security" in message.text:
            self._fault(message.text)

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return wider
