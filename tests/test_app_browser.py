"""``python -m app`` in a real browser: Chromium, driven by Playwright, on a tiny model.

CHROMIUM names the browser where it is not found under its usual names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.tiny_gguf import write_tiny_gguf

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TIMEOUT = 60_000  # ms; machines under load are slow
ENDLESS = "root ::= [a-z] root"
ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium: none of {NAMES} is here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "long.gguf", n_ctx=32768)


@contextmanager
def served(model: Path, *flags: str) -> Iterator[str]:
    """Where the app is served, in a process of its own."""
    command = [sys.executable, "-m", "app", "--no-browser", "--model", str(model)]
    command += ["--ctx", "32768", "--threads", "1", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            yield found[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


class Chat:
    """A tab with the chat in it, and what its page asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 800})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address)
        self.wait_for_page()

    def wait_for_page(self) -> None:
        self.page.wait_for_selector("#transcript .welcome", state="attached")
        self.page.wait_for_selector("#header b")

    def reload(self) -> None:
        self.page.reload()
        self.wait_for_page()

    def say(self, text: str) -> None:
        self.page.fill("#box textarea", text)
        self.page.press("#box textarea", "Enter")

    def wait_for_reply(self, n_turns: int = 1) -> str:
        """The stats line of the last reply, once there are ``n_turns`` and it is finished."""
        last = f".turns:not(:has(.live)) > :nth-child({n_turns}):last-child"
        return str(self.page.inner_text(f"{last} .stats"))

    def ask(self, text: str, n_turns: int = 1) -> str:
        self.say(text)
        return self.wait_for_reply(n_turns)

    def last(self, part: str) -> str:
        return str(self.page.inner_text(f".turns > :last-child {part}"))

    def unfold(self, label: str) -> None:
        self.page.click(f"#settings .gr-accordion > button:has-text('{label}'):visible")

    def set(self, label: str, value: str) -> None:
        field = self.page.get_by_label(label, exact=True).and_(self.page.locator(":visible"))
        for _ in range(20):  # the page may just be putting in the value that it was sent
            field.first.fill(value)
            field.first.blur()
            self.page.wait_for_timeout(100)
            if field.first.input_value() == value:
                return
        raise AssertionError(f"{label} does not take {value}")

    def choose_method(self, title: str) -> None:
        self.page.click("#method input")
        self.page.click(f"[role=option]:has-text('{title}')")

    def never_end(self) -> None:
        """Let the replies to come go on for long."""
        self.unfold("Sampling")
        self.set("Max tokens", "0")
        self.unfold("More")
        self.set("Grammar (GBNF)", ENDLESS)

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def chat(browser: Any, address: str) -> Iterator[Chat]:
    made = Chat(browser, address)
    made.unfold("Sampling")
    made.set("Max tokens", "60")
    made.unfold("Sampling")
    yield made
    assert made.errors == []
    made.close()


def test_a_chat_streams_and_says_what_it_cost(chat: Chat) -> None:
    assert re.fullmatch(
        r"[\d.]+ tok/s · \d\.\d tokens per step · (\d+ % accepted · )?"
        r"first token \d+\.\d\d s · context \d+ / 32768( · length limit)?",
        chat.ask("a cat"),
    )
    assert chat.last("code") == "auto"
    assert chat.last(".said") == "a cat"
    assert chat.page.is_hidden(".welcome")


def test_nothing_is_asked_for_outside_this_machine(chat: Chat, address: str) -> None:
    chat.ask("a cat")
    hosts = {urlsplit(url).netloc for url in chat.asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(address).netloc}


def test_the_browser_refuses_to_leave_this_machine(chat: Chat) -> None:
    refused = chat.page.evaluate(
        "() => fetch('http://192.0.2.1/', {mode: 'no-cors'}).then(() => '', (e) => String(e))"
    )
    assert "TypeError" in refused


def test_stop_ends_the_reply_and_the_next_one_comes(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    chat.page.click("#box .stop-button")
    assert chat.wait_for_reply().endswith(" · stopped")
    chat.set("Max tokens", "5")
    assert chat.ask("a dog", 2).endswith(" · length limit")


def test_retry_undo_and_edit(chat: Chat) -> None:
    chat.ask("one")
    first = chat.last(".text")
    chat.ask("two", 2)
    chat.page.click("text=Undo")
    chat.page.wait_for_selector(".turns > :only-child .stats")
    assert chat.page.input_value("#box textarea") == "two"
    chat.page.hover(".turns .reply")
    chat.page.click("text=Retry")
    chat.page.wait_for_selector(".live", state="detached")
    chat.wait_for_reply()
    assert chat.last(".text") == first
    chat.page.click("text=Edit")
    assert chat.page.input_value(".turn form textarea") == "one"
    chat.page.fill(".turn form textarea", "three <i>")
    chat.page.press(".turn form textarea", "Enter")
    chat.page.wait_for_selector(".said:has-text('three <i>')")
    chat.wait_for_reply()


def test_the_method_changes_without_loading_again(chat: Chat) -> None:
    assert "% of drafts accepted" not in chat.ask("a") or chat.last("code") == "auto"
    chat.choose_method("Lookahead")
    chat.ask("b", 2)
    assert chat.last("code") == "lookahead"
    chat.unfold("Parameters")
    chat.set("window", "5")
    chat.ask("c", 3)
    assert chat.last("code") == "lookahead:window=5"
    chat.set("window", "500")
    chat.say("d")
    assert "window is 500; give 1 to 128" in chat.last(".error")


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


def test_the_speed_up_is_shown_where_it_was_measured(chat: Chat) -> None:
    assert "plain" not in chat.ask("a cat")
    chat.page.check("#compare input")
    assert re.search(r"\d× plain, (same|other) text", chat.ask("a dog", 2))


def test_a_reply_can_be_copied_and_a_conversation_exported_and_ended(chat: Chat) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.unfold("Sampling")
    chat.unfold("More")
    chat.set("Grammar (GBNF)", 'root ::= "**a** <b>"')
    chat.ask("hi")
    for coloured in (True, False):
        chat.page.set_checked("#colour input", coloured)
        chat.page.wait_for_selector(".text.plain" if coloured else ".text.markdown")
        chat.page.click("text=Copy")
        chat.page.wait_for_selector("text=Copied")
        assert chat.page.evaluate("navigator.clipboard.readText()") == "**a** <b>"
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text.startswith("## You\n\nhi\n\n## Model\n\n**a** <b>\n")
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    assert chat.page.locator(".turn").count() == 0


def test_a_page_that_is_loaded_again_has_its_conversation_and_settings(chat: Chat) -> None:
    chat.choose_method("Lookahead")
    chat.unfold("Parameters")
    chat.set("window", "5")
    stats = chat.ask("a <b>cat</b>")
    text = chat.last(".text")
    chat.reload()
    assert chat.wait_for_reply() == stats
    assert (chat.last(".said"), chat.last(".text")) == ("a <b>cat</b>", text)
    chat.ask("a dog", 2)
    assert chat.last("code") == "lookahead:window=5"
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    chat.reload()
    assert chat.page.is_visible(".welcome")


def test_settings_and_what_is_being_written_are_kept_without_a_reply(chat: Chat) -> None:
    chat.page.uncheck("#colour input")
    chat.unfold("System prompt")
    chat.page.fill("#system textarea", "Be brief.")
    chat.page.fill("#box textarea", "half a sent")
    chat.page.wait_for_function("sessionStorage.getItem('values')?.includes('half a sent')")
    chat.reload()
    chat.unfold("System prompt")
    chat.page.wait_for_function("document.querySelector('#system textarea')?.value == 'Be brief.'")
    assert chat.page.input_value("#box textarea") == "half a sent"
    assert not chat.page.is_checked("#colour input")
    chat.ask("a cat")
    assert chat.page.locator(".text.markdown").count() == 1


def test_what_is_being_written_outlives_retry_undo_and_an_edit_during_a_reply(chat: Chat) -> None:
    chat.ask("one")
    chat.page.fill("#box textarea", "half")
    chat.page.hover(".turns .reply")
    chat.page.click("[data-action=retry]")
    chat.wait_for_reply()
    chat.page.click("[data-action=edit]")
    chat.page.fill(".turn form textarea", "other")
    chat.never_end()
    chat.page.press("#box textarea", "Enter")
    chat.page.wait_for_selector(".live .text")
    chat.page.press(".turn form textarea", "Enter")
    chat.page.wait_for_timeout(200)
    assert chat.page.input_value(".turn form textarea") == "other"
    chat.page.click("#box .stop-button")
    chat.page.wait_for_selector(".live", state="detached")
    chat.page.press(".turn form textarea", "Escape")
    chat.page.fill("#box textarea", "more")
    chat.page.click("[data-action=undo]")
    chat.page.wait_for_selector(".turns > :only-child")
    assert chat.page.input_value("#box textarea") == "more"


def test_whoever_retries_an_earlier_turn_is_asked_first(chat: Chat) -> None:
    asked: list[str] = []
    chat.page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    for n, text in enumerate(("one", "two", "three"), 1):
        chat.ask(text, n)
    chat.page.hover(".turns > :first-child .reply")
    chat.page.click(".turns > :first-child [data-action=retry]")
    chat.page.wait_for_timeout(300)
    assert asked == ["The 2 turns after go."]
    assert chat.page.locator(".turn").count() == 3


def test_a_server_that_was_started_anew_goes_on_with_the_page(browser: Any, model: Path) -> None:
    with served(model) as address:
        chat = Chat(browser, address)
        chat.ask("a cat")
    with served(model, "--port", str(urlsplit(address).port)):
        chat.ask("a dog", 2)
        assert chat.page.locator(".said").all_inner_texts() == ["a cat", "a dog"]
    chat.close()


def test_what_is_typed_while_the_server_is_away_is_there_again(browser: Any, model: Path) -> None:
    with served(model) as address:
        chat = Chat(browser, address)
        chat.never_end()
        chat.say("a cat")
        chat.page.wait_for_selector(".live .text")
        chat.page.fill("#box textarea", "half")
        chat.page.wait_for_timeout(300)
    chat.page.fill("#box textarea", "half a sentence")
    chat.page.wait_for_timeout(300)
    with served(model, "--port", str(urlsplit(address).port)):
        with suppress(sync_api.Error):  # the page may be on its way by itself
            chat.page.goto(address)
        chat.page.wait_for_function(
            "document.querySelector('#box textarea')?.value === 'half a sentence'"
        )
    chat.close()


def test_a_reply_that_the_page_was_left_in_can_be_retried(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    chat.reload()
    assert "this reply was not finished" in chat.last(".error")
    chat.unfold("Sampling")
    chat.set("Max tokens", "5")
    chat.page.hover(".turns .reply")
    chat.page.click("[data-action=retry]")
    chat.page.wait_for_selector(".stats:has-text('length limit')")


def test_a_reply_that_reached_its_length_goes_on(chat: Chat) -> None:
    chat.ask("a cat")
    begun = chat.last(".text")
    chat.page.click("[data-action=continue]")
    chat.page.wait_for_function(
        "n => document.querySelector('.text').dataset.source.length > n"
        " && !document.querySelector('.live')",
        arg=len(begun),
    )
    assert chat.last(".text").startswith(begun)
    assert chat.page.locator(".turn").count() == 1


def test_a_new_chat_ends_the_reply_that_is_due(chat: Chat) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    assert chat.page.locator(".turn").count() == 0


def test_a_new_chat_right_after_a_message_ends_it_too(chat: Chat) -> None:
    chat.never_end()
    for _ in range(3):
        with chat.page.expect_request("**/queue/join*"):  # the call for the reply
            chat.say("a cat")
            chat.page.click("#new")
        chat.page.wait_for_selector(".welcome:visible")
        chat.page.wait_for_selector("#box .submit-button")
        assert chat.page.locator(".turn").count() == 0


def test_stop_counts_from_the_moment_it_is_there(chat: Chat) -> None:
    chat.never_end()
    for n in range(1, 5):
        chat.say("a cat")
        chat.page.click("#box .stop-button")
        chat.wait_for_reply(n)
        assert "stopped" in chat.last(".stats")


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


def test_what_is_typed_right_behind_a_message_stays_in_the_box(chat: Chat) -> None:
    def slow(route: Any) -> None:
        chat.page.wait_for_timeout(300)
        route.continue_()

    chat.page.route("**/run/predict", slow)
    chat.say("a cat")
    chat.page.keyboard.type("and a dog")
    chat.wait_for_reply()
    chat.page.unroute("**/run/predict")
    assert chat.page.locator(".said").all_inner_texts() == ["a cat"]
    assert chat.page.input_value("#box textarea") == "and a dog"


def test_a_message_that_is_edited_keeps_its_indentation_and_hides_what_would_drop_it(
    chat: Chat,
) -> None:
    chat.ask("    keep\n  this")
    chat.page.hover(".turns .user")
    chat.page.click("[data-action=edit]")
    assert not chat.page.is_visible("[data-action=retry]")
    chat.page.click("[data-action=cancel]")
    assert chat.page.evaluate("document.activeElement.dataset.action") == "edit"
    chat.page.click("[data-action=edit]")
    chat.page.press(".turns form textarea", "End")
    chat.page.keyboard.type(" too")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".said:has-text('too')")
    chat.wait_for_reply()
    assert (
        chat.page.evaluate("document.querySelector('.said').textContent") == "    keep\n  this too"
    )


def test_a_value_that_gradio_refuses_ends_the_reply_and_not_the_chat(chat: Chat) -> None:
    chat.unfold("Sampling")
    number = chat.page.get_by_label("number input for Temperature")
    number.evaluate(
        "(field) => { field.value = '5';"
        " field.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    chat.say("a cat")
    assert "could not begin" in chat.last(".error")
    chat.page.wait_for_selector("#box .submit-button")
    chat.reload()  # which sets right what was kept
    assert chat.ask("a dog", 2)


def test_an_empty_message_changes_nothing(chat: Chat) -> None:
    chat.ask("a cat")
    for text in ("", "  "):
        with chat.page.expect_response("**/queue/join*"):
            chat.say(text)
        chat.page.wait_for_timeout(300)  # what comes of it comes on the stream
        assert chat.page.locator(".said").all_inner_texts() == ["a cat"]
        assert chat.page.inner_text("#header b")
    assert chat.page.input_value("#box textarea") == "  "
    assert chat.ask("a dog", 2)


def test_a_message_that_arrives_after_the_new_chat_that_followed_it_is_not_taken(
    chat: Chat,
) -> None:
    chat.ask("a cat")
    held: list[Any] = []
    is_message = "**/run/predict"

    def hold(route: Any) -> None:
        if "a dog" in (route.request.post_data or "") and not held:
            held.append(route)
        else:
            route.continue_()

    chat.page.route(is_message, hold)
    chat.say("a dog")
    chat.page.click("#new")
    chat.page.wait_for_selector(".welcome:visible")
    with chat.page.expect_request("**/queue/join*"):  # the call for the reply, after that one
        held[0].continue_()
    chat.page.unroute(is_message)
    chat.ask("a bird")
    assert chat.page.locator(".said").all_inner_texts() == ["a bird"]


def test_stop_ends_the_reply_and_not_the_load_behind_it(chat: Chat) -> None:
    chat.never_end()
    chat.unfold("Model")
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    chat.page.fill("#ctx input", "2048")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note:has-text('Waiting: 1 reply before yours')")
    assert chat.page.is_visible("#cancel")
    chat.page.click("#box .stop-button")
    chat.page.wait_for_selector("#header:has-text('context 2048')")
    chat.page.wait_for_selector("#load")
    chat.page.fill("#ctx input", "32768")
    chat.page.click("#load")
    chat.page.wait_for_selector("#header:has-text('context 32768')")


def test_what_looks_like_html_or_a_template_shows_as_text(chat: Chat) -> None:
    text = "<b>x</b> ${1+1} {{value}} &amp; <img src=x onerror=alert(1)>"
    chat.ask(text)
    assert chat.last(".said") == text
    assert chat.page.locator(".said *").count() == 0


def test_a_second_tab_waits_its_turn_and_is_told_so(chat: Chat, browser: Any, address: str) -> None:
    chat.never_end()
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    second = Chat(browser, address)
    second.say("a dog")
    second.page.wait_for_selector(".notice:has-text('Waiting: 1 reply before yours')")
    chat.page.click("#box .stop-button")
    second.page.wait_for_selector(".live .text, .stats")
    second.close()
    chat.wait_for_reply()


def test_a_tab_that_is_closed_makes_way(chat: Chat, browser: Any, address: str) -> None:
    second = Chat(browser, address)
    second.never_end()
    second.say("a dog")
    second.page.wait_for_selector(".live .text")
    second.close()
    chat.ask("a cat")


def test_a_model_that_does_not_load_leaves_the_old_one(chat: Chat, model: Path) -> None:
    chat.unfold("Model")
    chat.page.fill("#model input", "/nowhere/x.gguf")
    chat.page.press("#model input", "Enter")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note .error:has-text('/nowhere/x.gguf')")
    chat.ask("a cat")
    chat.page.fill("#model input", str(model))
    chat.page.press("#model input", "Enter")
    chat.page.fill("#ctx input", "1024")
    chat.page.click("#load")
    chat.page.wait_for_selector("#header:has-text('context 1024')")
    assert "/ 1024" in chat.ask("a dog", 2)
    chat.page.fill("#ctx input", "32768")
    chat.page.click("#load")
    chat.page.wait_for_selector("#header:has-text('context 32768')")


def test_a_draft_model_is_chosen_in_the_page(chat: Chat, model: Path) -> None:
    chat.choose_method("Draft model")
    chat.say("a cat")
    assert "under Model" in chat.last(".error")
    chat.unfold("Parameters")
    chat.set("p min", "0")  # a model of random weights is never sure
    chat.unfold("Model")
    chat.page.fill("#draft-model input", str(model))
    chat.page.press("#draft-model input", "Enter")
    chat.page.click("#load")
    chat.page.wait_for_selector(f"#header:has-text('draft {model.name}')")
    assert "% accepted" in chat.ask("a dog", 2)
    chat.reload()
    chat.unfold("Model")
    chat.page.wait_for_function(
        "document.querySelector('#draft-model input')?.value.endsWith('.gguf')"
    )
    chat.page.fill("#draft-model input", "/nowhere/y.gguf")
    chat.page.press("#draft-model input", "Enter")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note .error:has-text('/nowhere/y.gguf')")
    assert "% accepted" in chat.ask("a cow", 3)
    chat.page.fill("#draft-model input", "None")
    chat.page.press("#draft-model input", "Enter")
    chat.page.click("#load")
    chat.page.wait_for_selector("#header:not(:has-text('draft'))")


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
