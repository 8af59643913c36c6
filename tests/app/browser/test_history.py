"""Saved chats: listed in the sidebar, searched, renamed, opened and deleted."""

from __future__ import annotations

import json
from typing import Any

from tests.app.browser.chat import Chat
from tests.app.browser.test_files import DROP, FOX


def titles(chat: Chat) -> list[str]:
    return list(chat.page.locator("#chats [data-open]").all_inner_texts())


def test_an_earlier_chat_can_be_opened_and_continued(chat: Chat) -> None:
    chat.page.wait_for_selector("#chats .none:visible")
    chat.ask("a cta")
    chat.undo()  # the next message replaces it
    stats = chat.ask("a  cat\nis here")
    text = chat.last(".text")
    chat.new_chat()
    chat.ask("a dog")
    chat.page.wait_for_selector("#chats [data-open]:has-text('a dog')")
    assert titles(chat) == ["a dog", "a cat is here"]
    assert chat.page.locator("#chats [aria-current=true]").inner_text() == "a dog"

    other = chat.other_tab()  # another tab lists them too
    other.click("#chats [data-open]:has-text('a cat')")
    other.wait_for_selector(".said:has-text('a cat')")
    other.close()

    chat.page.click("#chats [data-open]:has-text('a cat')")
    chat.page.wait_for_selector(".said:has-text('a cat')")
    assert (chat.wait_for_reply(), chat.last(".text")) == (stats, text)
    chat.ask("and a fox", 2)
    chat.page.wait_for_selector("#chats li:first-child [data-open]:has-text('a cat')")
    chat.open_chat("a dog")
    chat.wait_for_reply()
    assert titles(chat) == ["a cat is here", "a dog"]  # opening alone does not change the order
    asked = chat.answer_dialogs()
    chat.page.get_by_role("button", name="Delete a cat is here").click()
    assert (titles(chat), asked) == (["a dog"], ["Delete the chat “a cat is here”?"])
    chat.reload()
    assert titles(chat) == ["a dog"]
    chat.undo()
    chat.new_chat()
    chat.ask("a fox")
    chat.wait_for_titles("a fox", "a dog")  # a chat without turns stays in the list


def test_a_chat_can_be_renamed_and_keeps_its_name(chat: Chat) -> None:
    chat.ask_saved("a cat")
    focused = "document.activeElement.ariaLabel ?? document.activeElement.textContent"
    chat.page.get_by_role("button", name="Rename a cat").click()
    title = chat.page.get_by_role("textbox", name="Title")
    assert title.input_value() == "a cat"
    chat.page.keyboard.type("  Of   cats ")
    chat.page.keyboard.press("Enter")
    chat.wait_for_titles("Of cats")
    assert chat.page.evaluate(focused) == "Rename Of cats"
    other = chat.other_tab()
    other.click("#chats [data-rename]")
    other.keyboard.type("Of one cat")
    other.keyboard.press("Enter")
    chat.wait_for_titles("Of one cat")  # a change of another tab is shown and saved here
    other.close()
    chat.page.get_by_role("button", name="Rename Of one cat").click()
    chat.page.keyboard.type("Of cats")
    chat.page.keyboard.press("Enter")
    chat.ask("a dog", 2)
    chat.reload()
    chat.wait_for_reply(2)
    chat.wait_for_titles("Of cats")
    chat.page.focus("#chats [data-open]")
    chat.page.keyboard.press("F2")
    chat.page.keyboard.type("Of dogs")
    chat.page.keyboard.press("Escape")
    chat.wait_for_titles("Of cats")
    chat.page.get_by_role("button", name="Rename Of cats").click()
    title.fill("Of dogs")
    chat.ask("a cow", 3)  # leaves the field; meanwhile the chat is saved
    chat.wait_for_titles("Of dogs")
    chat.page.get_by_role("button", name="Rename Of dogs").click()
    title.fill("")
    title.press("Enter")
    chat.wait_for_titles("a cat")  # an empty title restores the default
    chat.begin_endless("a fox")  # while it is saved, the title can be edited
    chat.page.get_by_role("button", name="Rename a cat").click()
    chat.page.keyboard.type("Of ")
    size = "store.list().then(([chat]) => chat.size)"
    before = chat.page.evaluate(size)
    chat.page.wait_for_function(f"{size}.then((size) => size > {before})")
    chat.page.keyboard.type("cats")
    chat.page.keyboard.press("Enter")
    chat.wait_for_titles("Of cats")
    chat.page.click("#box .stop-button")
    chat.wait_for_reply(4)
    chat.wait_for_titles("Of cats")


def test_chats_are_searched_by_title_and_text(chat: Chat) -> None:
    assert not chat.page.is_visible("#chats [type=search]")
    chat.unfold("Sampling")
    chat.unfold("More")
    for n, (said, reply) in enumerate((("a Cat", "meow"), ("a dog", "bark"), ("a fox", "ÉCLAIR"))):
        chat.set("Grammar (GBNF)", f'root ::= "{reply}"')
        if n == 1:
            chat.page.evaluate(DROP, {"kind": "drop", **FOX})
            chat.page.wait_for_selector("#files li")
        chat.ask(said)
        chat.page.wait_for_selector(f"#chats [data-open]:text-is('{said}')")
        chat.new_chat()
    search = chat.page.get_by_role("searchbox", name="Search chats")
    found = chat.page.locator("#chats .found")
    for words, expected in (
        ("cat", ["a Cat"]),
        ("éclair", ["a fox"]),
        ("HEN bark", ["a dog"]),
        ("hen meow", []),
        ("a", ["a fox", "a dog", "a Cat"]),
    ):
        search.fill(words)
        chat.wait_for_titles(*expected)
        assert found.inner_text() == f"{len(expected)} of 3"
    search.fill("meow")
    chat.open_chat("a Cat")
    chat.wait_for_titles("a Cat")
    assert search.input_value() == "meow"
    search.press("Escape")
    chat.wait_for_titles("a fox", "a dog", "a Cat")
    assert found.inner_text() == ""


def test_each_tabs_version_of_a_chat_is_saved_even_if_another_tab_deleted_it(chat: Chat) -> None:
    chat.ask_saved("a cat")
    other = chat.other_tab()
    other.once("dialog", lambda dialog: dialog.accept())
    other.click("#chats [data-remove]")
    chat.wait_for_titles()
    chat.ask("a dog", 2)
    chat.wait_for_titles("a cat")
    assert chat.kept_messages() == [["a cat", "a dog"]]
    other.click("#chats [data-open]:has-text('a cat')")
    for page, said in ((chat.page, "a fox"), (other, "a hen")):
        page.wait_for_selector(".turns:not(:has(.live)) .said:has-text('a dog')")
        page.fill("#box textarea", said)
        page.press("#box textarea", "Enter")
        page.wait_for_selector(".turns:not(:has(.live)) > :nth-child(3) .stats")
    chat.wait_for_titles("a cat", "a cat")
    assert chat.kept_messages() == [["a cat", "a dog", "a fox"], ["a cat", "a dog", "a hen"]]


def test_opening_another_chat_stops_the_reply_and_saves_it_in_its_chat(chat: Chat) -> None:
    chat.ask("a cat")
    chat.new_chat()
    chat.begin_endless("a dog")
    begun = chat.last(".text")
    chat.open_chat("a cat")
    chat.open_chat("a dog")
    assert chat.wait_for_reply().endswith(" · stopped")
    assert chat.last(".text").startswith(begun)

    asked = chat.answer_dialogs()
    chat.page.click("[data-action=continue]")
    chat.page.wait_for_selector(".live .text")
    chat.page.focus("#chats li:nth-child(2) [data-open]")
    size = "store.list().then(([chat]) => chat.size)"
    before = chat.page.evaluate(size)
    chat.page.wait_for_function(f"{size}.then((size) => size > {before})")
    chat.settle()
    focused = "document.activeElement.textContent"
    assert chat.page.evaluate(focused) == "a cat"
    chat.page.get_by_role("button", name="Delete a dog").click()
    chat.page.wait_for_selector(".welcome:visible")
    chat.reload()
    chat.wait_for_titles("a cat")
    assert asked == ["Delete the chat “a dog”?"]


def test_foreign_data_in_the_browsers_storage_does_no_harm(chat: Chat) -> None:
    title = "<img src=x onerror=alert(1)>"
    found = [None, 1, {"name": "x"}, {"name": 'a"]', "title": title, "at": 0}]
    chat.page.evaluate("(text) => localStorage['speculation:chats'] = text", json.dumps(found))
    chat.page.evaluate("""localStorage['speculation:chat:a"]'] = 'x'""")
    chat.reload()
    chat.wait_for_titles(title)
    chat.ask("a cat")
    chat.wait_for_titles("a cat", title)
    chat.page.fill("#chats [type=search]", "cat")
    chat.wait_for_titles("a cat")
    chat.page.fill("#chats [type=search]", "")
    chat.wait_for_titles("a cat", title)
    chat.answer_dialogs()
    chat.page.click("#chats li:last-child [data-remove]")
    chat.wait_for_titles("a cat")


def test_without_storage_the_page_says_that_it_saves_nothing(browser: Any, address: str) -> None:
    chat = Chat(browser, address)
    chat.page.add_init_script(
        "for (const name of ['localStorage', 'sessionStorage']) "
        "Object.defineProperty(window, name, {get() { throw new Error('denied'); }});"
    )
    chat.reload()
    chat.page.wait_for_selector("#chats .trouble:has-text('The browser cannot save chats')")
    chat.page.evaluate(DROP, {"kind": "drop", **FOX})
    chat.page.wait_for_selector("#files li")
    chat.ask("a cat")
    chat.page.wait_for_selector("#transcript .unsaved:has-text('saves nothing for this page')")
    chat.page.click(".file summary")
    assert chat.page.text_content(".file pre") == "The fox.\nThe hen."
    assert chat.page.locator("#chats [type=checkbox]").is_disabled()
    assert not chat.page.locator("#chats [type=checkbox]").is_checked()
    assert chat.errors == []
    chat.close()
