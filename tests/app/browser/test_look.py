"""The page's look: colours, focus, scrolling, selection, control names, phones, printing."""

from __future__ import annotations

import re
from typing import Any

from speculation.methods import METHODS
from tests.app.browser.chat import Chat


def test_drafted_tokens_are_coloured_on_request_or_underlined_if_the_system_forces_colours(
    chat: Chat,
) -> None:
    chat.choose_method("Prompt lookup")  # auto may find drafts not worth it here
    chat.set_grammar('root ::= "the cat saw the cat saw the cat saw **the** cat"')
    chat.ask("hi")
    assert chat.last(".text") == "the cat saw the cat saw the cat saw the cat"
    drafted = chat.page.locator(".turn .drafted")
    assert drafted.count() > 0
    colours = [
        chat.page.locator(name).first.evaluate("e => getComputedStyle(e).backgroundColor")
        for name in (".turn .drafted", ".turn .text")
    ]
    assert colours[0] != colours[1]
    assert chat.page.locator(".turn strong").inner_text() == "the"
    ground = "getComputedStyle(document.querySelector('.turn .drafted')).backgroundColor"
    chat.page.uncheck("#colour input")
    chat.page.wait_for_function(f"{ground} === '{colours[1]}'")
    chat.page.check("#colour input")
    chat.page.wait_for_function(f"{ground} === '{colours[0]}'")
    line = "getComputedStyle(document.querySelector('.turn .drafted')).textDecorationLine"
    assert chat.page.evaluate(line) == "none"
    chat.page.emulate_media(forced_colors="active")
    assert chat.page.evaluate(line) == "underline"


def test_printing_shows_the_whole_chat_and_nothing_else(browser: Any, address: str) -> None:
    chat = Chat(browser, address, viewport={"width": 1280, "height": 600})
    for n, text in enumerate(("a cat\n" * 100, "two"), 1):
        chat.ask(text, n)
    long = "document.querySelector('.said').clientHeight / innerHeight"
    assert chat.page.evaluate(long) <= 0.5  # a long message scrolls, and prints whole
    chat.page.emulate_media(media="print")
    assert chat.page.evaluate(long) > 1
    for hidden in ("#settings", "#box", "#new", "#export", "[data-action=copy]"):
        assert chat.page.locator(hidden).first.is_hidden(), hidden
    top = chat.page.locator("#header").bounding_box()
    first = chat.page.locator(".said").first.bounding_box()
    last = chat.page.locator(".stats").last.bounding_box()
    height = chat.page.evaluate("document.documentElement.scrollHeight")
    assert 0 <= top["y"] < first["y"] < 600 < last["y"] + last["height"] <= height
    chat.close()


def test_printing_is_dark_on_light(browser: Any, address: str) -> None:
    chat = Chat(browser, address, color_scheme="dark")
    ink = "getComputedStyle(document.querySelector('#transcript')).color"
    dark = chat.page.evaluate(ink)
    chat.page.evaluate(
        f"() => {{ addEventListener('beforeprint', () => {{ window.ink = {ink} }}) }}"
    )
    chat.page.pdf()
    assert chat.page.evaluate("window.ink") == "rgb(29, 33, 41)"
    assert chat.page.evaluate(ink) == dark != "rgb(29, 33, 41)"
    chat.close()


def test_every_control_has_an_accessible_name(chat: Chat) -> None:
    chat.choose_method("Lookahead")
    chat.unfold("Parameters", "Model", "System prompt", "Sampling", "More")
    chat.ask("a cat")
    chat.page.click("[data-action=edit]")
    fields = chat.page.locator("input:visible, textarea:visible, button:visible").all()
    assert len(fields) > 50
    names = [re.search(r'(?<=^- )\w+ "[^"]+', field.aria_snapshot()) for field in fields]
    nameless = [field for field, name in zip(fields, names, strict=True) if name is None]
    assert [field.evaluate("field => field.outerHTML") for field in nameless] == []
    shown = " / ".join(name[0] for name in names if name)
    for unseen in ("Message", "Your message", "System prompt"):  # their labels are hidden
        assert f'textbox "{unseen}' in shown


def test_send_and_stop_leave_the_focus_in_the_box_and_the_caret_blinks_only_with_motion(
    chat: Chat,
) -> None:
    chat.never_end()
    in_box = "document.activeElement === document.querySelector('#box textarea')"
    chat.page.fill("#box textarea", "a cat")
    chat.page.click("#box .submit-button")
    chat.page.wait_for_selector(".live .text")
    assert chat.page.evaluate(in_box)
    blinks = "getComputedStyle(document.querySelector('.live .text'), '::after').animationName"
    assert chat.page.evaluate(blinks) == "caret"
    chat.page.emulate_media(reduced_motion="reduce")
    assert chat.page.evaluate(blinks) == "none"
    chat.page.click("#box .stop-button")
    chat.wait_for_reply()
    assert chat.page.evaluate(in_box)


def test_the_page_follows_a_reply_until_the_user_scrolls_up_and_keeps_selected_text(
    chat: Chat,
) -> None:
    chat.page.set_viewport_size({"width": 800, "height": 500})  # soon full
    chat.never_end()
    chat.say("a cat")
    below = "(() => { const box = document.querySelector('.turns');"
    below += " return box.scrollHeight - box.scrollTop - box.clientHeight; })()"
    height = "document.querySelector('.turns').scrollHeight"
    top = "document.querySelector('.turns').scrollTop"
    chat.page.wait_for_function(f"{height} > 3 * document.querySelector('.turns').clientHeight")
    assert chat.page.evaluate(below) < 60
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
    box = chat.page.locator(".turns").bounding_box()  # what is in it moves
    chat.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    chat.page.mouse.wheel(0, -8)
    chat.page.wait_for_function(f"{below} > 200")  # more text below
    stays = chat.page.evaluate(top)
    grown = chat.page.evaluate(height)
    chat.page.wait_for_function(f"{height} > {grown + 100}")
    assert chat.page.evaluate(top) == stays
    chat.page.mouse.wheel(0, 1_000_000)
    chat.page.wait_for_function(f"{below} < 60")
    grown = chat.page.evaluate(height)
    chat.page.wait_for_function(f"{height} > {grown + 100}")
    assert chat.page.evaluate(below) < 60


def test_the_page_fits_a_phone(browser: Any, address: str) -> None:
    chat = Chat(browser, address, viewport={"width": 390, "height": 844}, color_scheme="dark")
    chat.page.wait_for_selector("#settings.open", state="detached")
    chat.ask("a cat")
    chat.page.wait_for_selector("#settings:not(.open) .toggle-button[aria-expanded=false]")
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 390
    box = chat.page.locator("#box").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert box["y"] + box["height"] <= 844
    chat.close()


def test_an_open_list_covers_the_fields_below_it_and_a_long_path_ends_before_its_arrow(
    chat: Chat,
) -> None:
    chat.unfold("Sampling")
    chat.wait_for_stillness("#method input")  # the panel grows
    chat.page.click("#method input")
    chat.page.wait_for_selector("#settings [role=option]:visible")
    covered = chat.page.evaluate(
        """() => [...document.querySelectorAll("#settings [role=option]")].map((option) => {
          const box = option.getBoundingClientRect();
          const inside = [0.1, 0.3, 0.5].map((share) => document.elementFromPoint(
            box.left + share * box.width, (box.top + box.bottom) / 2));
          return option.checkVisibility() && !inside.every((found) => option.contains(found));
        })"""
    )
    assert covered == [False] * len(METHODS)
    chat.page.keyboard.press("Escape")
    chat.unfold("Model")
    chat.choose("model", "/a/long/path/to/" + "some-model-" * 10 + "q8_0.gguf")
    text, arrow = chat.page.evaluate(
        """() => {
          const input = document.querySelector("#model input");
          const room = parseFloat(getComputedStyle(input).paddingRight);
          const arrow = document.querySelector("#model .icon-wrap").getBoundingClientRect();
          return [input.getBoundingClientRect().right - room, arrow.left];
        }"""
    )
    assert text <= arrow
