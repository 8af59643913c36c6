"""Unsent messages, files and edits across reloads and chats."""

from __future__ import annotations

from tests.app.browser.chat import Chat
from tests.app.browser.test_files import drop, wait_for_files

FORM = ".turn form textarea"


def begin_two_chats(chat: Chat) -> None:
    """Make a chat about a cat and, as the current one, a chat about a dog."""
    chat.ask_saved("a cat")
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


def test_each_chat_and_the_new_one_have_their_unsent_messages(chat: Chat) -> None:
    begin_two_chats(chat)
    drop(chat)
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
    chat.new_chat()  # takes the text in the box
    wait_for_box(chat, "another half")
    chat.page.fill("#box textarea", "a fox")
    chat.open_chat("a cat")
    wait_for_box(chat, "")
    chat.new_chat()
    wait_for_box(chat, "a fox")


def test_an_unsent_edit_survives_other_chats_and_a_reload_until_it_is_sent_or_cancelled(
    chat: Chat,
) -> None:
    begin_two_chats(chat)
    edit(chat, "two dogs")
    drop(chat, place=".turn form", onto=FORM)
    for is_new in (True, False):
        chat.new_chat() if is_new else chat.open_chat("a cat")
        assert chat.page.locator(FORM).count() == 0
        chat.open_chat("a dog")
        chat.page.wait_for_selector(FORM)
    chat.reload()
    chat.page.wait_for_selector(FORM)
    assert chat.page.input_value(FORM) == "two dogs"
    wait_for_files(chat, "fox.txt 17 B", place=".turn form")
    chat.page.press(FORM, "Enter")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .said:text-is('two dogs')")
    assert chat.page.locator(".file").count() == 1
    chat.open_chat("a cat")
    edit(chat, "two cats")
    chat.open_chat("two dogs")
    assert chat.page.locator(FORM).count() == 0
    chat.open_chat("a cat")
    chat.page.wait_for_selector(FORM)
    chat.page.click("[data-action=cancel]")
    chat.reload()
    chat.wait_for_reply()
    assert chat.page.locator(FORM).count() == 0
