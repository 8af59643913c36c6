"""What the page restores after a reload and in a new tab."""

from __future__ import annotations

from tests.app.browser.chat import Chat


def test_a_reloaded_page_has_its_chat_settings_and_unsent_text(chat: Chat) -> None:
    chat.choose_method("Lookahead")
    chat.unfold("Parameters", "System prompt")
    chat.set("window", "5")
    stats = chat.ask("a <b>cat</b>")
    text = chat.last(".text")
    chat.page.uncheck("#colour input")
    chat.page.fill("#system textarea", "Be brief.")
    chat.page.fill("#box textarea", "half a sent")
    chat.page.wait_for_function("sessionStorage.getItem('values')?.includes('half a sent')")
    chat.reload()
    assert chat.wait_for_reply() == stats
    assert (chat.last(".said"), chat.last(".text")) == ("a <b>cat</b>", text)
    chat.unfold("System prompt")
    chat.page.wait_for_function("document.querySelector('#system textarea')?.value == 'Be brief.'")
    assert chat.page.input_value("#box textarea") == "half a sent"
    assert not chat.page.is_checked("#colour input")
    chat.ask("a dog", 2)
    assert chat.last("code") == "lookahead:window=5"
    chat.new_chat()
    chat.reload()
    assert chat.page.is_visible(".welcome")


def test_a_reply_interrupted_by_a_reload_can_be_retried(chat: Chat) -> None:
    chat.begin_endless("a cat")
    chat.reload()
    assert "This reply is unfinished" in chat.last(".error")
    chat.unfold("Sampling")
    chat.set("Max tokens", "5")
    assert chat.retry().endswith(" · length limit")


def test_a_reply_interrupted_by_a_reload_can_be_continued(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_function("sessionStorage.getItem('conversation')?.includes('pieces\": [[')")
    kept = chat.page.evaluate(
        "JSON.parse(sessionStorage.getItem('conversation'))[0].reply.pieces.map(p => p[0]).join('')"
    )
    assert kept
    chat.reload()
    assert chat.last(".text").startswith(kept)
    chat.set_grammar("")
    chat.set("Max tokens", "5")
    begun = chat.last(".text")
    chat.page.click("[data-action=continue]")
    chat.page.wait_for_selector(".turns:not(:has(.live)) .stats:has-text('first token')")
    assert chat.last(".text").startswith(begun)
    assert chat.page.locator(".turn .error").count() == 0


def test_a_chat_too_long_for_the_tab_is_read_from_the_store_or_the_page_says_that_it_is_lost(
    chat: Chat,
) -> None:
    chat.page.evaluate("sessionStorage.setItem('other', 'x'.repeat(5_200_000))")
    said = "a cat" + " and a dog" * 6000
    chat.ask(said)
    chat.page.wait_for_selector("#chats [data-open]:has-text('a cat')")
    chat.page.wait_for_function("sessionStorage.getItem('conversation') === null")
    assert not chat.page.is_visible("#transcript .unsaved")
    chat.reload()
    assert chat.last(".said") == said
    chat.ask("a fox", 2)
    chat.page.wait_for_function("store.list().then(([chat]) => chat.size > 60_000)")
    assert chat.page.locator("#chats li").count() == 1
    chat.reload()
    chat.wait_for_reply(2)
    chat.answer_dialogs()  # without the store, nothing can save it
    chat.page.get_by_label("Save chats in this browser").uncheck()
    chat.ask("a hen", 3)
    assert "too long for the browser to save" in chat.page.inner_text("#transcript .unsaved")
    chat.page.evaluate("sessionStorage.removeItem('other')")
    chat.new_chat()
    chat.ask("a dog")
    assert not chat.page.is_visible("#transcript .unsaved")


def test_a_new_tab_starts_with_the_settings_last_used(chat: Chat, address: str) -> None:
    chat.choose_method("Lookahead")
    chat.unfold("Parameters", "System prompt")
    chat.set("window", "5")
    chat.page.fill("#system textarea", "Be brief.")
    chat.page.fill("#box textarea", "half a sent")
    chat.page.wait_for_function("store.fields()?.includes('Be brief.')")
    other = Chat.within(chat.context, address)
    other.page.wait_for_function("document.querySelector('#box textarea').value === ''")
    other.ask("a cat")
    assert other.last("code") == "lookahead:window=5"
    other.unfold("System prompt")
    assert other.page.input_value("#system textarea") == "Be brief."
    assert other.last(".stats").endswith(" · length limit")  # of 60 tokens, as in the first tab
    chat.page.once("dialog", lambda dialog: dialog.accept())
    chat.page.get_by_label("Save chats in this browser").uncheck()
    chat.page.wait_for_function("localStorage.getItem('speculation:fields') === null")
    chat.page.fill("#system textarea", "Be long.")
    chat.ask("a dog")
    assert chat.page.evaluate("localStorage.getItem('speculation:fields')") is None
    last = Chat.within(chat.context, address)
    last.ask("a hen")
    assert last.last("code") == "auto"


def test_a_message_sent_while_the_chat_is_still_being_read_continues_it(chat: Chat) -> None:
    chat.ask("a cat")
    chat.page.wait_for_selector("#chats [aria-current]")
    chat.page.evaluate("sessionStorage.removeItem('conversation')")
    chat.page.add_init_script(
        "{ const open = IDBFactory.prototype.open;"
        "IDBFactory.prototype.open = function (...asked) {"
        "  const request = open.apply(this, asked); const late = {};"
        "  request.onsuccess = () => setTimeout(() => late.onsuccess({}), 3000);"
        "  Object.defineProperty(late, 'result', { get: () => request.result });"
        "  return late; } }"
    )
    chat.reload()
    chat.say("a dog")
    chat.wait_for_reply(2)
    assert chat.said() == ["a cat", "a dog"]
    assert chat.page.locator("#chats li").count() == 1
