"""Conversations that outgrow a small context: turns left out, saved and continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page.conversation import Conversation, PlainRun, Reply, Turn, markdown, stats_line
from app.page.render import turn_html
from app.page.saved import from_text, to_text
from app.worker.messages import Failed, LeftOut, Loaded, ModelSpec, Prefill, Tokens
from tests.support.fake_backend import DONE, FakeBackend, run, talk
from tests.support.local_backend import LocalBackend

CONTEXT = 256
BRIEF = {"max_tokens": 20, "sampling": {"grammar": 'root ::= "yes"'}, "method": "ar"}
ENDLESS = {"max_tokens": None, "sampling": {"grammar": "root ::= [a-z] root"}, "method": "ar"}


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Iterator[LocalBackend]:
    made = LocalBackend()
    spec = ModelSpec(str(tiny_model), n_ctx=CONTEXT, n_threads=1, flash_attn="off")
    assert isinstance(list(made.load(spec))[-1], Loaded)
    yield made
    made.close()


def say(
    conversation: Conversation,
    backend: LocalBackend,
    n_tokens: int = 46,
    letters: str = "abcdefghij",
) -> Reply:
    """Add a turn of ``n_tokens``: its letters, "yes" and four marks."""
    conversation.ask(letters[len(conversation.turns)] * (n_tokens - 7))
    return run(conversation, backend, **BRIEF)


def full(conversation: Conversation) -> list[int]:
    return [turn.n_ctx for turn in conversation.turns]


def test_a_chat_continues_when_the_context_is_full(backend: LocalBackend) -> None:
    conversation = Conversation()
    for _ in range(5):
        reply = say(conversation, backend)
        assert (reply.text, reply.n_left_out) == ("yes", 0)
    assert full(conversation) == [0] * 5
    reply = say(conversation, backend)
    assert (reply.text, reply.n_left_out) == ("yes", 4)
    assert full(conversation) == [0, 0, 0, 0, CONTEXT, 0]
    assert stats_line(reply).endswith(f" · context 93 / {CONTEXT} · 4 turns left out")
    assert [turn.user[0] for turn in conversation.turns] == list("abcdef")


def test_left_out_turns_stay_out_and_the_rest_is_reused_from_the_cache(
    backend: LocalBackend,
) -> None:
    conversation = Conversation()
    reused = []
    for _ in range(10):
        reply = say(conversation, backend, letters="qrstuvwxyz")  # of no other conversation
        assert reply.done is not None
        reused.append(reply.done.n_reused > 40)
    assert full(conversation).index(CONTEXT) == 8
    assert reused[1:] == [True, True, True, True, False, True, True, True, False]


def test_the_system_prompt_is_never_left_out(backend: LocalBackend) -> None:
    conversation = Conversation()
    for _ in range(6):
        conversation.ask("x" * 39)
        reply = run(conversation, backend, system="Be brief.", **BRIEF)
    assert reply.done is not None
    assert reply.n_left_out == 3
    assert reply.done.n_prompt == 1 + 11 + 2 * 46 + 42


def test_turns_that_fit_again_are_read_again(backend: LocalBackend) -> None:
    conversation = Conversation()
    for _ in range(6):
        say(conversation, backend)
    conversation.undo()
    conversation.undo()
    assert full(conversation) == [0] * 4
    assert say(conversation, backend).n_left_out == 0
    conversation.edit(0, "x")
    assert run(conversation, backend, **BRIEF).n_left_out == 0


def test_a_context_of_another_size_is_filled_again(backend: LocalBackend) -> None:
    for n_ctx, n_left_out in ((CONTEXT, 1), (2048, 0)):
        conversation = Conversation()
        for _ in range(4):
            say(conversation, backend)
        conversation.left_out = LeftOut(1, n_ctx)
        assert say(conversation, backend).n_left_out == n_left_out


def test_a_message_that_does_not_fit_alone_is_an_error_and_leaves_nothing_out(
    backend: LocalBackend,
) -> None:
    conversation = Conversation()
    say(conversation, backend)
    reply = say(conversation, backend, 300)
    assert "needs 297 tokens but the context holds 256; shorten it" in reply.error
    assert full(conversation) == [0, 0]
    assert say(conversation, backend).error == ""


def test_a_chat_stops_at_a_full_context_if_set_to(backend: LocalBackend) -> None:
    conversation = Conversation()
    for _ in range(6):
        say(conversation, backend)
    conversation.ask("x" * 39)
    reply = run(conversation, backend, leave_out=False, **BRIEF)
    assert "needs 319 tokens but the context holds 256" in reply.error


def test_a_reply_that_fills_the_context_can_be_continued(backend: LocalBackend) -> None:
    conversation = Conversation()
    say(conversation, backend, 100)
    conversation.ask("x" * 37)
    reply = run(conversation, backend, **ENDLESS)
    assert reply.done is not None
    assert (reply.done.finish_reason, reply.n_left_out) == ("context", 0)
    assert reply.is_cut_short
    begun = reply.text
    conversation.continue_reply()
    rest = run(conversation, backend, max_tokens=20, method="ar")
    assert rest.error == ""
    assert rest.n_left_out == 1
    assert rest.text.startswith(begun)
    assert len(rest.pieces) > len(reply.pieces)


def test_a_comparison_uses_the_replys_prompt() -> None:
    conversation = talk("one", "two")
    conversation.ask("three")
    plain = dataclasses.replace(DONE, method="ar", decode_seconds=2.0)
    backend = FakeBackend([LeftOut(1, 64), Tokens((("yes", True),)), DONE], [plain])
    reply = run(conversation, backend, compare=True)
    assert backend.requests[1].messages == backend.requests[0].messages[2:]
    assert not backend.requests[1].leave_out
    assert reply.plain == PlainRun(40.0, "", 80, 2.0)


def test_turns_without_a_reply_do_not_count() -> None:
    conversation = talk("one")
    conversation.ask("two")
    run(conversation, FakeBackend([Failed("no")]))
    conversation.ask("three")
    backend = FakeBackend([LeftOut(1, 64), Prefill(1, 2), Tokens((("yes", True),)), DONE])
    run(conversation, backend)
    assert [turn.n_ctx for turn in conversation.turns] == [0, 0, 64]
    assert conversation.left_out == LeftOut(1, 64)
    conversation.ask("four")
    backend = FakeBackend([DONE])
    run(conversation, backend)
    assert backend.requests[0].left_out == LeftOut(1, 64)


def test_the_divider_is_above_the_first_turn_in_context_and_not_exported() -> None:
    turn = Turn("hi", Reply("ar", [("yes", False)]), n_ctx=512)
    html = turn_html(turn, live=False, last=True)
    assert html.startswith(
        '<p class="left-out" role="note">The model no longer reads the turns above: its context '
        "of 512 tokens is full</p><article"
    )
    conversation = talk("one", "two")
    whole = markdown(conversation)
    conversation.left_out = LeftOut(1, 512)
    assert markdown(conversation) == whole


def test_left_out_turns_are_saved() -> None:
    conversation = talk("one", "two")
    conversation.left_out = LeftOut(1, 512)
    reply = conversation.turns[1].reply
    assert reply is not None
    reply.n_left_out = 1
    assert from_text(to_text(conversation)).turns == conversation.turns
    assert from_text(to_text(conversation)).left_out == LeftOut(1, 512)
