"""Earlier chats: kept in the browser, listed beside the window, opened again."""

from __future__ import annotations

from tests.browser.chat import Chat

FILL = """(n) => {
  const list = [];
  for (let i = 0; i < n; i++) {
    localStorage.setItem(`chat:old-${i}`, "x".repeat(2000));
    list.push({name: `old-${i}`, title: `old ${i}`, at: 1e12 - i});
  }
  localStorage.setItem("chats", JSON.stringify(list));
  let size = 2 ** 22;
  let filler = "";
  for (; size >= 64; size /= 2) {
    try {
      localStorage.setItem("filler", filler + "y".repeat(size));
      filler += "y".repeat(size);
      size *= 2;
    } catch {}
  }
}"""


def titles(chat: Chat) -> list[str]:
    return list(chat.page.locator("#chats [data-open]").all_inner_texts())


def new_chat(chat: Chat) -> None:
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")


def test_an_earlier_chat_is_opened_and_gone_on_with(chat: Chat) -> None:
    chat.unfold("Chats")
    chat.page.wait_for_selector("#chats .none:visible")
    stats = chat.ask("a  cat\nis here")
    text = chat.last(".text")
    new_chat(chat)
    chat.ask("a dog")
    chat.page.wait_for_selector("#chats [data-open]:has-text('a dog')")
    assert titles(chat) == ["a dog", "a cat is here"]
    assert chat.page.locator("#chats [aria-current=true]").inner_text() == "a dog"

    other = chat.context.new_page()  # another tab has them as well
    other.goto(chat.page.url)
    other.click("#settings .gr-accordion > button:has-text('Chats')")
    other.click("#chats [data-open]:has-text('a cat')")
    other.wait_for_selector(".said:has-text('a cat')")
    other.close()

    chat.page.click("#chats [data-open]:has-text('a cat')")
    chat.page.wait_for_selector(".said:has-text('a cat')")
    assert (chat.wait_for_reply(), chat.last(".text")) == (stats, text)
    chat.ask("and a fox", 2)
    chat.unfold("Chats")
    chat.page.wait_for_selector("#chats li:first-child [data-open]:has-text('a cat')")
    chat.page.click("#chats [data-open]:has-text('a dog')")
    chat.page.wait_for_selector(".said:has-text('a dog')")
    chat.wait_for_reply()
    chat.unfold("Chats")
    chat.page.get_by_role("button", name="Delete a cat is here").click()
    assert titles(chat) == ["a dog"]
    chat.reload()
    chat.unfold("Chats")
    assert titles(chat) == ["a dog"]


def test_chats_are_not_kept_where_that_is_not_wanted(chat: Chat) -> None:
    chat.unfold("Chats")
    chat.ask("a cat")
    chat.page.wait_for_selector("#chats [data-open]")
    asked: list[str] = []
    chat.page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    chat.page.get_by_label("Keep chats in this browser").uncheck()
    assert asked == ["Forget the chat kept so far?"]
    chat.ask("a dog", 2)
    chat.page.wait_for_timeout(500)
    assert titles(chat) == []
    names = "Object.keys(localStorage).filter((name) => name.startsWith('chat'))"
    assert chat.page.evaluate(names) == ["chats"]
    assert chat.page.evaluate("localStorage.chats") == "[]"
    chat.reload()  # the tab has its conversation nevertheless
    assert chat.page.locator(".said").all_inner_texts() == ["a cat", "a dog"]


def test_where_there_is_no_room_the_oldest_make_way(chat: Chat) -> None:
    chat.page.evaluate(FILL, 6)
    chat.unfold("Chats")
    chat.ask("a cat")
    chat.page.wait_for_selector("#chats [data-open]:has-text('a cat')")
    left = titles(chat)
    assert left[:2] == ["a cat", "old 0"]
    assert 1 < len(left) < 7
    kept = chat.page.evaluate("Object.keys(localStorage).filter((k) => /^chat:/.test(k)).length")
    assert kept == len(left)
