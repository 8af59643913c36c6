"""``python -m app`` in a process of its own, and a browser tab with its page."""

from __future__ import annotations

import random
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
# A token takes a millisecond or more, because it can be read in 120 ways: else the tiny model would
# soon fill its context.
WAYS = [f"x{i}" for i in range(120)]
ENDLESS = f'root ::= ({" | ".join(WAYS)}){{20000,}}\ny ::= [a-z] | "(" root ")"\n' + "\n".join(
    f"{way} ::= y" for way in WAYS
)
LAST = "#turns > .turn:last-child"
DONE = f"{LAST}.reply:not(.live)"


@contextmanager
def served(model: Path, chats: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the app in a process of its own; yields its address and the process."""
    command = ["app", "--no-browser", "--model", str(model), "--chats", str(chats)]
    with started(*command, "--ctx", "32768", "--threads", "1", *flags) as running:
        yield running


@contextmanager
def started(module: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a module that serves at an address in a process; yields the address and the process."""
    command = [sys.executable, "-m", module, *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            yield found[0], process
        finally:
            process.terminate()


def free_port() -> str:
    """A free port outside the range of outgoing connections, so that it stays free."""
    for port in random.Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as asked, suppress(OSError):
            asked.bind(("127.0.0.1", port))
            return str(port)
    raise AssertionError("no port is free")


class Chat:
    """A browser tab with the page, and the requests it made."""

    def __init__(self, context: Any, address: str, path: str = "") -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.asked: list[Any] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address + path)
        self.wait_for_page()

    def wait_for_page(self) -> None:
        """Wait until the page shows its chats and a loaded model."""
        self.page.wait_for_selector("html[data-ready]")
        self.page.wait_for_selector("#gauge", state="visible")

    def reload(self) -> None:
        self.page.reload()
        self.wait_for_page()

    def say(self, text: str) -> None:
        self.page.fill("#box", text)
        self.page.press("#box", "Enter")

    def ask(self, text: str, n_turns: int = 2) -> str:
        """Send a message and wait for the reply; returns the sentence below it."""
        self.say(text)
        return self.wait_for_reply(n_turns)

    def wait_for_reply(self, n_turns: int = 2) -> str:
        """Wait until there are so many turns and the last one is a finished reply."""
        self.page.wait_for_function(
            f"document.querySelectorAll('#turns > .turn').length === {n_turns}"
        )
        return str(self.page.inner_text(f"{DONE} .sentence"))

    def begin_endless(self, text: str) -> None:
        """Start a reply that does not end."""
        self.set(max_tokens=0, **{"sampling.grammar": ENDLESS})
        self.say(text)
        self.page.wait_for_selector(f"{LAST}.live .answer > .block")

    def set(self, **settings: Any) -> None:
        """Change settings as a field of the drawer does."""
        for name, value in settings.items():
            self.page.evaluate("([name, value]) => page.set(name, value, '')", [name, value])

    def act(self, label: str, turn: str = LAST) -> None:
        """Click a button of a turn."""
        self.page.locator(turn).hover()
        self.page.locator(turn).get_by_role("button", name=label, exact=True).click()

    def choose(self, item: str) -> None:
        """Choose from the open menu."""
        self.page.get_by_role("menuitem", name=item).click()

    def open_row_menu(self, title: str) -> None:
        row = self.page.locator(f"#list .row:has(a:text-is('{title}'))").first
        row.hover()
        row.locator("button").click()

    def new_chat(self) -> None:
        self.page.click("#new")
        self.page.wait_for_selector("#start .card")

    def texts(self) -> list[str]:
        """What the turns say, without their buttons."""
        return list(self.page.locator("#turns :is(.said, .answer):not([hidden])").all_inner_texts())

    def titles(self) -> list[str]:
        return list(self.page.locator("#list a").all_inner_texts())

    def wait_for_titles(self, *expected: str) -> None:
        """Wait until these are the first chats of the list."""
        self.page.wait_for_function(
            "(expected) => [...document.querySelectorAll('#list a')].slice(0, expected.length)"
            ".map((link) => link.textContent).join() === expected.join()",
            arg=list(expected),
        )

    def focused(self) -> str:
        """The id or the label of what has the focus."""
        return str(
            self.page.evaluate("document.activeElement.id || document.activeElement.ariaLabel")
        )
