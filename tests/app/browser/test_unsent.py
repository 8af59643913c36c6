"""Unsent messages, files and edits across reloads and chats."""

from __future__ import annotations

from tests.app.browser.chat import Chat
from tests.app.browser.test_files import DROP, FOX, wait_for_files

FORM = ".turn form textarea"


def begin_two_chats(chat: Chat) -> None:
    """Make a chat about a cat and, as the current one, a chat about a dog."""
    chat.ask("a cat")
    chat.wait_for_titles("a cat")
    chat.new_chat()
    chat.ask("a dog")
    chat.wait_for_titles("a dog", "a cat")


def wait_for_box(chat: Chat, text: str) -> None:
    chat.page.wait_for_function(
        "(text) => document.querySelector('#box textarea')?.value === text", arg=text
    )


def edit(chat: Chat, text: str) -> None:
    chat.page.hover(".turns .user")
    chat.page.click("[data-action=edit]")
    chat.page.fill(FORM, text)


def test_each_chat_has_its_unsent_message(chat: Chat) -> None:
    begin_two_chats(chat)
    chat.page.evaluate(DROP, {"kind": "drop", **FOX})
    wait_for_files(chat, "fox.txt 17 B")
    chat.page.fill("#box textarea", "half a sentence")
    chat.open_chat("a cat")
    wait_for_box(chat, "")
    wait_for_files(chat)
    chat.page.fill("#box textarea", "another half")
    chat.open_chat("a dog")
    wait_for_box(chat, "half a sentence")
    wait_for_files(chat, "fox.txt 17 B")
    chat.open_chat("a cat")
    wait_for_box(chat, "another half")


def test_an_unsent_edit_is_restored_when_its_chat_is_opened_again(chat: Chat) -> None:
    begin_two_chats(chat)
    edit(chat, "two dogs")
    chat.page.evaluate(DROP, {"kind": "drop", **FOX, "onto": FORM})
    wait_for_files(chat, "fox.txt 17 B", place=".turn form")
    chat.open_chat("a cat")
    assert chat.page.locator(FORM).count() == 0
    chat.open_chat("a dog")
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two dogs"
    wait_for_files(chat, "fox.txt 17 B", place=".turn form")
    chat.page.press(FORM, "Enter")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .said:text-is('two dogs')")
    assert chat.page.locator(".file").count() == 1
    chat.open_chat("a cat")
    chat.page.click("#chats [data-open]:has-text('two dogs')")
    chat.page.wait_for_selector(".said:text-is('two dogs')")
    assert chat.page.locator(FORM).count() == 0


def test_an_unsent_edit_survives_new_chat_and_a_reload(chat: Chat) -> None:
    chat.ask("a cat")
    chat.wait_for_titles("a cat")
    edit(chat, "two cats")
    chat.reload()
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two cats"
    chat.new_chat()
    chat.ask("a dog")
    assert chat.page.locator(FORM).count() == 0
    chat.open_chat("a cat")
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two cats"
    chat.page.click("[data-action=cancel]")
    chat.reload()
    chat.wait_for_reply()
    assert chat.page.locator(FORM).count() == 0


def test_a_new_chat_gets_the_box_or_the_unsent_message_of_the_last_new_chat(chat: Chat) -> None:
    begin_two_chats(chat)
    chat.new_chat()
    chat.page.fill("#box textarea", "a fox")
    chat.open_chat("a cat")
    wait_for_box(chat, "")
    chat.new_chat()
    wait_for_box(chat, "a fox")
    chat.open_chat("a cat")
    chat.page.fill("#box textarea", "no, a cow")
    chat.new_chat()
    wait_for_box(chat, "no, a cow")
