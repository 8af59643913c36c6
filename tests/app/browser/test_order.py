"""The order of actions: sending, typing on, Stop, New chat, and other tabs."""

from __future__ import annotations

from typing import Any

from tests.app.browser.chat import Chat


def test_an_empty_message_changes_nothing_and_text_typed_after_sending_stays(chat: Chat) -> None:
    chat.ask("a cat")
    for text in ("", "  "):
        chat.wait_for_streams()
        with chat.page.expect_request("**/queue/data*"):
            chat.say(text)  # its effect arrives on the stream
        chat.wait_for_streams()
        chat.settle()
        assert chat.said() == ["a cat"]
        assert chat.page.inner_text("#header b")
    assert chat.page.input_value("#box textarea") == "  "
    held: list[Any] = []
    chat.page.route("**/run/predict", lambda route: held.append(route), times=1)
    chat.say("a dog")
    chat.page.keyboard.type("and a fox")  # before the message has left
    held[0].continue_()
    chat.wait_for_reply(2)
    assert chat.said() == ["a cat", "a dog"]
    assert chat.page.input_value("#box textarea") == "and a fox"


def test_stop_and_new_chat_work_right_after_sending(chat: Chat) -> None:
    chat.never_end()
    for n in range(1, 5):
        chat.say("a cat")
        chat.page.click("#box .stop-button")
        chat.wait_for_reply(n)
        assert "stopped" in chat.last(".stats")
    for _ in range(3):
        with chat.page.expect_request("**/queue/join*"):  # the call for the reply
            chat.say("a cat")
            chat.page.click("#new")
        chat.page.wait_for_selector(".welcome:visible")
        chat.page.wait_for_selector("#box .submit-button")
        assert chat.page.locator(".turn").count() == 0


def test_a_message_that_arrives_after_a_later_new_chat_is_ignored(chat: Chat) -> None:
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
    chat.new_chat()
    with chat.page.expect_request("**/queue/data*"):  # the call for the reply, after that one
        held[0].continue_()
    chat.page.unroute(is_message)
    chat.settle()
    chat.wait_for_streams()
    chat.ask("a bird")
    assert chat.said() == ["a bird"]


def test_a_second_tab_gets_its_reply_while_the_first_one_runs_until_it_is_closed(
    chat: Chat, browser: Any, address: str
) -> None:
    second = Chat(browser, address)
    second.begin_endless("a dog")
    chat.ask("a cat")
    busy = "fetch('slots').then((r) => r.json()).then((all) => all.some((s) => s.is_processing))"
    assert chat.page.evaluate(busy)
    second.close()
    chat.page.wait_for_function(f"{busy}.then((busy) => !busy)")
