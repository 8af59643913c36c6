"""The sidebar: the method, its parameters, the model and its draft model."""

from __future__ import annotations

from pathlib import Path

from tests.app.browser.chat import Chat


def load_with_context(chat: Chat, n: int, shown: int) -> None:
    """Load the chosen model with a context of ``n`` tokens, which is rounded up to ``shown``."""
    chat.page.fill("#ctx input", str(n))
    chat.page.click("#load")
    chat.page.wait_for_selector(f"#header:has-text('context {shown}')")


def test_the_method_changes_without_loading_the_model_again(chat: Chat) -> None:
    chat.ask("a")
    assert chat.last("code") == "auto"
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


def test_a_value_that_gradio_refuses_ends_the_reply_but_not_the_chat(chat: Chat) -> None:
    chat.unfold("Sampling")
    number = chat.page.get_by_label("number input for Temperature")
    number.evaluate(
        "(field) => { field.value = '5';"
        " field.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    chat.say("a cat")
    assert "could not start" in chat.last(".error")
    chat.page.wait_for_selector("#box .submit-button")
    chat.reload()  # restores a valid value
    assert chat.ask("a dog", 2)


def test_a_model_that_fails_to_load_leaves_the_old_one(chat: Chat, model: Path) -> None:
    chat.unfold("Model")
    chat.choose("model", "/nowhere/x.gguf")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note .error:has-text('/nowhere/x.gguf')")
    chat.page.wait_for_selector("#header:has(b) .error:has-text('/nowhere/x.gguf')")
    chat.ask("a cat")
    chat.page.wait_for_selector("#header:not(:has(.error)) b")
    chat.choose("model", str(model))
    chat.page.wait_for_selector("#ctx-note .notice:text-is('In effect: 32768 tokens')")
    load_with_context(chat, 1000, 1024)
    chat.page.wait_for_selector("#ctx-note .notice:text-is('In effect: 1024 tokens')")
    chat.reload()
    chat.unfold("Model")
    chat.page.wait_for_selector("#ctx-note .notice:text-is('In effect: 1024 tokens')")
    assert chat.page.input_value("#ctx input") == "1000"
    assert "/ 1024" in chat.ask("a dog", 2)
    load_with_context(chat, 32768, 32768)


def test_a_draft_model_can_be_chosen_in_the_page(chat: Chat, model: Path) -> None:
    chat.choose_method("Draft model")
    chat.say("a cat")
    assert "load one with “Draft model” under Model" in chat.last(".error")
    chat.unfold("Parameters")
    chat.set("p min", "0")  # random weights give low probabilities
    chat.set("p path", "0")
    chat.unfold("Model")
    chat.choose("draft-model", str(model))
    chat.page.click("#load")
    chat.page.wait_for_selector(f"#header:has-text('draft {model.name}')")
    assert "% accepted" in chat.ask("a dog", 2)
    chat.reload()
    chat.unfold("Model")
    chat.page.wait_for_function(
        "document.querySelector('#draft-model input')?.value.endsWith('.gguf')"
    )
    chat.choose("draft-model", "/nowhere/y.gguf")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note .error:has-text('/nowhere/y.gguf')")
    assert "% accepted" in chat.ask("a cow", 3)
    chat.choose("draft-model", "None")
    chat.page.click("#load")
    chat.page.wait_for_selector("#header:not(:has-text('draft'))")


def test_stop_ends_the_reply_but_not_the_load_queued_after_it(chat: Chat) -> None:
    chat.never_end()
    chat.unfold("Model")
    chat.say("a cat")
    chat.page.wait_for_selector(".live .text")
    chat.page.fill("#ctx input", "2048")
    chat.page.click("#load")
    chat.page.wait_for_selector("#load-note:has-text('Waiting: 1 reply is ahead of yours')")
    assert chat.page.is_visible("#cancel")
    chat.page.click("#box .stop-button")
    chat.page.wait_for_selector("#header:has-text('context 2048')")
    chat.page.wait_for_selector("#load")
    load_with_context(chat, 32768, 32768)
