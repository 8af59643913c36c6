"""How the page looks and feels: colours, focus, scrolling, selection, a phone."""

from __future__ import annotations

from typing import Any

from tests.browser.chat import Chat


def test_drafted_tokens_are_coloured_and_the_colour_can_be_turned_off(chat: Chat) -> None:
    chat.choose_method("Prompt lookup")  # auto may find drafts not worth it here
    chat.unfold("Sampling")
    chat.unfold("More")
    chat.set("Grammar (GBNF)", 'root ::= "the cat saw the cat saw the cat saw **the** cat"')
    chat.ask("hi")
    assert chat.last(".text") == "the cat saw the cat saw the cat saw **the** cat"
    drafted = chat.page.locator(".turn .drafted")
    assert drafted.count() > 0
    colours = [
        chat.page.locator(name).first.evaluate("e => getComputedStyle(e).backgroundColor")
        for name in (".turn .drafted", ".turn .text")
    ]
    assert colours[0] != colours[1]
    chat.page.uncheck("#colour input")
    chat.page.wait_for_selector(".turn strong:has-text('the')")
    assert chat.last(".text") == "the cat saw the cat saw the cat saw the cat"
    assert drafted.count() == 0
    chat.page.check("#colour input")
    chat.page.wait_for_selector(".turn .drafted")


def test_the_focus_stays_in_the_box_when_send_or_stop_is_clicked(chat: Chat) -> None:
    chat.never_end()
    in_box = "document.activeElement === document.querySelector('#box textarea')"
    chat.page.fill("#box textarea", "a cat")
    chat.page.click("#box .submit-button")
    chat.page.wait_for_selector(".live .text")
    assert chat.page.evaluate(in_box)
    chat.page.click("#box .stop-button")
    chat.wait_for_reply()
    assert chat.page.evaluate(in_box)


def test_a_reply_is_followed_until_the_user_scrolls_up_however_little(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    below = "(() => { const box = document.querySelector('.turns');"
    below += " return box.scrollHeight - box.scrollTop - box.clientHeight; })()"
    chat.page.wait_for_function(
        "(box => box.scrollHeight > 3 * box.clientHeight)(document.querySelector('.turns'))"
    )
    assert chat.page.evaluate(below) < 60
    chat.page.hover(".live .text")
    for _ in range(4):
        chat.page.mouse.wheel(0, -8)
        chat.page.wait_for_timeout(30)
    top = chat.page.evaluate("document.querySelector('.turns').scrollTop")
    chat.page.wait_for_function(f"{below} > 200")  # it goes on below
    assert chat.page.evaluate("document.querySelector('.turns').scrollTop") == top
    chat.page.mouse.wheel(0, 100_000)
    chat.page.wait_for_function(f"{below} < 60")
    chat.page.wait_for_timeout(300)
    assert chat.page.evaluate(below) < 60


def test_what_is_selected_in_a_turn_stays_so_while_its_reply_grows(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_function(
        "(document.querySelector('.live .text')?.textContent ?? '').length > 200"
    )
    chat.page.evaluate(
        "const range = document.createRange(); const text = document.querySelector('.live .text');"
        "const walk = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);"
        "range.setStart(walk.nextNode(), 0); range.setEnd(walk.currentNode, 1);"
        "getSelection().removeAllRanges(); getSelection().addRange(range);"
        "window.first = document.querySelector('.said')"
    )
    selected = chat.page.evaluate("getSelection().toString()")
    length = chat.page.evaluate("document.querySelector('.live .text').textContent.length")
    chat.page.wait_for_function(
        f"document.querySelector('.live .text').textContent.length > {length + 300}"
    )
    assert selected
    assert chat.page.evaluate("getSelection().toString()") == selected
    assert chat.page.evaluate("window.first === document.querySelector('.said')")


def test_the_page_fits_a_phone(browser: Any, address: str) -> None:
    chat = Chat(browser, address, viewport={"width": 390, "height": 844}, color_scheme="dark")
    chat.page.wait_for_timeout(1000)  # the settings open, and close again
    assert chat.page.locator("#settings.open").count() == 0
    chat.ask("a cat")
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 390
    box = chat.page.locator("#box").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= 844
    chat.close()
