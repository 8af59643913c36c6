"""A conversation: sent, written again, edited, deleted, stopped, continued and found again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.app.browser.chat import DONE, LAST, Chat, free_port, served


def test_replies_and_messages_have_versions_and_nothing_is_lost(chat: Chat) -> None:
    page = chat.page
    assert chat.ask("a cat") != ""
    first = chat.texts()
    chat.act("Retry")
    chat.choose("Again")
    page.wait_for_selector(f"{DONE} .siblings:has-text('2/2')")
    chat.act("Edit")
    page.fill(f"{LAST} textarea", "**mine** & <b>")
    for key in ("Tab", "Tab", "Enter"):  # past Cancel to Save
        page.keyboard.press(key)
    page.wait_for_selector(f"{LAST} .siblings:has-text('3/3')")
    assert page.inner_html(f"{LAST} .answer p") == "<strong>mine</strong> &amp; &lt;b&gt;"
    chat.act("Earlier version")
    page.wait_for_selector(f"{LAST} .siblings:has-text('2/3')")
    chat.act("Earlier version")
    page.wait_for_selector(f"{LAST} .siblings:has-text('1/3')")
    assert chat.texts() == first

    page.press("#box", "ArrowUp")
    assert page.input_value(".turn.user textarea") == "a cat"
    page.fill(".turn.user textarea", "a dog")
    page.press(".turn.user textarea", "Enter")
    page.wait_for_selector(".turn.user .siblings:has-text('2/2')")
    chat.wait_for_reply()
    chat.ask("and then", 4)
    shown = chat.texts()
    assert shown[0] == "a dog"
    chat.act("More actions", ".turn.user >> nth=1")
    chat.choose("Delete this and what follows")
    page.wait_for_selector("#notice:has-text('Deleted 2 turns')")
    chat.wait_for_reply()
    assert chat.texts() == shown[:2]
    page.click("#notice button")
    page.wait_for_selector("#turns > :nth-child(4) .answer")
    assert chat.texts() == shown

    chat.reload()
    assert chat.texts() == shown
    other = Chat(page.context, page.url)  # the link
    assert other.texts() == shown
    other.act("More actions", ".turn.reply >> nth=0")
    other.choose("Duplicate the chat up to here")
    other.wait_for_titles("a cat (copy)", "a cat")
    chat.wait_for_titles("a cat (copy)", "a cat")


def test_a_reply_goes_on_without_its_page_shows_in_every_tab_and_can_be_stopped(
    chat: Chat,
) -> None:
    page = chat.page
    chat.begin_endless("go on")
    chat.new_chat()
    page.wait_for_selector("#list .row:has-text('go on') .dot")
    page.click("#list a:has-text('go on')")
    page.wait_for_selector(f"{LAST}.live .answer > .block")
    other = Chat(page.context, page.url)
    length = f"document.querySelector('{LAST} .answer').textContent.length"
    begun = other.page.evaluate(f"part = document.querySelector('{LAST} .block > *'), {length}")
    other.page.wait_for_function(f"{length} > {begun + 20}")
    assert other.page.evaluate("part.isConnected")  # with what the user has selected in it

    chat.say("queued")
    page.wait_for_selector("#queued:has-text('Sent when this reply ends')")
    page.click("#queued button")
    assert page.input_value("#box") == "queued"
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{DONE} button:text-is('Continue')")
    other.page.wait_for_selector(f"{DONE} button:text-is('Continue')")
    before = chat.texts()[1]
    chat.act("Continue")
    page.wait_for_selector(f"{LAST} .error:has-text('cannot continue one')")  # a grammar
    chat.set(max_tokens=8, **{"sampling.grammar": ""})
    chat.act("Continue")
    page.wait_for_selector(f"{LAST} .error", state="hidden")
    page.wait_for_function(f"{length} > {len(before)}")
    page.wait_for_selector(DONE)
    # What follows may end a half character, or a mark of Markdown.
    assert chat.texts()[1].startswith(before[: len(before) // 2])

    chat.begin_endless("more")
    chat.say("queued")
    page.wait_for_selector("#queued:has-text('Sent when')")
    chat.set(max_tokens=8, **{"sampling.grammar": ""})
    page.click("#stop")
    chat.wait_for_reply(6)
    assert chat.texts()[4] == "queued"
    assert page.input_value("#box") == ""


def test_a_chat_that_comes_late_shows_what_its_reply_wrote_meanwhile(chat: Chat) -> None:
    page = chat.page

    def late(route: Any) -> None:
        answer = route.fetch()
        page.wait_for_timeout(500)  # in which the reply grows
        route.fulfill(response=answer)

    chat.begin_endless("go on")
    chat.new_chat()
    page.route("**/page/chats/*?limit=*", late)
    page.click("#list a:has-text('go on')")
    page.wait_for_selector(f"{LAST}.live .answer > .block")
    page.wait_for_timeout(1500)
    page.keyboard.press("Escape")
    page.wait_for_selector(DONE)
    shown = chat.texts()
    chat.reload()
    assert chat.texts() == shown


def test_a_killed_server_leaves_the_text_and_the_page_finds_it_again(
    browser: Any, model: Path, tmp_path: Path
) -> None:
    port, context = free_port(), browser.new_context()
    with served(model, tmp_path / "chats.db", "--port", port) as (address, process):
        chat = Chat(context, address)
        chat.begin_endless("go on")
        with closing(sqlite3.connect(tmp_path / "chats.db")) as kept:
            while kept.execute("SELECT max(length(text)) FROM turns").fetchone()[0] <= 100:
                chat.page.wait_for_timeout(50)
        process.kill()
    chat.page.wait_for_selector("#offline:has-text('No connection to the server')")
    chat.page.keyboard.press("Escape")
    chat.page.wait_for_selector("#alert:has-text('The server does not answer')")
    chat.page.fill("#box", "typed meanwhile")
    with served(model, tmp_path / "chats.db", "--port", port):
        chat.page.wait_for_selector("#offline", state="hidden")
        chat.page.wait_for_selector(f"{DONE} button:text-is('Continue')")
        assert len(chat.texts()[1]) > 100
        chat.page.wait_for_selector(f"{DONE} .notice:has-text('The server ended while it wrote')")
        chat.page.route("**/page/state", lambda route: route.abort(), times=1)
        chat.page.reload(wait_until="commit")
        chat.page.wait_for_selector("#offline:has-text('The page tries again by itself')")
        chat.wait_for_page()
        assert chat.page.is_hidden("#offline")
        assert chat.page.input_value("#box") == "typed meanwhile"
        chat.page.wait_for_selector(f"{DONE} button:text-is('Continue')")
    assert chat.errors == []
    context.close()


def test_drafts_and_files_stay_with_their_chat_and_pictures_are_refused(chat: Chat) -> None:
    page = chat.page
    chat.ask("a cat")
    page.fill("#box", "for the cat")
    chat.new_chat()
    assert page.input_value("#box") == ""
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    text = b"The fox.\r\nThe hen."
    chooser.value.set_files(
        [
            {"name": "fox.txt", "mimeType": "text/plain", "buffer": text},
            {"name": "cat.png", "mimeType": "image/png", "buffer": b"\x89PNG"},
            {"name": "x.bin", "mimeType": "", "buffer": b"\0\xff\0"},
            {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * 1_000_001},
            {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.4"},
        ]
    )
    page.wait_for_selector("#files li:has-text('broken.pdf')")
    assert page.inner_text("#refused").split("\n") == [
        "cat.png is a picture. Models here read text only. Paste the text in it instead.",
        "x.bin is not text or PDF. Save it as plain text first.",
        "big.txt is too large (1.0 MB): a message can have 1 MB of files, and 1.0 MB is left.",
    ]
    paste = """(text) => {
      const clipboardData = new DataTransfer();
      clipboardData.setData("text/plain", text);
      const event = new ClipboardEvent("paste", { clipboardData, cancelable: true });
      return !document.querySelector("#box").dispatchEvent(event);
    }"""
    assert page.evaluate(paste, "x" * 8001) is True
    page.click("[aria-label='Remove pasted-3.txt']")
    assert page.evaluate(paste, "x" * 8000) is False  # the browser pastes it
    chat.reload()
    chat.say("Well?")
    page.wait_for_selector("#refused:has-text('broken.pdf')")
    assert page.input_value("#box") == "Well?"
    page.click("[aria-label='Remove broken.pdf']")
    chat.ask("Well?")
    assert page.locator("#files li").count() == 0
    assert page.inner_text(".turn .files button").split() == ["fox.txt", "17", "B"]
    page.click(".turn .files button:has-text('fox.txt')")
    assert page.inner_text("dialog pre") == "The fox.\nThe hen."
    page.keyboard.press("Escape")
    page.click("#list a:has-text('a cat')")
    page.wait_for_function("document.querySelector('#box').value === 'for the cat'")


def test_an_incognito_chat_is_in_no_list_and_leaves_nothing_in_the_browser(chat: Chat) -> None:
    page = chat.page
    page.fill("#box", "for all")
    page.click("#incognito")
    page.wait_for_selector("#incognito-note:has-text('in memory alone')")
    page.fill("#box", "not a secret yet")
    chat.set(system="a secret")
    chat.ask("a secret")
    assert "a secret" not in chat.titles()
    page.fill("#box", "another secret")
    chat.new_chat()
    assert page.input_value("#box") == ""
    page.fill("#box", "more of a secret")
    page.click("#incognito")
    assert page.is_hidden("#incognito-note")
    assert chat.texts() == []
    assert page.input_value("#box") == "for all"
    chat.set(max_tokens=9)
    kept = "JSON.stringify(localStorage)"
    assert "for all" in page.evaluate(kept)
    assert "secret" not in page.evaluate(kept)


def test_a_deleted_chats_draft_is_deleted_and_the_last_chat_that_was_opened_is_shown(
    chat: Chat,
) -> None:
    page = chat.page
    for name in ("an owl", "a lark", "a wren"):
        chat.new_chat()
        chat.ask(name)
    page.fill("#box", "a draft")
    chat.open_row_menu("a wren")
    chat.choose("Delete")
    page.wait_for_selector("#notice:has-text('Deleted “a wren”')")
    page.wait_for_function("!JSON.stringify(localStorage).includes('a draft')")
    held: list[Any] = []
    slow = page.locator("#list a:has-text('an owl')").get_attribute("href").split("=")[-1]
    page.route(f"**/page/chats/{slow}?*", lambda route: held.append(route))
    page.click("#list a:has-text('an owl')")
    page.click("#list a:has-text('a lark')")
    page.wait_for_selector(".turn.user:has-text('a lark')")
    assert len(held) == 1
    with page.expect_response(f"**/page/chats/{slow}?*") as answer:
        held[0].continue_()
    answer.value.finished()
    page.evaluate("new Promise((done) => setTimeout(done))")
    assert chat.texts()[0] == "a lark"
