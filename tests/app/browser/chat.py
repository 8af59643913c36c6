"""``python -m app`` in a process of its own, and a tab of a browser with its chat."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

TIMEOUT = 60_000  # ms; machines under load are slow
ENDLESS = "root ::= [a-z] root"


@contextmanager
def served(model: Path, *flags: str) -> Iterator[str]:
    """Where the app is served, in a process of its own."""
    command = [sys.executable, "-m", "app", "--no-browser", "--model", str(model)]
    command += ["--ctx", "32768", "--threads", "1", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            yield found[0]
        finally:
            process.terminate()


def free_port() -> str:
    """One that no other app looks for, so that a server that ended can be started anew there."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return str(asked.getsockname()[1])


class Chat:
    """A tab with the chat in it, and what its page asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 800})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.n_streams = 0
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("request", lambda request: self.count_streams(request, 1))
        self.page.on("requestfinished", lambda request: self.count_streams(request, -1))
        self.page.on("requestfailed", lambda request: self.count_streams(request, -1))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.wait_for_page()

    def wait_for_page(self) -> None:
        self.page.wait_for_selector("#transcript .welcome", state="attached")
        self.page.wait_for_selector("#header b")

    def count_streams(self, request: Any, change: int) -> None:
        if "/queue/data" in request.url:
            self.n_streams += change

    def wait_for_streams(self) -> None:
        """Until all are closed. A page that sees one break off soon loads itself again."""
        for _ in range(TIMEOUT // 50):
            self.page.wait_for_timeout(50)
            if not self.n_streams:
                return
        raise AssertionError(f"{self.n_streams} streams are still open")

    def reload(self) -> None:
        self.page.reload()
        self.wait_for_page()

    def go_to(self, address: str) -> None:
        """Load a page that may be on its way there by itself."""
        from playwright.sync_api import Error

        with suppress(Error):
            self.page.goto(address)

    def say(self, text: str) -> None:
        self.page.fill("#box textarea", text)
        self.page.press("#box textarea", "Enter")

    def wait_for_reply(self, n_turns: int = 1) -> str:
        """The stats line of the last reply, once there are ``n_turns`` and it is finished."""
        last = f".turns:not(:has(.live)) > :nth-child({n_turns}):last-child"
        return str(self.page.inner_text(f"{last} .stats"))

    def ask(self, text: str, n_turns: int = 1) -> str:
        self.say(text)
        return self.wait_for_reply(n_turns)

    def last(self, part: str) -> str:
        return str(self.page.inner_text(f".turns > :last-child {part}"))

    def unfold(self, label: str) -> None:
        self.page.click(f"#settings .gr-accordion > button:has-text('{label}'):visible")

    def set(self, label: str, value: str) -> None:
        field = self.page.get_by_label(label, exact=True).and_(self.page.locator(":visible"))
        for _ in range(20):  # the page may just be putting in the value that it was sent
            field.first.fill(value)
            field.first.blur()
            self.page.wait_for_timeout(100)
            if field.first.input_value() == value:
                return
        raise AssertionError(f"{label} does not take {value}")

    def choose_method(self, title: str) -> None:
        self.page.click("#method input")
        self.page.click(f"[role=option]:has-text('{title}')")

    def never_end(self) -> None:
        """Let the replies to come go on for long."""
        self.unfold("Sampling")
        self.set("Max tokens", "0")
        self.unfold("More")
        self.set("Grammar (GBNF)", ENDLESS)

    def begin_endless(self, text: str) -> None:
        """Have a reply in the making that goes on for long."""
        self.never_end()
        self.say(text)
        self.page.wait_for_selector(".live .text")

    def choose(self, field: str, value: str) -> None:
        """Write what no list has into a field of the model panel."""
        self.page.fill(f"#{field} input", value)
        self.page.press(f"#{field} input", "Enter")

    def close(self) -> None:
        self.context.close()
