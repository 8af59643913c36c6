"""Chats that outgrow a small context, on a tiny model: turns left out, read again and continued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.worker.messages import Loaded, ModelSpec
from tests.support.local_backend import LocalBackend
from tests.support.page import Json, Page, served

CONTEXT = 256
BRIEF: Json = {"max_tokens": 20, "sampling": {"grammar": 'root ::= "yes"'}, "method": "ar"}
ENDLESS: Json = {"max_tokens": 0, "sampling": {"grammar": "root ::= [a-z] root"}, "method": "ar"}


@pytest.fixture(scope="module")
def page(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    backend = LocalBackend()
    spec = ModelSpec(str(tiny_model), n_ctx=CONTEXT, n_threads=1, flash_attn="off")
    assert isinstance(list(backend.load(spec))[-1], Loaded)
    with served(backend, tmp_path_factory.mktemp("chats") / "chats.db") as site:
        yield site.page()
    backend.close()


class Talk:
    """A chat whose replies are "yes"."""

    def __init__(self, page: Page, letters: str = "abcdefghij", **settings: Any) -> None:
        self.page = page
        self.chat = page.new_chat(settings=BRIEF | settings)
        self._letters = letters

    def say(self, n_tokens: int = 46, **body: Any) -> Json:
        """Add a message and its reply, together ``n_tokens`` with four marks; returns the reply."""
        letter = self._letters[len(self.page.turns(self.chat)) // 2]
        self.page.send(self.chat, letter * (n_tokens - 7), **body)
        return self.page.done(self.chat)

    def first_read(self) -> int | None:
        """Which message the last prompt began with; None if it left nothing out."""
        turns = self.page.turns(self.chat)
        messages = [turn["id"] for turn in turns if turn["role"] == "user"]
        found = turns[-1]["reads_from"]
        return None if found is None else messages.index(found)


def test_a_chat_continues_when_the_context_is_full_and_left_out_turns_stay_out(page: Page) -> None:
    talk = Talk(page)
    replies = [talk.say() for _ in range(5)]
    assert [(one["text"], one["n_left_out"]) for one in replies] == [("yes", 0)] * 5
    assert talk.first_read() is None
    reply = talk.say()
    assert (reply["text"], reply["n_left_out"], reply["n_context"]) == ("yes", 4, 93)
    assert (talk.first_read(), reply["n_ctx"]) == (4, CONTEXT)
    assert [talk.say()["n_left_out"] for _ in range(4)] == [4, 4, 4, 8]


def test_the_system_prompt_is_never_left_out(page: Page) -> None:
    talk = Talk(page, system="Be brief.")
    for _ in range(6):
        reply = talk.say()
    assert reply["n_left_out"] == 3
    assert reply["n_context"] == 1 + 11 + 2 * 46 + 42 + 4


def test_turns_that_fit_again_are_read_again(page: Page) -> None:
    talk = Talk(page)
    for _ in range(6):
        talk.say()
    fifth = page.turns(talk.chat)[8]["id"]
    page.ask("DELETE", f"turns/{fifth}")
    assert talk.first_read() is None
    assert talk.say()["n_left_out"] == 0


def test_a_message_that_does_not_fit_is_an_error_and_leaves_nothing_out(page: Page) -> None:
    talk = Talk(page)
    talk.say()
    assert "needs 297 tokens but the context holds 256; shorten it" in talk.say(300)["error"]
    assert talk.first_read() is None
    assert talk.say()["error"] == ""
    stopping = Talk(page, leave_out=False)
    for _ in range(5):
        stopping.say()
    assert "needs 273 tokens but the context holds 256" in stopping.say()["error"]


def test_a_reply_that_fills_the_context_can_be_continued(page: Page) -> None:
    talk = Talk(page, "ax")
    talk.say(100)
    begun = talk.say(44, settings=ENDLESS)
    assert (begun["can_continue"], begun["n_left_out"]) == (True, 0)
    page.post(f"turns/{begun['id']}/continue", settings={"max_tokens": 20, "method": "ar"})
    rest = page.done(talk.chat)
    assert (rest["error"], rest["n_left_out"]) == ("", 1)
    assert rest["text"].startswith(begun["text"])
    assert len(rest["text"]) > len(begun["text"])
