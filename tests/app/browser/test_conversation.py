"""A conversation in the browser: replies stream, stop and continue; retry, edit and undo."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from tests.app.browser.chat import Chat


def test_a_reply_shows_its_figures_and_html_as_text_and_loads_nothing_from_other_machines(
    chat: Chat, address: str
) -> None:
    text = "<b>x</b> ${1+1} {{value}} &amp; <img src=x onerror=alert(1)>"
    assert re.fullmatch(
        r"[\d.]+ tok/s · \d+\.\d tokens per step · (\d+ % accepted · )?"
        r"first token \d+\.\d\d s · context \d+ / 32768( · length limit)?",
        chat.ask(text),
    )
    assert chat.last("code") == "auto"
    assert chat.last(".said") == text
    assert chat.page.locator(".said *").count() == 0
    assert chat.page.is_hidden(".welcome")
    hosts = {urlsplit(url).netloc for url in chat.asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(address).netloc}
    refused = chat.page.evaluate(
        "() => fetch('http://192.0.2.1/', {mode: 'no-cors'}).then(() => '', (e) => String(e))"
    )
    assert "TypeError" in refused


def test_stop_and_a_new_chat_end_the_reply_and_the_next_one_works(chat: Chat) -> None:
    chat.begin_endless("a cat")
    chat.page.click("#box .stop-button")
    assert chat.wait_for_reply().endswith(" · stopped")
    chat.say("a cow")
    chat.page.wait_for_selector(".live .text")
    chat.new_chat()
    assert chat.page.locator(".turn").count() == 0
    chat.set("Max tokens", "5")
    assert chat.ask("a dog").endswith(" · length limit")


def test_retry_undo_and_edit(chat: Chat) -> None:
    asked = chat.answer_dialogs(accept=False)
    chat.ask("    keep\n  this")
    first = chat.last(".text")
    for n, text in enumerate(("two", "three"), 2):
        chat.ask(text, n)
    chat.page.hover(".turns > :first-child .reply")
    chat.page.click(".turns > :first-child [data-action=retry]")
    chat.settle()
    assert asked == ["This deletes the 2 messages below. Continue?"]
    assert chat.page.locator(".turn").count() == 3
    chat.undo()
    chat.page.fill("#box textarea", "")
    chat.undo()
    assert chat.page.input_value("#box textarea") == "two"
    chat.retry()
    assert chat.last(".text") == first

    chat.page.click("[data-action=edit]")
    assert not chat.page.is_visible("[data-action=retry]")
    chat.page.click("[data-action=cancel]")
    assert chat.page.evaluate("document.activeElement.dataset.action") == "edit"
    chat.page.click("[data-action=edit]")
    area = chat.page.locator(".turn form textarea")
    area.press("End")
    chat.page.keyboard.type(" too")
    for key in ("Escape", "Enter"):  # keys that end an IME composition do not end the edit
        area.dispatch_event("keydown", {"key": key, "isComposing": True})
    assert area.input_value() == "    keep\n  this too"
    area.press("Escape")
    assert area.count() == 0
    said = "document.querySelector('.said').textContent"
    assert chat.page.evaluate(said) == "    keep\n  this"
    chat.page.click("[data-action=edit]")
    area.press("End")
    chat.page.keyboard.type(" <i>")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".said:has-text('<i>')")
    chat.wait_for_reply()
    assert chat.page.evaluate(said) == "    keep\n  this <i>"


def test_unsent_text_survives_retry_undo_and_an_edit_during_a_reply(chat: Chat) -> None:
    chat.ask("one")
    chat.page.fill("#box textarea", "half")
    chat.retry()
    chat.page.click("[data-action=edit]")
    chat.page.fill(".turn form textarea", "other")
    chat.never_end()
    chat.page.press("#box textarea", "Enter")
    chat.page.wait_for_selector(".live .text")
    chat.page.press(".turn form textarea", "Enter")
    assert chat.page.input_value(".turn form textarea") == "other"
    chat.page.click("#box .stop-button")
    chat.page.wait_for_selector(".live", state="detached")
    chat.page.press(".turn form textarea", "Escape")
    chat.page.fill("#box textarea", "more")
    chat.undo()
    assert chat.page.input_value("#box textarea") == "more"


def test_a_reply_and_its_code_can_be_copied_and_a_conversation_exported(chat: Chat) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.page.uncheck("#colour input")
    chat.set_grammar('root ::= "**a** <b>\\n```\\na < b\\n```"')
    chat.ask("hi")
    reply = "**a** <b>\n```\na < b\n```"
    for button, copied in (("copy", reply), ("copy-code", "a < b\n")):
        chat.page.click(f"[data-action={button}]")
        chat.page.wait_for_selector(f"[data-action={button}]:text-is('Copied')")
        assert chat.page.evaluate("navigator.clipboard.readText()") == copied
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text.startswith(f"## You\n\nhi\n\n## Model\n\n{reply}\n")
