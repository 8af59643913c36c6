"""ReplyText: characters that span tokens, stop strings, and what ends a text, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batching.errors import InvalidParameter
from speculation.chat.detokenizer import ReplyText, Token

PIECES = {1: b"Hel", 2: b"lo", 3: b" w\xc3", 4: b"\xb6rld", 5: b"</s>", 6: b"!", 7: b"\xe2\x82"}
END = 5


class Vocabulary:
    """The part of a model's vocabulary that ReplyText uses."""

    n_vocab = 8
    ends = frozenset([END])

    def piece(self, token: int) -> bytes:
        return PIECES[token]

    def texts(self, tokens: Sequence[int]) -> list[str] | None:
        if any(token in (3, 4, 5, 7) for token in tokens):
            return None
        return [PIECES[token].decode() for token in tokens]


def released(reply: ReplyText, n: int, n_drafted: int = 0) -> list[str]:
    return [token.text for token in reply.release(n, n_drafted)]


def text(stop: Sequence[str] = (), max_tokens: int | None = None) -> ReplyText:
    return ReplyText(Vocabulary(), stop, max_tokens)  # type: ignore[arg-type]


def test_tokens_of_a_step_are_released_with_drafts_marked() -> None:
    reply = text()
    assert reply.take([1, 2, 6]) == (3, None)
    assert list(reply.release(3, 2)) == [
        Token(1, "Hel", True),
        Token(2, "lo", True),
        Token(6, "!", False),
    ]
    assert reply.shown == "Hello!"
    assert reply.ids == [1, 2, 6]


def test_a_character_that_spans_tokens_arrives_with_its_last_token() -> None:
    reply = text()
    assert reply.take([1, 3]) == (2, None)
    assert released(reply, 2, 1) == ["Hel", " w"]
    assert reply.take([4, 6]) == (2, None)
    assert released(reply, 2, 1) == ["örld", "!"]
    assert reply.shown == "Hel wörld!"


def test_an_incomplete_character_is_replaced_when_the_next_token_or_the_end_arrives() -> None:
    reply = text()
    assert reply.take([1, 3]) == (2, None)
    assert reply.take([6, 1]) == (2, None)
    assert released(reply, 4) == ["Hel", " w", "\N{REPLACEMENT CHARACTER}!", "Hel"]
    assert reply.take([7]) == (1, None)
    assert released(reply, 1) == [""]
    assert list(reply.rest()) == [Token(7, "\N{REPLACEMENT CHARACTER}", False)]
    assert reply.shown == "Hel w\N{REPLACEMENT CHARACTER}!Hel\N{REPLACEMENT CHARACTER}"


def test_a_text_can_end_in_the_middle_of_a_step() -> None:
    reply = text()
    assert reply.take([1, END, 2]) == (2, "stop")
    assert released(reply, 2, 2) == ["Hel", ""]
    assert reply.shown == "Hel"
    assert text(max_tokens=2).take([1, 2, 6]) == (2, "length")
    assert text(max_tokens=3).take([1, 2, 6]) == (3, "length")
    assert text(max_tokens=2).take([1, END]) == (2, "stop")


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    reply = text(stop=("lo w",))
    assert reply.take([1, 2]) == (2, None)
    assert released(reply, 2, 1) == ["Hel"]
    assert reply.take([3, 6]) == (1, "stop")
    assert released(reply, 1, 1) == ["", ""]
    assert reply.shown == "Hel"
    assert reply.stopped_by


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    reply = text(stop=("lo?",))
    assert reply.take([1, 2]) == (2, None)
    assert released(reply, 2) == ["Hel"]
    assert list(reply.rest()) == [Token(2, "lo", False)]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="a stop string is empty; leave it out"):
        text(stop=("a", ""))
