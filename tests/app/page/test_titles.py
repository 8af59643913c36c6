"""Titles that the model writes: when, and which of them are taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from app.page import titles
from app.page.reply import Reply
from app.page.titles import title_in
from app.worker.messages import ModelFacts, Report, Status
from tests.support.fake_backend import DONE, MODEL
from tests.support.page import Page, Written, talk

ABLE = Status(MODEL, facts=ModelFacts(n_params=10**9))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titles, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(titles, "LOOK_SECONDS", 0.01)


def soon(holds: Callable[[], object]) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError


def test_the_model_writes_a_title_after_the_first_reply_while_nothing_else_runs(
    page: Page, backend: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = ["other"]
    monkeypatch.setattr(backend, "report", lambda: Report(tuple(running)))
    backend.state = ABLE
    chat, _ = talk(page, backend, "Which rivers?")
    time.sleep(0.1)
    assert len(backend.requests) == 1  # something else runs
    running.clear()
    soon(lambda: len(backend.requests) == 2)
    running += ["title", "another"]
    backend.write("Ri")
    time.sleep(0.1)
    running.clear()
    soon(lambda: len(backend.requests) == 3)  # it was ended, and begins anew
    asked = backend.requests[2]
    assert asked.messages[0]["content"].endswith("User: Which rivers?\n\nModel: re: Which rivers?")
    assert (asked.method, asked.max_tokens, asked.memory, asked.on_disk) == ("ar", 24, None, False)
    backend.write('"Rivers ', 'of Europe".', DONE)
    soon(lambda: page.get(f"chats/{chat}")["chat"]["title"] == "Rivers of Europe")
    page.post(f"chats/{chat}/messages", text="more")
    backend.write("re", DONE)
    page.until(chat, lambda turn: turn["state"] == "done")
    time.sleep(0.1)
    assert len(backend.requests) == 4  # the second reply asks for none


def test_a_title_of_the_user_stays_and_a_small_or_missing_model_writes_none(
    page: Page, backend: Written
) -> None:
    talk(page, backend, "hi")
    backend.state = ABLE
    named = page.new_chat()
    page.ask("PATCH", f"chats/{named}", title="Mine")
    page.post(f"chats/{named}/messages", text="hi")
    backend.write("re", DONE)
    page.until(named, lambda turn: turn["state"] == "done")
    time.sleep(0.1)
    assert len(backend.requests) == 2
    chat, _ = talk(page, backend, "hi")
    soon(lambda: len(backend.requests) == 4)
    page.ask("PATCH", f"chats/{chat}", title="Mine")
    backend.write("Greeting", DONE)
    time.sleep(0.1)
    assert page.get(f"chats/{chat}")["chat"]["title"] == "Mine"
    cut, _ = talk(page, backend, "hello")
    soon(lambda: len(backend.requests) == 6)
    backend.write("A greeting that", replace(DONE, finish_reason="length"))
    time.sleep(0.1)
    assert page.get(f"chats/{cut}")["chat"]["title"] == "hello"


def test_only_a_short_line_is_a_title() -> None:
    assert title_in(Reply(text="<think>\nhm\n</think>\n\n# Title: Rivers\n", done=DONE)) == "Rivers"
    for text in ("", "  \n", "x", "word " * 20, "one\ntwo", "<think>\nhm", "“”"):
        assert title_in(Reply(text=text, done=DONE)) == ""
    assert title_in(Reply(text="Rivers", done=replace(DONE, finish_reason="length"))) == ""
