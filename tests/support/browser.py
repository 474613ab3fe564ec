"""A real server and a real browser for the tests of the playground."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PATIENCE = 180_000
"""Milliseconds that a browser waits for anything; only a failure takes them."""


@dataclass
class Server:
    """`codd serve` in a process of its own."""

    told: dict[str, str]
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return self.told["url"]


class Relay:
    """A port of its own that leads to a server until it is closed, and again once it is opened: a server that goes."""

    def __init__(self, url: str):
        self._target = url.removeprefix("http://").split(":")
        self._port = 0
        self._wires: list[socket.socket] = []

    def open(self) -> str:
        """Accept connections; returns the URL, which stays the same."""
        listening = socket.create_server(("127.0.0.1", self._port))
        self._port = listening.getsockname()[1]
        self._wires = [listening]
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """Refuse new connections and break those that there are."""
        for wire in self._wires:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = listening.accept()
                far = socket.create_connection((self._target[0], int(self._target[1])))
                self._wires += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):  # closed
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def serving(*arguments: str, logged: bool = False, **environment: str) -> Iterator[Server]:
    """``logged`` makes its log a pipe, for a test that reads it."""
    command = [sys.executable, "-m", "codd", "serve", "--port", "0", "--json", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if logged else None,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait()} before it was ready"
            yield Server(json.loads(line), process)
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
        self.page.set_default_timeout(PATIENCE)
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
        if {"remasking", "block_length", "temperature", "seed", "chat"} & set(settings):
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
            self.page.wait_for_selector(f"#{column} .state.done")
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
