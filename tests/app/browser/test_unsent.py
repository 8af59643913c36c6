"""Unsent messages, files and edits across reloads and chats."""

from __future__ import annotations

from tests.app.browser.chat import Chat
from tests.app.browser.test_files import DROP, FOX, wait_for_files
from tests.app.browser.test_history import new_chat, wait_for_titles

FORM = ".turn form textarea"


def begin_two_chats(chat: Chat) -> None:
    """Make a chat about a cat and, as the current one, a chat about a dog."""
    chat.ask("a cat")
    wait_for_titles(chat, "a cat")
    new_chat(chat)
    chat.ask("a dog")
    wait_for_titles(chat, "a dog", "a cat")


def open_chat(chat: Chat, title: str) -> None:
    chat.page.click(f"#chats [data-open]:text-is('{title}')")
    chat.page.wait_for_selector(f".turn:first-child .said:text-is('{title}')", state="attached")


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
    open_chat(chat, "a cat")
    wait_for_box(chat, "")
    wait_for_files(chat)
    chat.page.fill("#box textarea", "another half")
    open_chat(chat, "a dog")
    wait_for_box(chat, "half a sentence")
    wait_for_files(chat, "fox.txt 17 B")
    open_chat(chat, "a cat")
    wait_for_box(chat, "another half")


def test_an_unsent_edit_is_restored_when_its_chat_is_opened_again(chat: Chat) -> None:
    begin_two_chats(chat)
    edit(chat, "two dogs")
    chat.page.evaluate(DROP, {"kind": "drop", **FOX, "onto": FORM})
    wait_for_files(chat, "fox.txt 17 B", place=".turn form")
    open_chat(chat, "a cat")
    assert chat.page.locator(FORM).count() == 0
    open_chat(chat, "a dog")
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two dogs"
    wait_for_files(chat, "fox.txt 17 B", place=".turn form")
    chat.page.press(FORM, "Enter")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .said:text-is('two dogs')")
    assert chat.page.locator(".file").count() == 1
    open_chat(chat, "a cat")
    chat.page.click("#chats [data-open]:has-text('two dogs')")
    chat.page.wait_for_selector(".said:text-is('two dogs')")
    assert chat.page.locator(FORM).count() == 0


def test_an_unsent_edit_survives_new_chat_and_a_reload(chat: Chat) -> None:
    chat.ask("a cat")
    wait_for_titles(chat, "a cat")
    edit(chat, "two cats")
    chat.reload()
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two cats"
    new_chat(chat)
    chat.ask("a dog")
    assert chat.page.locator(FORM).count() == 0
    open_chat(chat, "a cat")
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two cats"
    chat.page.click("[data-action=cancel]")
    chat.reload()
    chat.wait_for_reply()
    assert chat.page.locator(FORM).count() == 0


def test_a_new_chat_gets_the_box_or_the_unsent_message_of_the_last_new_chat(chat: Chat) -> None:
    begin_two_chats(chat)
    new_chat(chat)
    chat.page.fill("#box textarea", "a fox")
    open_chat(chat, "a cat")
    wait_for_box(chat, "")
    new_chat(chat)
    wait_for_box(chat, "a fox")
    open_chat(chat, "a cat")
    chat.page.fill("#box textarea", "no, a cow")
    new_chat(chat)
    wait_for_box(chat, "no, a cow")
