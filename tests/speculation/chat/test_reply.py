"""Replies, without a model: characters and stop strings; reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batching.errors import InvalidParameter
from speculation.chat.detokenizer import ReplyText, Token, _overlap
from speculation.chat.reply_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    ReplyParser,
    joined,
)
from speculation.chat.tools import (
    FUNCTION_GEMMA,
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    ToolFormat,
)

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


def test_text_that_may_become_a_stop_string_is_held_back_or_shown_at_the_end() -> None:
    reply = text(stop=("lo w",))
    assert reply.take([1, 2]) == (2, None)
    assert released(reply, 2, 1) == ["Hel"]
    assert reply.take([3, 6]) == (1, "stop")
    assert released(reply, 1, 1) == ["", ""]
    assert reply.shown == "Hel"
    assert reply.stopped_by
    reply = text(stop=("lo?",))
    assert reply.take([1, 2]) == (2, None)
    assert released(reply, 2) == ["Hel"]
    assert list(reply.rest()) == [Token(2, "lo", False)]
    with pytest.raises(InvalidParameter, match="a stop string is empty; leave it out"):
        text(stop=("a", ""))


def parsed(format_: ToolFormat | None, text: str, opening: str = "") -> list[Delta]:
    """The deltas of a reply, which must not depend on the pieces that it arrives in."""
    whole, slow = ReplyParser(format_, opening), ReplyParser(format_, opening)
    deltas = joined([*whole.feed(text), *whole.finish()])
    assert joined([d for c in text for d in slow.feed(c)] + slow.finish()) == deltas
    return deltas


def call(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallStart(index, name), CallArguments(index, arguments)]


SEVERAL = [*call(0, "add", '{"a": [1, "}"]}'), *call(1, "now", "{}")]


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (
            HERMES,
            '\n<tool_call>\n{"name": "add", "arguments": {"a": [1, "}"]}}\n</tool_call>\n'
            '<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
        ),
        (
            HERMES,
            '<tool_call>{"name":"add","arguments":{"a": [1, "}"]}}</tool_call> '
            '<tool_call>{"name":"now","arguments":{}}',
        ),
        (
            LLAMA,
            '<|python_tag|>{"name": "add", "parameters": {"a": [1, "}"]}}; '
            '{"type": "function", "name": "now", "parameters": {}}',
        ),
        (
            MISTRAL_LIST,
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1, "}"]}, "id": "abcdefghi"}, '
            '{"name": "now", "arguments": {}}]',
        ),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": [1, "}"]}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}'),
        (
            GEMMA,
            '<|tool_call>call:add{a:[1,<|"|>}<|"|>]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:add{a:[1,<escape>}<escape>]}<end_function_call>"
            "<start_function_call>call:now{}<end_function_call>",
        ),
    ],
)
def test_calls_are_read_in_every_format(format_: ToolFormat, text: str) -> None:
    assert parsed(format_, text) == SEVERAL
    assert parsed(format_, f"Hm. {text}") == [Content("Hm."), *SEVERAL]
    assert parsed(format_, "thought\n</think>\n\n" + text, "<think>\n") == [
        Reasoning("thought\n"),
        *SEVERAL,
    ]
    assert parsed(None, text) == [Content(text)]


def test_what_is_no_call_is_content() -> None:
    for format_, text in (
        (HERMES, "1 < 2, and <tool_box> is a tag\n\n"),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "a b", "arguments": {'),
        (LLAMA, '{"name": "Bob", "age": 3}'),
        (LLAMA, 'So: {"name": "add", "parameters": {}}'),
        (LLAMA, "<|python_tag|>print(1)"),
        (MISTRAL_LIST, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS]add {}"),
        (GEMMA, "<|tool_call>call:add{a:}<tool_call|>"),
        (GEMMA, '<|tool_call>call:add{a:<|"|>x'),
    ):
        assert parsed(format_, text) == [Content(text)]


def test_only_text_that_may_become_a_mark_is_held_back() -> None:
    parser = ReplyParser(HERMES)
    assert parser.feed("\n<thi") == []
    assert parser.feed("nk>\nhm </") == [Reasoning("hm ")]
    assert parser.feed("b></thin") == [Reasoning("</b>")]
    assert parser.feed("k>\n") == []
    assert parser.feed("\nYes <") == [Content("Yes")]
    assert parser.feed("3 <tool") == [Content(" <3")]
    assert parser.feed('_call>\n{"name": "add", "arguments": ') == []
    assert parser.feed('{"a"') == [CallStart(0, "add"), CallArguments(0, '{"a"')]
    assert parser.feed(': "\\"}') == [CallArguments(0, ': "\\"}')]
    assert parser.feed('"}}\n</tool_') == [CallArguments(0, '"}')]
    assert parser.feed("call>\nDone") == [Content("\nDone")]
    assert parser.finish() == []
    llama = ReplyParser(LLAMA)  # whose calls are JSON, as an answer may be
    assert llama.feed('{"na') == []
    assert llama.feed('mes": [') == [Content('{"names": [')]


def test_reasoning_is_split_off() -> None:
    both = [Reasoning("a"), Content("b")]
    channels = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    )
    for text, opening, expected in (
        ("[THINK]a[/THINK]b", "", both),
        ("<|channel>thought\na<channel|>b", "", both),
        (channels, "", both),
        ("<|channel|>final<|message|>b", "", [Content("b")]),
        ("\na</seed:think>b", "<seed:think>", both),
        ("<think>a</thin", "", [Reasoning("a</thin")]),
        (" <thinker>", "", [Content(" <thinker>")]),
        ("\n<thin", "", [Content("\n<thin")]),
        ("", "<think>", []),
    ):
        assert parsed(None, text, opening) == expected


@pytest.mark.parametrize(
    ("text", "stop", "n"),
    [
        ("xab", "abc", 2),
        ("xaab", "ab", 0),
        ("xaa", "aaab", 2),
        ("abab", "ababac", 4),
        ("ab", "ab", 0),
        ("", "ab", 0),
        ("xy", "ab", 0),
        ("b" + "a" * 9, "a" * 9 + "b", 9),
    ],
)
def test_the_end_of_a_text_that_may_become_a_stop_string_is_held(
    text: str, stop: str, n: int
) -> None:
    assert _overlap(text, stop) == n
