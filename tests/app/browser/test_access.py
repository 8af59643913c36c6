"""Accessibility: keyboard, screen reader, zoom, contrast and right-to-left scripts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.app.browser.chat import Chat
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

OPEN_LISTS = "[...document.querySelectorAll('.options')].filter(o => o.checkVisibility()).length"


def test_tab_closes_a_list_and_the_focus_moves_to_the_button_that_replaces_another(
    chat: Chat,
) -> None:
    chat.unfold("Model")
    for name in ("method", "model", "draft-model"):
        chat.page.focus(f"#{name} input")
        chat.page.wait_for_function(f"{OPEN_LISTS} === 1")
        chat.page.keyboard.press("Tab")
        chat.page.wait_for_function(
            f"{OPEN_LISTS} === 0 || !document.querySelector('#{name} input:focus')"
        )
        assert not chat.page.is_visible(f"#{name} .options")
    chat.page.focus("#load")
    chat.wait_for_streams()
    with chat.page.expect_request("**/queue/data*"):
        chat.page.keyboard.press("Enter")  # Cancel comes and goes
    chat.wait_for_streams()
    chat.page.wait_for_function("document.activeElement?.id === 'load'")
    chat.page.click("#new")
    assert chat.page.evaluate("document.activeElement.closest('#box') !== null")


def test_a_closed_sidebar_takes_no_focus(browser: Any, address: str) -> None:
    chat = Chat(browser, address, viewport={"width": 640, "height": 400})
    chat.page.wait_for_selector("#settings:not(.open)")
    toggle = "#settings .toggle-button"
    chat.page.wait_for_selector(f"{toggle}[aria-expanded=false]")
    for _ in range(12):
        chat.page.keyboard.press("Shift+Tab")
        assert chat.page.evaluate("document.activeElement.getBoundingClientRect().right") > 0
    chat.page.click(toggle)
    chat.page.wait_for_selector(f"{toggle}[aria-expanded=true]")
    chat.page.focus("#method input")
    assert chat.page.evaluate("document.activeElement.closest('#method') !== null")
    chat.close()


def test_a_screen_reader_hears_a_replys_start_and_end_its_author_and_its_direction(
    chat: Chat,
) -> None:
    heard = "document.querySelector('#transcript [role=status].unseen').textContent"
    chat.never_end()
    chat.say("مرحبا, hello.")
    chat.page.wait_for_function(f"{heard} === 'The model is replying'")
    chat.page.click("#box .stop-button")
    chat.page.wait_for_function(f"{heard} === 'The reply is complete'")
    assert chat.page.get_by_role("group", name="You", exact=True).inner_text().startswith("مرحبا")
    style = "getComputedStyle(document.querySelector('.said'))"  # follows the paragraph's script
    assert chat.page.evaluate(f"[{style}.direction, {style}.unicodeBidi]") == ["rtl", "plaintext"]
    assert chat.page.get_by_role("group", name="Model", exact=True).count() == 1
    accordion = chat.page.get_by_role("button", name="System prompt")
    assert accordion.get_attribute("aria-expanded") == "false"
    accordion.click()
    chat.page.wait_for_selector(".gr-accordion > button[aria-expanded=true]:has-text('System')")


def test_at_400_percent_zoom_the_page_scrolls_and_nothing_overlaps(
    browser: Any, address: str
) -> None:
    chat = Chat(browser, address, viewport={"width": 320, "height": 200})
    parts = [chat.page.locator(name).bounding_box() for name in ("#top", "#transcript", "#entry")]
    for above, below in pairwise(parts):
        assert above["y"] + above["height"] <= below["y"] + 1
    chat.ask("a cat")
    assert chat.page.locator(".turns").bounding_box()["height"] > 60
    chat.page.locator(".turn .stats").scroll_into_view_if_needed()
    assert chat.page.is_visible(".turn .stats")
    chat.close()


def test_a_wide_table_scrolls_and_its_words_stay_whole(chat: Chat) -> None:
    chat.page.uncheck("#colour input")
    row = "|" + "wordy|" * 30
    rows = "\\n".join((row, "|" + "-|" * 30, row))
    chat.set_grammar(f'root ::= "{rows}"')
    chat.set("Max tokens", "900")
    chat.ask("hi")
    table = "document.querySelector('.markdown table')"
    assert chat.page.evaluate(f"{table}.scrollWidth > {table}.clientWidth")
    turns = "document.querySelector('.turns')"
    assert chat.page.evaluate(f"{turns}.scrollWidth <= {turns}.clientWidth")
    assert chat.page.evaluate(f"{table}.querySelector('td').clientHeight") < 40


def test_text_has_enough_contrast(chat: Chat) -> None:
    contrast = """(selector, pseudo) => {
      const element = document.querySelector(selector);
      const canvas = document.createElement("canvas").getContext("2d");
      const light = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => {
          const share = value / 255;
          return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      let behind = element;
      while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
        behind = behind.parentElement;
      }
      const text = light(getComputedStyle(element, pseudo).color);
      const back = light(getComputedStyle(behind).backgroundColor);
      return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    }"""
    chat.unfold("Model", "System prompt", "Sampling")
    for selector, pseudo in (
        ("#box textarea", "::placeholder"),
        ("#system textarea", "::placeholder"),
        ("#settings .min_value", None),
        ("#load", None),
        ("#header span", None),
    ):
        found = chat.page.evaluate(f"([s, p]) => ({contrast})(s, p)", [selector, pseudo])
        assert found >= 4.5, f"{selector} {found:.2f}"


def test_load_can_be_clicked_even_if_committing_typed_text_moves_it(chat: Chat) -> None:
    chat.unfold("Model")
    chat.page.click("#heads input")
    chat.page.keyboard.type("/nowhere/with/a/long/path/that/becomes/a/chip/heads.gguf")
    chat.page.locator("#load").scroll_into_view_if_needed()
    box = chat.wait_for_stillness("#load")
    chat.page.mouse.move(box["x"] + 20, box["y"] + 8)
    chat.page.mouse.down()
    chat.page.wait_for_selector("#heads .token:has-text('/nowhere')")
    chat.settle()
    chat.page.mouse.up()
    chat.page.wait_for_selector("#load-note .error:has-text('/nowhere/with')")


def test_reasoning_can_be_chosen_if_the_model_supports_it(
    browser: Any, chat: Chat, address: str, tmp_path: Path
) -> None:
    assert not chat.page.is_visible("#thinking")
    told = CHAT_TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}a{% endif %}"
    model = write_tiny_gguf(tmp_path / "thinks.gguf", chat_template=told, n_ctx=32768)
    chat.unfold("Model")
    before = chat.page.input_value("#model input")
    for name, is_seen in ((str(model), True), (before, False)):
        chat.choose("model", name)
        chat.page.click("#load")
        chat.page.wait_for_selector(f"#header:has-text('{Path(name).name}')")
        chat.page.wait_for_selector("#thinking", state="visible" if is_seen else "hidden")
        if is_seen:
            context = chat.ask("hi").split("context ")[1]
            chat.page.click("#thinking label:has-text('on')")
            assert chat.ask("hi", 2).split("context ")[1] != context
