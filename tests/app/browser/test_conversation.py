"""A conversation in the browser: replies stream, stop and continue; retry, edit and undo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.app.browser.chat import Chat


def test_a_reply_streams_and_shows_its_figures(chat: Chat) -> None:
    assert re.fullmatch(
        r"[\d.]+ tok/s · \d+\.\d tokens per step · (\d+ % accepted · )?"
        r"first token \d+\.\d\d s · context \d+ / 32768( · length limit)?",
        chat.ask("a cat"),
    )
    assert chat.last("code") == "auto"
    assert chat.last(".said") == "a cat"
    assert chat.page.is_hidden(".welcome")


def test_the_page_requests_nothing_from_other_machines_and_the_browser_would_block_it(
    chat: Chat, address: str
) -> None:
    chat.ask("a cat")
    hosts = {urlsplit(url).netloc for url in chat.asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(address).netloc}
    refused = chat.page.evaluate(
        "() => fetch('http://192.0.2.1/', {mode: 'no-cors'}).then(() => '', (e) => String(e))"
    )
    assert "TypeError" in refused


def test_what_looks_like_html_or_a_template_shows_as_text(chat: Chat) -> None:
    text = "<b>x</b> ${1+1} {{value}} &amp; <img src=x onerror=alert(1)>"
    chat.ask(text)
    assert chat.last(".said") == text
    assert chat.page.locator(".said *").count() == 0


def test_stop_ends_the_reply_and_the_next_one_works(chat: Chat) -> None:
    chat.begin_endless("a cat")
    chat.page.click("#box .stop-button")
    assert chat.wait_for_reply().endswith(" · stopped")
    chat.set("Max tokens", "5")
    assert chat.ask("a dog", 2).endswith(" · length limit")


def test_retry_undo_and_edit(chat: Chat) -> None:
    chat.ask("one")
    first = chat.last(".text")
    chat.ask("two", 2)
    chat.page.click("text=Undo")
    chat.page.wait_for_selector(".turns > :only-child .stats")
    assert chat.page.input_value("#box textarea") == "two"
    chat.retry()
    assert chat.last(".text") == first
    chat.page.click("text=Edit")
    assert chat.page.input_value(".turn form textarea") == "one"
    chat.page.fill(".turn form textarea", "three <i>")
    chat.page.press(".turn form textarea", "Enter")
    chat.page.wait_for_selector(".said:has-text('three <i>')")
    chat.wait_for_reply()


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
    chat.page.click("[data-action=undo]")
    chat.page.wait_for_selector(".turns > :only-child")
    assert chat.page.input_value("#box textarea") == "more"


def test_retrying_an_earlier_turn_asks_first(chat: Chat) -> None:
    asked: list[str] = []

    def dismiss(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    chat.page.on("dialog", dismiss)
    for n, text in enumerate(("one", "two", "three"), 1):
        chat.ask(text, n)
    chat.page.hover(".turns > :first-child .reply")
    chat.page.click(".turns > :first-child [data-action=retry]")
    chat.settle()
    assert asked == ["This deletes the 2 messages below. Continue?"]
    assert chat.page.locator(".turn").count() == 3


def test_an_edited_message_keeps_its_indentation_and_hides_retry(chat: Chat) -> None:
    chat.ask("    keep\n  this")
    chat.page.hover(".turns .user")
    chat.page.click("[data-action=edit]")
    assert not chat.page.is_visible("[data-action=retry]")
    chat.page.click("[data-action=cancel]")
    assert chat.page.evaluate("document.activeElement.dataset.action") == "edit"
    chat.page.click("[data-action=edit]")
    chat.page.press(".turns form textarea", "End")
    chat.page.keyboard.type(" too")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".said:has-text('too')")
    chat.wait_for_reply()
    assert (
        chat.page.evaluate("document.querySelector('.said').textContent") == "    keep\n  this too"
    )


def test_keys_that_end_an_ime_composition_do_not_end_the_edit(chat: Chat) -> None:
    chat.ask("one")
    chat.page.click("[data-action=edit]")
    area = chat.page.locator(".turn form textarea")
    area.fill("two")
    for key in ("Escape", "Enter"):
        area.dispatch_event("keydown", {"key": key, "isComposing": True})
    assert area.input_value() == "two"
    area.press("Escape")
    assert area.count() == 0
    assert chat.page.locator(".said").all_inner_texts() == ["one"]


def test_a_reply_at_the_length_limit_can_be_continued(chat: Chat) -> None:
    chat.ask("a cat")
    begun = chat.last(".text")
    chat.page.click("[data-action=continue]")
    chat.page.wait_for_function(
        "n => document.querySelector('.text').dataset.source?.length > n"
        " && !document.querySelector('.live')",
        arg=len(begun),
    )
    assert chat.last(".text").startswith(begun)
    assert chat.page.locator(".turn").count() == 1


def test_a_reply_can_be_copied_and_a_conversation_exported_and_ended(chat: Chat) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.unfold("Sampling")
    chat.unfold("More")
    chat.set("Grammar (GBNF)", 'root ::= "**a** <b>"')
    chat.ask("hi")
    chat.page.click("text=Copy")
    chat.page.wait_for_selector("text=Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "**a** <b>"
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text.startswith("## You\n\nhi\n\n## Model\n\n**a** <b>\n")
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    assert chat.page.locator(".turn").count() == 0


def test_a_code_block_is_copied_alone(chat: Chat) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.page.uncheck("#colour input")
    chat.unfold("Sampling")
    chat.unfold("More")
    chat.set("Grammar (GBNF)", 'root ::= "so:\\n```\\na < b\\n```"')
    chat.ask("hi")
    chat.page.click("[data-action=copy-code]")
    chat.page.wait_for_selector("text=Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "a < b\n"


def test_a_new_chat_ends_the_pending_reply(chat: Chat) -> None:
    chat.begin_endless("a cat")
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    assert chat.page.locator(".turn").count() == 0
