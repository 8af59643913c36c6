"""A chat that outgrows the context, in the browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.browser.chat import Chat, served


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[str]:
    """The address of a page whose model has a context of 256 tokens."""
    with served(model, "--ctx", "256") as url:
        yield url


@pytest.fixture
def chat(browser: Any, small: str) -> Iterator[Chat]:
    made = Chat(browser, small)
    yield made
    assert made.errors == []
    made.close()


def test_a_chat_continues_when_the_context_is_full_and_marks_the_first_turn_in_context(
    chat: Chat,
) -> None:
    heard = "document.querySelector('#transcript [role=status].unseen').textContent"
    line = chat.page.locator(".left-out")
    chat.set_grammar('root ::= "yes"')
    for n in range(1, 5):
        assert "left out" not in chat.ask("abcdefgh"[n] * 39, n)
    assert line.count() == 0
    chat.page.evaluate(
        "window.heard = []; new MutationObserver(() => window.heard.push("
        f"{heard})).observe(document.querySelector('#transcript'), "
        "{subtree: true, childList: true, characterData: true})"
    )
    chat.page.evaluate("document.querySelectorAll('.turn')[3].isOld = true")
    assert chat.ask("f" * 39, 5).endswith(" · context 93 / 256 · 3 turns left out")
    assert line.inner_text() == (
        "The model no longer reads the turns above: its context of 256 tokens is full"
    )
    assert chat.page.locator(".turns > :has(.left-out)").get_attribute("data-index") == "3"
    is_old = "document.querySelectorAll('.turn')[3].isOld === true"
    assert chat.page.evaluate(is_old)  # with what is unfolded and selected in it
    assert "The model is replying; it no longer reads the oldest turns" in chat.page.evaluate(
        "window.heard"
    )
    assert chat.ask("g" * 39, 6).endswith(" · 3 turns left out")
    chat.reload()
    assert chat.wait_for_reply(6).endswith(" · 3 turns left out")
    assert chat.page.locator(".said").count() == 6
    assert line.count() == 1
    assert chat.ask("h" * 39, 7).endswith(" · 3 turns left out")
    for _ in range(4):
        chat.undo()
    assert line.count() == 0


def test_a_chat_stops_at_a_full_context_if_set_to(chat: Chat) -> None:
    chat.unfold("Sampling")
    chat.page.click("#leave-out label:has-text('stop')")
    chat.set("Max tokens", "20")
    for n in range(1, 6):
        chat.say("a" * 80)
        chat.page.wait_for_selector(
            f".turns:not(:has(.live)) > :nth-child({n}):last-child :is(.stats, .error)"
        )
        chat.wait_for_reply(n)
    assert "the context holds 256; shorten it" in chat.last(".error")
    assert chat.page.locator(".left-out").count() == 0
    chat.reload()
    chat.unfold("Sampling")
    chat.page.wait_for_selector("#leave-out label.selected:has-text('stop')")
