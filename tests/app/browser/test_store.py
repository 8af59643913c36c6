"""The store of chats: migration, full storage, a missing database, and several tabs."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from tests.app.browser.chat import Chat
from tests.app.browser.test_history import titles

OLD = """(chats) => {
  for (const { name, text } of chats) localStorage.setItem(`speculation:chat:${name}`, text);
  localStorage.setItem("speculation:chats", JSON.stringify(chats.map(({ text, ...chat }) => chat)));
}"""
LEFT = "Object.keys(localStorage).filter((key) => key.startsWith('speculation:chat'))"
FAILS = {  # ways in which opening the database fails, and the page's messages
    "throws": ("throw new Error('denied')", "its database cannot be used (denied)"),
    "fails": (
        "const asked = {}; setTimeout(() => asked.onerror(), 100);"
        "asked.error = new DOMException('', 'VersionError'); return asked",
        "a newer version of this program has used this address",
    ),
    "is blocked": (
        "const asked = {}; setTimeout(() => asked.onblocked(), 100); return asked",
        "another tab has an older version of this page open; close that tab",
    ),
    "hangs": ("return {}", "its database does not open; reload this page"),
}


SOONER = """{
  const later = setTimeout;
  window.setTimeout = (f, ms, ...rest) => later(f, ms === 15000 ? 500 : ms, ...rest);
}"""


def turns(*said: str) -> str:
    reply = {"method": "ar", "pieces": [["yes", False]], "done": None, "error": "", "plain": None}
    return json.dumps([{"user": text, "reply": reply} for text in said])


def old_chat(name: str, at: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "title": name, "at": at, "text": turns(name), **more}


def limit_room(chat: Chat, n_bytes: int) -> None:
    """Limit the storage. Call it before anything is saved: the browser counts from there."""
    session = chat.context.new_cdp_session(chat.page)
    origin = chat.page.evaluate("location.origin")
    session.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": n_bytes})


# An exact limit in characters: the browser's own also counts data not yet cleaned up.
ROOM = """(most) => {
  const sizes = new Map();
  const { put, delete: drop } = IDBObjectStore.prototype;
  IDBObjectStore.prototype.put = function (value, key) {
    if (this.name === "texts") {
      const taken = [...sizes].reduce((sum, [name, n]) => (name === key ? sum : sum + n), 0);
      if (taken + value.length > most) throw new DOMException("full", "QuotaExceededError");
      sizes.set(key, value.length);
    }
    return put.apply(this, arguments);
  };
  IDBObjectStore.prototype.delete = function (key) {
    if (this.name === "texts") sizes.delete(key);
    return drop.apply(this, arguments);
  };
}"""


def noise(size: int) -> str:
    """A text that the browser cannot compress."""
    return "".join(random.Random(size).choices(string.ascii_letters, k=size))


def fill(chat: Chat, n: int, size: int) -> None:
    """Store ``n`` earlier chats of ``size`` characters."""
    chat.page.evaluate(
        """async ([n, turns]) => {
          for (let i = 0; i < n; i++) {
            const text = turns.replace("yes", `yes ${i}`);
            await store.add({ name: `old-${i}`, title: `old ${i}`, at: 1e12 - i }, text);
          }
        }""",
        [n, turns("an old one", noise(size))],
    )


def test_chats_of_earlier_versions_are_migrated_once_and_can_be_continued(chat: Chat) -> None:
    older = [old_chat("a fox", 3000), old_chat("a hen", 2000, named=True), old_chat("a cow", 1000)]
    chat.page.evaluate(OLD, older)
    chat.page.evaluate(  # the first one is open
        "(text) => { sessionStorage.setItem('conversation', text);"
        " sessionStorage.setItem('chat', 'a fox'); sessionStorage.removeItem('versions'); }",
        turns("a fox"),
    )
    chat.reload()
    chat.page.wait_for_selector(".said:text-is('a fox')")
    chat.wait_for_titles("a fox", "a hen", "a cow")
    assert chat.page.evaluate(LEFT) == []
    assert chat.kept()[1:] == [turns("a hen"), turns("a cow")]
    chat.ask("and a dog", 2)
    chat.page.wait_for_function("store.list().then(([chat]) => chat.at > 3000)")
    asked = chat.answer_dialogs()
    chat.page.get_by_role("button", name="Delete a cow").click()
    chat.wait_for_titles("a fox", "a hen")
    chat.reload()
    chat.wait_for_titles("a fox", "a hen")
    chat.open_chat("a hen")
    chat.ask("and a dog", 2)
    chat.page.wait_for_selector("#chats [aria-current]:has-text('a hen')")
    assert (len(titles(chat)), len(asked)) == (2, 1)


def test_an_interrupted_migration_resumes_and_loses_nothing(chat: Chat) -> None:
    older = [old_chat(name, at) for name, at in (("a fox", 4000), ("a hen", 3000), ("a cow", 2000))]
    broken = "Storage.prototype.removeItem = () => { throw new Error('broken off'); }"
    chat.page.evaluate(OLD, older)
    chat.page.add_init_script(f"if (!sessionStorage.getItem('mended')) {broken}")
    chat.reload()
    chat.wait_for_titles("a fox", "a hen", "a cow")
    chat.page.wait_for_selector(
        "#chats .trouble:has-text('3 chats of earlier versions could not be')"
    )
    # Meanwhile an earlier version continues one of them.
    text = turns("a hen", "and a dog")
    chat.page.evaluate("(text) => localStorage.setItem('speculation:chat:a hen', text)", text)
    chat.page.evaluate("sessionStorage.setItem('mended', 'yes')")
    chat.reload()
    chat.wait_for_titles("a fox", "a hen", "a hen", "a cow")
    expected = sorted([*(one["text"] for one in older), text])
    assert sorted(chat.kept()) == expected
    assert chat.page.evaluate(LEFT) == []
    assert chat.page.inner_text("#chats .trouble") == ""


def test_if_storage_is_full_the_oldest_chats_are_deleted_and_the_page_says_so(chat: Chat) -> None:
    chat.page.evaluate(ROOM, 600_000)
    fill(chat, 4, 120_000)
    chat.wait_for_titles("old 0", "old 1", "old 2", "old 3")
    chat.say(f"a cat {noise(130_000)}")
    chat.page.wait_for_selector("#chats [data-open]:has-text('a cat')")
    chat.page.wait_for_selector(".refused:has-text('To make room, the browser deleted')")
    assert titles(chat)[1:] == ["old 0", "old 1", "old 2"]
    assert "“old 3”" in chat.page.inner_text(".refused")
    assert not chat.page.is_visible("#transcript .unsaved")


def test_a_chat_too_large_for_the_storage_deletes_no_others(chat: Chat) -> None:
    limit_room(chat, 400_000)
    fill(chat, 1, 100_000)
    kept = chat.kept()
    chat.say(f"a cat {noise(350_000)}")
    chat.page.wait_for_selector(
        "#transcript .unsaved:has-text('cannot save this chat: it is out of space. It')"
    )
    assert chat.kept() == kept
    chat.page.wait_for_selector(".turns:not(:has(.live)) .error")
    chat.reload()  # the tab still has it
    assert chat.last(".said").startswith("a cat")
    chat.new_chat()
    assert not chat.page.is_visible("#transcript .unsaved")
    chat.ask("a dog")
    chat.page.wait_for_selector("#chats [data-open]:text-is('a dog')")


@pytest.mark.parametrize("how", FAILS)
def test_without_a_database_the_page_works_and_says_what_is_not_saved(chat: Chat, how: str) -> None:
    chat.page.evaluate(OLD, [old_chat("a fox", 2000)])
    body, why = FAILS[how]
    chat.page.add_init_script(f"IDBFactory.prototype.open = () => {{ {body}; }}; {SOONER}")
    chat.reload()
    trouble = chat.page.locator("#chats .trouble")
    chat.page.wait_for_selector("#chats .trouble:not(:empty)")
    assert trouble.inner_text() == f"The browser cannot save chats: {why}."
    assert chat.page.locator("#chats [type=checkbox]").is_disabled()
    chat.ask("a cat")
    chat.page.wait_for_selector("#transcript .unsaved:not([hidden])")
    assert chat.page.inner_text("#transcript .unsaved") == (
        f"The browser cannot save this chat: {why}. It lasts until you close this tab. "
        "Use Export to save it."
    )
    chat.reload()
    assert chat.last(".said") == "a cat"
    assert len(chat.page.evaluate(LEFT)) == 2  # chats that were not migrated stay


def test_a_newer_version_in_another_tab_gets_the_database_and_this_one_says_so(chat: Chat) -> None:
    chat.ask_saved("a cat")
    other = chat.context.new_page()
    other.route("**/newer", lambda route: route.fulfill(body="<p>newer", content_type="text/html"))
    other.goto(f"{chat.page.url}newer")
    other.evaluate(
        "new Promise((resolve) => indexedDB.open('speculation', 2).onsuccess = () => resolve())"
    )
    why = "a newer version of this page is open; reload this one"
    chat.page.wait_for_selector(f"#chats .trouble:has-text('{why}')")
    chat.ask("a dog", 2)
    chat.page.wait_for_selector(f"#transcript .unsaved:has-text('{why}')")
    chat.reload()
    chat.wait_for_reply(2)
    chat.page.wait_for_selector("#chats .trouble:has-text('a newer version of this program has')")


def test_switching_saving_off_in_one_tab_applies_to_all(chat: Chat) -> None:
    chat.ask_saved("a cat")
    other = Chat.within(chat.context, chat.page.url)
    other.page.wait_for_selector("#chats [data-open]")
    asked = other.answer_dialogs()
    other.page.get_by_label("Save chats in this browser").uncheck()
    assert asked == ["Delete the saved chat?"]
    chat.wait_for_titles()
    chat.page.wait_for_selector("#chats [type=checkbox]:not(:checked)")
    chat.ask("a dog", 2)
    assert chat.saved() == []
    assert chat.page.evaluate("({...localStorage})") == {"speculation:keeps-chats": "no"}
    chat.reload()  # the tab still has its chat
    assert chat.said() == ["a cat", "a dog"]
    other.page.get_by_label("Save chats in this browser").check()
    chat.page.wait_for_selector("#chats [type=checkbox]:checked")
    chat.ask("a fox", 3)
    chat.wait_for_titles("a cat")
    other.wait_for_titles("a cat")


def test_a_duplicated_tab_does_not_overwrite_the_first(chat: Chat) -> None:
    chat.ask_saved("a cat")
    state = chat.page.evaluate("({...sessionStorage})")
    chat.ask("a dog", 2)
    chat.page.wait_for_function(
        "store.list().then(([chat]) => chat.version === current.versions[0])"
    )
    chat.page.evaluate(
        "(state) => { addEventListener('pagehide', () => {"
        " sessionStorage.clear(); Object.assign(sessionStorage, state); }); }",
        state,
    )
    chat.reload()  # as the duplicate from before
    chat.wait_for_reply()
    chat.ask("a fox", 2)
    chat.wait_for_titles("a cat", "a cat")
    assert chat.kept_messages() == [["a cat", "a dog"], ["a cat", "a fox"]]


def test_an_unsaved_chat_is_not_discarded_without_asking(chat: Chat) -> None:
    fill(chat, 1, 10)
    chat.wait_for_titles("old 0")
    chat.page.evaluate(
        "() => { store.save = async () => { throw new DOMException('', 'QuotaExceededError') } }"
    )
    chat.ask("a cat")
    chat.page.wait_for_selector("#transcript .unsaved:not([hidden])")
    asked = chat.answer_dialogs(accept=False)
    with chat.page.expect_event("dialog"):
        chat.page.click("#chats [data-open]")
    chat.settle()
    assert asked == ["The current chat is not saved. Opening another one discards it. Continue?"]
    assert chat.last(".said") == "a cat"
    chat.new_chat()
    chat.page.click("#chats [data-open]")
    chat.page.wait_for_selector(".said:text-is('an old one')")
    assert len(asked) == 1
