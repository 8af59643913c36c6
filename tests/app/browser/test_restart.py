"""What pages keep when the server is killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.app.browser.chat import Chat, free_port, served, started
from tests.app.browser.test_files import DROP, FOX, wait_for_files
from tests.app.browser.test_unsent import FORM, edit, wait_for_box

# Stores the text of a growing reply as it is drawn.
NOTE_WHAT_IS_SEEN = """() => new MutationObserver(() => {
  const text = document.querySelector(".live .text")?.textContent.trim();
  if (text) localStorage.setItem("seen", text);
}).observe(document.querySelector("#transcript"),
           { subtree: true, childList: true, characterData: true })"""


def test_pages_lose_nothing_when_the_server_is_killed_and_started_again(
    browser: Any, model: Path
) -> None:
    port = free_port()
    flags = ("--no-browser", "--model", str(model), "--threads", "1", "--port", port)
    with started("app", *flags) as (address, process):
        idle = Chat(browser, address)
        idle.choose_method("Lookahead")
        idle.unfold("Parameters")
        idle.set("window", "5")
        idle.unfold("Sampling")
        idle.set("Max tokens", "5")
        idle.page.wait_for_function("store.fields()?.includes('max_tokens')")
        idle.ask("a cat")
        editing = Chat(browser, address)
        editing.page.evaluate(DROP, {"kind": "drop", **FOX})
        wait_for_files(editing, "fox.txt 17 B")
        editing.ask("a cat")
        edit(editing, "two cats")
        editing.page.evaluate(DROP, {"kind": "drop", **FOX, "name": "hen.txt"})
        wait_for_files(editing, "hen.txt 17 B")
        live = Chat(browser, address)
        live.never_end()
        live.page.evaluate(NOTE_WHAT_IS_SEEN)
        live.say("a cat")
        live.page.fill("#box textarea", "half")
        live.page.wait_for_function("sessionStorage.getItem('values')?.includes('half')")
        live.page.wait_for_function("localStorage.getItem('seen')?.length > 5")
        idle.wait_for_streams()
        editing.wait_for_streams()
        process.kill()
        process.wait()
        live.wait_for_streams()
        live.page.fill("#box textarea", "half a sentence")
        live.page.wait_for_function("sessionStorage.getItem('typed') === 'half a sentence'")
    with served(model, "--port", port, "--method", "lookahead:ngram=3"):
        idle.ask("a dog", 2)
        assert idle.page.locator(".said").all_inner_texts() == ["a cat", "a dog"]
        assert idle.last("code") == "lookahead:window=5"

        editing.go_to(address)
        editing.page.wait_for_selector(FORM)
        assert editing.page.input_value(FORM) == "two cats"
        wait_for_files(editing, "fox.txt 17 B", place=".turn form")
        wait_for_files(editing, "hen.txt 17 B")
        editing.page.press(FORM, "Enter")
        editing.page.wait_for_selector(".turns:not(:has(.live)) .said:text-is('two cats')")
        editing.page.wait_for_selector(".file:has-text('fox.txt')")

        live.go_to(address)
        live.page.wait_for_selector(".turns:not(:has(.live)) .error:has-text('unfinished')")
        seen = live.page.evaluate("localStorage.getItem('seen')")
        assert live.last(".text").startswith(seen)
        wait_for_box(live, "half a sentence")
        live.reload()
        assert live.last(".text").startswith(seen)

        other = Chat.within(idle.context, address)
        assert other.ask("a cat").endswith(" · length limit")  # of 5 tokens, as last used
        assert other.last("code") == "lookahead:ngram=3"  # a flag overrides what was last used
    for chat in (idle, editing, live):
        chat.close()
