"""The page on a fake backend: a comparison of known speeds, and a small request limit."""

from __future__ import annotations

from typing import Any

from tests.app.browser.chat import Chat, started


def test_a_comparison_shows_the_speed_up_and_a_message_too_large_an_error(browser: Any) -> None:
    with started("tests.support.fake_app", "--largest-body", "20000") as (address, _):
        chat = Chat(browser, address)
        chat.page.check("#compare input")
        stats = chat.ask("a cat")
        assert stats.startswith("80 tok/s · 2.0× plain, same text · 2.1 tokens per step")
        chat.say("x" * 30_000)
        chat.page.wait_for_selector(
            ".refused:has-text('This is too much to send at once: the limit is 0.0191 MiB.')"
        )
        assert len(chat.page.input_value("#box textarea")) == 30_000
        assert chat.page.locator(".turn").count() == 1
        chat.ask("a cat", 2)
        assert chat.page.is_hidden(".refused")
        assert chat.errors == []
        chat.close()
