"""The page on a fake backend: what would depend on a machine's speed, or on its memory."""

from __future__ import annotations

from typing import Any

from tests.app.browser.chat import Chat, started


def test_a_comparison_shows_how_many_times_as_fast_a_reply_was(browser: Any) -> None:
    with started("tests.support.fake_app") as (address, _):
        chat = Chat(browser, address)
        chat.page.check("#compare input")
        stats = chat.ask("a cat")
        assert stats.startswith("80 tok/s · 2.0× plain, same text · 2.1 tokens per step")
        chat.close()
