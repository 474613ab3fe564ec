"""A real server and a real browser for the tests of the playground."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PATIENCE = 60_000
"""Milliseconds that a browser waits for a run; only a failure takes them."""


@dataclass
class Server:
    """`codd serve` in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "codd", "serve", "--port", "0", "--json", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait()} before it was ready"
            yield Server(json.loads(line)["url"], process)
        finally:
            process.kill()


@contextmanager
def launched() -> "Iterator[Browser]":
    """Chromium; without it the test is skipped, or fails where it must be there."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed (pip install playwright)")
    if chromium is None:
        absent("there is no chromium on the path (apt-get install chromium)")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


def absent(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Visit:
    """A page of the playground, and what its console complained about."""

    page: "Page"
    url: str
    complaints: list[str] = field(default_factory=list)
    refused: bool = False
    """Whether the console may report answers that are not a success: it does, whatever the page makes of them."""

    def listen(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def check(self) -> None:
        allowed = "Failed to load resource" if self.refused else None
        assert [text for text in self.complaints if allowed is None or allowed not in text] == []

    def _heard(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, hash: str = "") -> "Page":
        self.page.goto(f"{self.url}/{hash}")
        self.page.wait_for_selector("#model strong")
        return self.page

    def fill(self, **settings: str) -> None:
        if {"block_length", "temperature", "threshold", "seed", "chat"} & set(settings):
            self.page.locator("#more").evaluate("details => (details.open = true)")
        for name, value in settings.items():
            control = self.page.locator(f"#{name}")
            if control.evaluate("control => control.tagName") == "SELECT":
                control.select_option(value)
            else:
                control.fill(value)

    def finish(self) -> tuple[str, str]:
        """Wait for both columns; what they wrote."""
        for column in ("left", "right"):
            self.page.wait_for_selector(f"#{column} .state.done", timeout=PATIENCE)
        return self.text("left"), self.text("right")

    def run(self) -> tuple[str, str]:
        self.page.click("#run")
        return self.finish()

    def text(self, column: str) -> str:
        """What the model wrote, without the marks for blanks and line ends."""
        shown: str = self.page.evaluate(READ, column)
        return shown

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def overflow(self) -> int:
        """How many pixels the page is wider than the window."""
        found: Any = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return int(found)


READ = """(column) => [...document.querySelectorAll(`#${column} .cell.written`)].map((cell) => {
  const copy = cell.cloneNode(true);
  for (const mark of copy.querySelectorAll(".line, .special")) mark.remove();
  for (const mark of copy.querySelectorAll(".space")) mark.textContent = " ".repeat(mark.textContent.length);
  return copy.textContent;
}).join("")"""
