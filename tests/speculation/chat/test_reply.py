"""Replies, without a model: characters and stop strings; reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from speculation.chat.tool_format import GENERIC, ToolFormat, tool_format
from tests.speculation.chat.tool_templates import CHANNELS, FAMILIES

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


def test_tokens_are_released_with_whole_characters_and_drafts_marked() -> None:
    reply = text()
    assert reply.take([1, 2, 6]) == (3, None)
    assert list(reply.release(3, 2)) == [
        Token(1, "Hel", True),
        Token(2, "lo", True),
        Token(6, "!", False),
    ]
    assert reply.shown == "Hello!"
    assert reply.ids == [1, 2, 6]
    reply = text()
    assert reply.take([1, 3]) == (2, None)
    assert released(reply, 2, 1) == ["Hel", " w"]
    assert reply.take([4, 6]) == (2, None)
    assert released(reply, 2, 1) == ["örld", "!"]
    assert reply.shown == "Hel wörld!"
    reply = text()
    assert reply.take([1, 3]) == (2, None)
    assert reply.take([6, 1]) == (2, None)
    assert released(reply, 4) == ["Hel", " w", "\N{REPLACEMENT CHARACTER}!", "Hel"]
    assert reply.shown == "Hel w\N{REPLACEMENT CHARACTER}!Hel"
    for stop in ((), ("x",)):
        for taken, reason, texts in (
            ([7, END], "stop", ["", "\N{REPLACEMENT CHARACTER}"]),
            ([1, 7], "length", ["Hel", "\N{REPLACEMENT CHARACTER}"]),
            ([7, 6], "length", ["", "\N{REPLACEMENT CHARACTER}!"]),
        ):
            reply = text(stop, max_tokens=2)
            assert [reply.take([token]) for token in taken] == [(1, None), (1, reason)]
            tokens = [*reply.release(2, 0), *reply.rest()]
            assert [token.id for token in tokens] == taken
            assert [token.text for token in tokens] == texts
            assert reply.shown == "".join(texts)
    cancelled = text()
    assert cancelled.take([1, 7]) == (2, None)
    assert [*released(cancelled, 2), *cancelled.rest()] == ["Hel", ""]


def test_a_text_can_end_in_a_step_or_with_a_stop_string() -> None:
    reply = text()
    assert reply.take([1, END, 2]) == (2, "stop")
    assert released(reply, 2, 2) == ["Hel", ""]
    assert reply.shown == "Hel"
    assert text(max_tokens=2).take([1, 2, 6]) == (2, "length")
    assert text(max_tokens=3).take([1, 2, 6]) == (3, "length")
    assert text(max_tokens=2).take([1, END]) == (2, "stop")
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


def parsed(
    format_: ToolFormat | None, text: str, opening: str = "", tools: Sequence[Any] = ()
) -> list[Delta]:
    """The deltas of a reply, which must not depend on the pieces that it arrives in."""
    whole, slow = (ReplyParser(format_, opening, tools) for _ in range(2))
    deltas = joined([*whole.feed(text), *whole.finish()])
    assert joined([d for c in text for d in slow.feed(c)] + slow.finish()) == deltas
    assert slow.in_call == whole.in_call
    return deltas


def call(index: int, name: str, arguments: str) -> list[Delta]:
    return [CallStart(index, name), CallArguments(index, arguments)]


SEVERAL = [*call(0, "add", '{"a": [1, "}"]}'), *call(1, "now", "{}")]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_in_the_form_that_the_template_has(family: str) -> None:
    template, text, _ = FAMILIES[family]
    format_ = tool_format(template)
    assert format_.in_template == (family != "none")
    assert parsed(format_, text) == SEVERAL
    assert parsed(format_, f"\n{text}\n") == SEVERAL
    if format_.mark:
        assert parsed(format_, f"Hm. {text}") == [Content("Hm."), *SEVERAL]
    both = [Reasoning("thought\n"), *SEVERAL]
    assert parsed(format_, "thought\n</think>\n\n" + text, "<think>\n") == both
    assert parsed(None, text) == [Content(text)]


def test_calls_in_channels_are_read_after_the_reasoning() -> None:
    format_ = tool_format(CHANNELS)
    header = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    start = "<|end|><|start|>assistant"
    expected = call(0, "add", '{"a": 1}')
    assert parsed(format_, header + '{"a": 1}') == expected
    thought = f"<|channel|>analysis<|message|>hm{start}"
    assert parsed(format_, f'{thought}{header}{{"a": 1}}') == [Reasoning("hm"), *expected]
    final = f"{thought}<|channel|>final<|message|>yes"
    assert parsed(format_, final) == [Reasoning("hm"), Content("yes")]


BARE = tool_format(FAMILIES["bare keys"].template)
XML = tool_format(FAMILIES["an element for each argument"].template)
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "any": {},
                "maybe": {"type": ["string", "null"]},
            },
        },
    },
}


def test_arguments_that_are_no_json_get_their_types_from_the_tool() -> None:
    def written(**values: str) -> list[Delta]:
        text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        text = f"<tool_call>\n<function=write>\n{text}</function>\n</tool_call>"
        return parsed(XML, text, tools=[WRITE])

    for values, arguments in (
        ({"path": "7", "n": "7"}, '{"path": "7", "n": 7}'),
        ({"path": '\n "a"\\\n<b>ä\n', "n": "null"}, r'{"path": "\n \"a\"\\\n<b>ä\n", "n": null}'),
        ({"any": '{"b": [1, true]}'}, '{"any": {"b": [1, true]}}'),
        ({"any": "True"}, '{"any": true}'),
        ({"any": "a, b"}, '{"any": "a, b"}'),
        ({"any": "NaN"}, '{"any": "NaN"}'),
        ({"n": "1e999"}, '{"n": 1e999}'),
        ({"n": '["</parameter>"]'}, '{"n": ["</parameter>"]}'),
        ({"maybe": "7"}, '{"maybe": "7"}'),
        ({"maybe": "null"}, '{"maybe": null}'),
        ({"maybe": ""}, '{"maybe": ""}'),
    ):
        assert written(**values) == call(0, "write", arguments)


def test_a_reply_that_ends_inside_a_call_says_so() -> None:
    json_ = tool_format(FAMILIES["json between marks"].template)
    for format_, text, is_inside, arguments in (
        (json_, '<tool_call>\n{"name": "add", "arguments": {"a": "b', True, '{"a": "b'),
        (json_, '<tool_call>\n{"name": "add", "arguments": {"a": 1}', False, '{"a": 1}'),
        (XML, "<tool_call>\n<function=add>\n<parameter=path>\nab", True, '{"path": "ab'),
        (XML, "<tool_call>\n<function=add>\n<parameter=any>\n[1,", True, '{"any": '),
        (XML, "<tool_call>\n<function=add>\n<param", True, ""),
        (BARE, '<|tool_call>call:add{a:[1],b:<|"|>x "', True, '{"a":[1],"b":"x \\"'),
        (BARE, "<|tool_call>call:add{a:[1", True, '{"a":[1'),
    ):
        tools = [{"function": {**WRITE["function"], "name": "add"}}]  # type: ignore[dict-item]
        parser = ReplyParser(format_, tools=tools)
        deltas = joined([*parser.feed(text), *parser.finish()])
        assert parser.in_call is is_inside
        assert deltas == (call(0, "add", arguments) if arguments else [CallStart(0, "add")])
        assert parsed(format_, text, tools=tools) == deltas


def test_what_is_no_call_is_content() -> None:
    formats = {name: tool_format(family.template) for name, family in FAMILIES.items()}
    hermes, llama = formats["json between marks"], formats["json after a tag, one call"]
    for format_, text in (
        (hermes, "1 < 2, and <tool_box> is a tag\n\n"),
        (hermes, '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'),
        (hermes, '<tool_call>{"arguments": {}}</tool_call>'),
        (hermes, '<tool_call>{"name": "a b", "arguments": {'),
        (llama, '{"name": "Bob", "age": 3}'),
        (llama, 'So: {"name": "add", "parameters": {}}'),
        (llama, "<|python_tag|>print(1)"),
        (formats["a list of json, with ids"], "[TOOL_CALLS][]"),
        (formats["names and json between marks"], "[TOOL_CALLS]add {}"),
        (formats["bare keys"], "<|tool_call>call:add{a:}<tool_call|>"),
        (XML, "<tool_call>\n<function=add\n<parameter"),
    ):
        assert parsed(format_, text) == [Content(text)]


FILES = [{"type": "function", "function": {"name": name}} for name in ("write", "list.all")]
HELLO = call(0, "write", '{"path": "a.py", "text": "x = {}\\n"}')
WRITTEN = '{"name": "write", "arguments": {"path": "a.py", "text": "x = {}\\n"}}'
OTHER_FORMATS = [tool_format(family.template) for family in FAMILIES.values()]


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        (WRITTEN, HELLO),
        (f"\n{WRITTEN}\n", HELLO),
        (f"```json\n{WRITTEN}\n```", HELLO),
        (f"```\n{WRITTEN}\n```\n", HELLO),
        (f"<tool_call>{WRITTEN}</tool_call>", HELLO),
        (f"```xml\n<tool_call>\n{WRITTEN}\n</tool_call>\n```", HELLO),
        (f"<function_call> {WRITTEN}", HELLO),
        (f"<tools>\n{WRITTEN}\n</tools>", HELLO),
        (f"[TOOL_CALLS] [{WRITTEN}]", HELLO),
        (f"<|python_tag|>{WRITTEN}", HELLO),
        (WRITTEN.replace("arguments", "parameters"), HELLO),
        (WRITTEN.replace('{"name"', '{"type": "function", "name"'), HELLO),
        (WRITTEN.replace("}}", '}, "id": "1"}'), HELLO),
        (f'{{"type": "function", "function": {WRITTEN}}}', HELLO),
        (f"I'll create it: ```json\n{WRITTEN}\n```", [Content("I'll create it:"), *HELLO]),
        (f"First this:\n\n{WRITTEN}\nDone.", [Content("First this:"), *HELLO, Content("\nDone.")]),
        ('{"name": "write", "arguments": "{\\"path\\": \\"a\\\\n\\"}"}', call(0, "write",
         r'{"path": "a\n"}')),
        ('{"name": "write", "arguments": {"text": "a\n\tb\\n", "n":\n1}}', call(0, "write",
         r'{"text": "a\n\tb\n", "n":' + "\n1}")),
        *((text, [*HELLO, *call(1, "list.all", "{}")])
         for text in (f'[{WRITTEN}, {{"name": "list.all", "arguments": {{}}}}]',
         f'```json\n[\n  {WRITTEN},\n  {{"name": "list.all", "parameters": {{}}}}\n]\n```',
         f'```json\n{WRITTEN}\n```\n```json\n{{"name": "list.all", "arguments": {{}}}}\n```',
         f'{WRITTEN}\n{{"name": "list.all", "arguments": {{}}}}',
         f'{WRITTEN}; {{"name": "list.all", "arguments": "{{}}"}}')),
    ],
)  # fmt: skip
def test_a_call_in_another_form_is_read_if_it_names_a_tool(text: str, deltas: list[Delta]) -> None:
    for format_ in OTHER_FORMATS:
        assert parsed(format_, text, tools=FILES) == deltas
        thought = parsed(format_, f"hm</think>\n{text}", "<think>", FILES)
        assert thought == [Reasoning("hm"), *deltas]
    assert parsed(None, text, tools=FILES) == [Content(text)]
    strangers = [{"type": "function", "function": {"name": "weather"}}]
    unknown = parsed(XML, text, tools=strangers)
    assert unknown == [Content(text)]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "arguments": {"a": 1}}',
        '{"name": "write"}',
        '{"name": "write", "description": "Writes.", "parameters": {}}',
        '{"calls": [{"name": "write", "arguments": {}}]}',
        '{\n  "calls": [\n    {"name": "write", "arguments": {}}\n  ]\n}',
        'Such as `{"name": "write", "arguments": {}}`.',
        '{"name": "write", "arguments": [1]}',
        'So:\n\n{"name": "write", "arguments": "a.py"}',
        '{"name": "write", "arguments": "a',
        '```json\n{"name": "write", "argu',
        "```python\nwrite({})\n```\n<b>\n</b> [TOOL]\n",
    ],
)
def test_other_json_of_an_answer_is_content(text: str) -> None:
    for format_ in OTHER_FORMATS:
        assert parsed(format_, text, tools=FILES) == [Content(text)]


def test_only_text_that_may_become_a_mark_is_held_back() -> None:
    parser = ReplyParser(GENERIC)
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
    xml = ReplyParser(XML, tools=[WRITE])
    assert xml.feed("<tool_call>\n<function=write>\n<param") == [CallStart(0, "write")]
    assert xml.feed("eter=path>\nab") == [CallArguments(0, '{"path": "ab')]
    assert xml.feed("c\n</para") == [CallArguments(0, "c")]
    assert xml.feed("graph>\n") == [CallArguments(0, r"\n</paragraph>")]
    llama = ReplyParser(tool_format(FAMILIES["json after a tag, one call"].template))
    assert llama.feed('{"na') == []  # its calls are JSON, as an answer may be
    assert llama.feed('mes": [') == [Content('{"names": [')]
    fenced = ReplyParser(GENERIC, tools=FILES)
    assert fenced.feed("So:\n\n```js") == [Content("So:")]
    assert fenced.feed('on\n{"name": "write", "arg') == []
    assert fenced.feed('uments": {"pa') == [CallStart(0, "write"), CallArguments(0, '{"pa')]
    assert fenced.feed('th": ""}}\n``') == [CallArguments(0, 'th": ""}')]
    assert fenced.feed("`\n{") == []
    assert fenced.feed('"nam') == []
    assert fenced.feed('es": ') == [Content('\n{"names":')]
    assert ReplyParser(GENERIC, tools=FILES).feed("```" + "\n" * 2000) == [
        Content("```" + "\n" * 2000)
    ]


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
def test_what_may_become_a_stop_string_is_held(text: str, stop: str, n: int) -> None:
    assert _overlap(text, stop) == n
