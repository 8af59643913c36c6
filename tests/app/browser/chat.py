"""``python -m app`` in a process of its own, and a browser tab with its page."""

from __future__ import annotations

import json
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


@contextmanager
def served(model: Path, *flags: str) -> Iterator[str]:
    """Run the app in a process of its own; yields its address."""
    command = ["app", "--no-browser", "--model", str(model)]
    command += ["--ctx", "32768", "--threads", "1", "--port", free_port(), *flags]
    with started(*command) as (address, _):
        yield address


@contextmanager
def started(module: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a module that serves the page in a process; yields its address and the process."""
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

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        """Open the page in a browser context of its own, like a new user."""
        options.setdefault("viewport", {"width": 1280, "height": 800})
        self.context = browser.new_context(**options)
        self.open(address)

    @classmethod
    def within(cls, context: Any, address: str) -> Chat:
        """Open the page in a context that has loaded it before."""
        chat = cls.__new__(cls)
        chat.context = context
        chat.open(address)
        return chat

    def open(self, address: str) -> None:
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.n_open = {"/queue/data": 0, "/run/predict": 0}  # streams, and calls without a queue
        self.n_answered = 0
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("request", lambda request: self._count(request, 1))
        self.page.on("requestfinished", lambda request: self._count(request, -1))
        self.page.on("requestfailed", lambda request: self._count(request, -1))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.wait_for_page()

    def wait_for_page(self) -> None:
        """Wait until the page has its saved settings."""
        self.page.wait_for_selector("#transcript .welcome", state="attached")
        self.page.wait_for_selector("#header b")
        while not self.n_answered:
            self.page.wait_for_timeout(20)
        self.settle()

    def _count(self, request: Any, change: int) -> None:
        for part in self.n_open:
            if part in request.url:
                self.n_open[part] += change
                self.n_answered += part == "/run/predict" and change < 0

    def settle(self) -> None:
        """Wait until all quick calls are answered and drawn."""
        self._wait_for_none("/run/predict")
        self.page.evaluate(
            "new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))"
        )

    def wait_for_streams(self) -> None:
        """Wait until all streams are closed: a page whose stream breaks soon reloads itself."""
        self._wait_for_none("/queue/data")

    def _wait_for_none(self, part: str) -> None:
        for _ in range(TIMEOUT // 20):
            if not self.n_open[part]:
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"{self.n_open[part]} requests for {part} are still open")

    def reload(self) -> None:
        self.n_answered = 0
        self.page.reload()
        self.wait_for_page()

    def go_to(self, address: str) -> None:
        """Go to an address; the page may already be reloading itself."""
        from playwright.sync_api import Error

        with suppress(Error):
            self.page.goto(address)

    def say(self, text: str) -> None:
        self.page.fill("#box textarea", text)
        self.page.press("#box textarea", "Enter")

    def wait_for_reply(self, n_turns: int = 1) -> str:
        """Wait for the last of ``n_turns`` replies to finish; return its stats line."""
        last = f".turns:not(:has(.live)) > :nth-child({n_turns}):last-child"
        return str(self.page.inner_text(f"{last} .stats"))

    def ask(self, text: str, n_turns: int = 1) -> str:
        self.say(text)
        return self.wait_for_reply(n_turns)

    def ask_saved(self, text: str) -> None:
        """Begin the only chat, and wait until it is listed."""
        self.ask(text)
        self.wait_for_titles(text)

    def retry(self) -> str:
        """Retry the only reply; return its stats line."""
        self.page.hover(".turns .reply")
        with self.page.expect_request("**/queue/join*"):  # the call for the new reply
            self.page.click("[data-action=retry]")
        self.settle()
        return self.wait_for_reply()

    def saved(self) -> list[str]:
        """The texts of the saved chats, once this tab's reply is saved."""
        self.page.wait_for_function(
            "JSON.parse(sessionStorage.getItem('conversation'))?.every(({reply}) => reply?.done)"
        )
        self.page.evaluate("store.rename('', '')")  # runs after all pending writes
        return self.kept()

    def wait_for_stillness(self, selector: str) -> dict[str, float]:
        """The place of an element, once it has not moved for several frames."""
        box: dict[str, float] = self.page.evaluate(
            """(selector) => new Promise((resolve) => {
              let before = "";
              let n = 0;
              const look = () => {
                const box = document.querySelector(selector).getBoundingClientRect();
                n = JSON.stringify(box) === before ? n + 1 : 0;
                before = JSON.stringify(box);
                if (n === 5) resolve(box.toJSON());
                else requestAnimationFrame(look);
              };
              look();
            })""",
            selector,
        )
        return box

    def last(self, part: str) -> str:
        return str(self.page.inner_text(f".turns > :last-child {part}"))

    def unfold(self, *labels: str) -> None:
        for label in labels:
            self.page.click(f"#settings .gr-accordion > button:has-text('{label}'):visible")

    def set(self, label: str, value: str) -> None:
        field = self.page.get_by_label(label, exact=True).and_(self.page.locator(":visible"))
        for _ in range(20):  # the page may be restoring a value just now
            field.first.fill(value)
            field.first.blur()
            self.settle()
            if field.first.input_value() == value:
                return
        raise AssertionError(f"{label} does not take {value}")

    def choose_method(self, title: str) -> None:
        self.page.click("#method input")
        with self.page.expect_request("**/run/predict*"):  # the call that shows its parameters
            self.page.click(f"[role=option]:has-text('{title}')")
        self.settle()

    def never_end(self) -> None:
        """Make replies endless."""
        self.set_grammar(ENDLESS)
        self.set("Max tokens", "0")

    def set_grammar(self, rules: str) -> None:
        """Hold replies to a grammar; unfolds the fields of sampling."""
        self.unfold("Sampling", "More")
        self.set("Grammar (GBNF)", rules)

    def begin_endless(self, text: str) -> None:
        """Start an endless reply."""
        self.never_end()
        self.say(text)
        self.page.wait_for_selector(".live .text")

    def choose(self, field: str, value: str) -> None:
        """Type a value that is not in the list into a field of the Model section."""
        self.page.fill(f"#{field} input", value)
        self.page.press(f"#{field} input", "Enter")

    def new_chat(self) -> None:
        self.page.click("#new")
        self.page.wait_for_selector(".welcome:visible")

    def undo(self) -> None:
        """Take back the last turn."""
        n = self.page.locator(".turn").count()
        self.page.click("[data-action=undo]")
        self.page.wait_for_function(f"document.querySelectorAll('.turn').length === {n - 1}")

    def open_chat(self, title: str) -> None:
        """Open the chat with this title, which is also its first message."""
        self.page.click(f"#chats [data-open]:text-is('{title}')")
        self.page.wait_for_selector(f".turn:first-child .said:text-is('{title}')", state="attached")

    def wait_for_titles(self, *expected: str) -> None:
        """Wait until exactly these chats are listed."""
        self.page.wait_for_function(
            "(expected) => [...document.querySelectorAll('#chats [data-open]')]"
            ".map((b) => b.textContent).join() === expected.join()",
            arg=expected,
        )

    def said(self) -> list[str]:
        return list(self.page.locator(".said").all_inner_texts())

    def kept(self) -> list[str]:
        """The texts of the saved chats, latest first."""
        texts = "store.list().then((list) => Promise.all(list.map(({name}) => store.text(name))))"
        return list(self.page.evaluate(texts))

    def kept_messages(self) -> list[list[str]]:
        """The user's messages of each saved chat."""
        return sorted([turn["user"] for turn in json.loads(text)] for text in self.kept())

    def answer_dialogs(self, *, accept: bool = True) -> list[str]:
        """Accept or dismiss all dialogs from now on; returns the list of their messages."""
        asked: list[str] = []

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept() if accept else dialog.dismiss()

        self.page.on("dialog", answer)
        return asked

    def other_tab(self, path: str = "") -> Any:
        """Another tab with the page."""
        page = self.context.new_page()
        page.goto(self.page.url + path)
        return page

    def close(self) -> None:
        self.context.close()
