"""Checks of tools, and the grammars that hold replies to calls of them, without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from batching.errors import InvalidParameter
from speculation.chat.reasoning import Thinking, thinking_marks
from speculation.chat.reply_parser import CallArguments, CallStart, Content, ReplyParser, joined
from speculation.chat.tool_format import tool_format
from speculation.chat.tool_grammar import reply_grammar
from speculation.chat.tools import object_of, types_of
from tests.speculation.chat.tool_templates import CHANNELS, FAMILIES

MARKS = tuple(
    dict.fromkeys(mark for family in FAMILIES.values() for mark in family.marks)
    | dict.fromkeys(("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    | dict.fromkeys(("<|constrain|>", "<|other|>"))
)
END = 256 + len(MARKS)
THINK = Thinking("<think>", "</think>")


class Bytes:
    """A vocabulary of bytes and control tokens."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, marks: Sequence[str]) -> None:
        self.tokens = [bytes([n]) for n in range(256)] + [mark.encode() for mark in MARKS]
        self.tokens.append(b"<end>")
        self.special_token_ids = [256 + i for i, mark in enumerate(MARKS) if mark in marks]
        self.special_token_ids.append(END)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def tokenizer(marks: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes(marks)), n_vocab=END + 1, eos_token=END)


def none(text: str) -> None:
    """A vocabulary without control tokens."""


class Held:
    """Texts that a grammar accepts; ``marks`` are control tokens, and ``end`` is one that ends."""

    def __init__(
        self, marks: tuple[str, ...], *asked: Any, end: str = "<end>", **more: Any
    ) -> None:
        others = {mark: 256 + MARKS.index(mark) for mark in (*marks, "<|other|>")}
        others[end] = END
        self.grammar = reply_grammar(
            others.get, *asked, ends={END}, others=set(others.values()), **more
        )
        assert self.grammar is not None
        self._matcher = LLMatcher(tokenizer((*marks, "<|other|>")), self.grammar, log_level=0)
        assert self._matcher.get_error() == ""
        self._others = others

    def tokens(self, text: str) -> list[int]:
        found, at = [], 0
        while at < len(text):
            mark = next((mark for mark in self._others if text.startswith(mark, at)), None)
            found += list(text[at].encode()) if mark is None else [self._others[mark]]
            at += 1 if mark is None else len(mark)
        return found

    def __call__(self, text: str, *, whole: bool = True) -> bool:
        """Whether it accepts a text, and, if it is ``whole``, its end."""
        matcher, tokens = self._matcher.deep_copy(), self.tokens(text)
        n_taken = matcher.try_consume_tokens(tokens)
        return n_taken == len(tokens) and (matcher.is_accepting() or not whole)

    def forced(self, text: str) -> str:
        """What can only follow a text."""
        matcher = self._matcher.deep_copy()
        assert matcher.consume_tokens(self.tokens(text))
        return matcher.compute_ff_bytes().decode()


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or None}}


ADD = tool(
    "add",
    properties={"a": {"$ref": "#/$defs/list"}, "more": {"$ref": "#"}},
    required=["a"],
    **{"$defs": {"list": {"type": "array", "items": {"enum": [1, "}"]}}}},
)
TOOLS = [ADD, tool("now", properties={}, additionalProperties=False)]
FORMATS = {name: tool_format(family.template) for name, family in FAMILIES.items()}
HERMES = FORMATS["json between marks"]


def name_swapped(text: str) -> str:
    return text.replace("now", "then")


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_held_to_names_and_schemas_in_the_form_that_the_template_has(family: str) -> None:
    format_, text, marks = FORMATS[family], FAMILIES[family].calls, FAMILIES[family].marks
    if format_.between is None:
        text = text[: text.index(";")]
    required, auto = (Held(marks, format_, TOOLS, choice) for choice in ("required", "auto"))
    assert required(text) and auto(text)
    for wrong in (text.replace("add", "sub"), text.replace("1, ", "2, ").replace("1,<", "2,<")):
        assert wrong != text
        assert not required(wrong)
        assert not auto(wrong) or not format_.mark
    assert auto("A free text.") and not required("A free text.")
    assert auto("A free <|other|> text.")
    forbids = Held(marks, format_, TOOLS, "none")
    assert forbids("A free <|other|> text.") and not forbids(text)
    if format_.mark:
        assert auto(f"Hm. {text}") and not required(f"Hm. {text}")
    if format_.mark and format_.between is not None:
        assert auto(f"{text}\nThat is all.") and not auto(text[: -len("x")], whole=True)
    thinking = Held(marks, format_, TOOLS, "required", thinking=THINK)
    assert thinking(f"<think>I could </ call {family}</think>\n{text}") and thinking(text)
    begun = Held(marks, format_, TOOLS, "auto", thinking=THINK, begun=True)
    assert begun(f"hm</think>{text}") and begun("hm</think>\n\nNo.") and not begun("hm")


def test_arguments_follow_their_types_when_each_is_written_by_itself() -> None:
    properties = {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "any": {},
        "mode": {"type": "string", "pattern": "^[rwx]{2}$", "maxLength": 501},
        "note": {"type": "string", "pattern": "a/b", "maxLength": 5},
    }
    write = tool("write", properties=properties, required=["path", "n"])
    for name, pattern in (
        ("an element for each argument", "\n<parameter={}>\n{}\n</parameter>"),
        ("keys and values in elements", "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"),
    ):
        format_, marks = FORMATS[name], FAMILIES[name].marks
        held = Held(marks, format_, [write], "required")

        def call(*, of: Any = (format_, pattern), **values: str) -> str:
            form, written = of
            inner = "".join(written.format(key, value) for key, value in values.items())
            return f"{form.opening}write{form.middle}{inner}{form.close}"

        assert held(call(path='a "<b>\n', n="7", unit="C", any="[1]"))
        assert held(call(path="", n="-1"))
        assert held(call(path="", n="1", mode="rw", note="xa/b"))
        assert not held(call(path="", n="1", mode="rwx"))
        assert not held(call(path="", n="1", note="ab")) and not held(
            call(path="", n="1", note="a/b456")
        )
        assert not held(call(path="a"))
        assert not held(call(path="a", n="x"))
        assert not held(call(path="a", n="7", unit="K"))
        assert not held(call(n="7", path="a"))


def walked(held: Held, seed: int) -> str:
    """A text that a grammar allows, of random tokens."""
    matcher, draw, text = held._matcher.deep_copy(), random.Random(seed), b""
    for _ in range(400):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        marks = [token for token in allowed if token >= 256]
        # What ends a string is likely, or it goes on for ever.
        likely = [*marks, *(token for token in allowed if token in (34, 60, 93, 125))]  # "<]}
        token = int(draw.choice(likely if likely and draw.random() < 0.4 else list(allowed)))
        if token == END:
            break
        assert matcher.consume_token(token)
        text += bytes([token]) if token < 256 else MARKS[token - 256].encode()
    return text.decode("utf-8", "replace")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_a_grammar_allows_is_read_as_calls_by_their_schema(family: str) -> None:
    string = {"type": "string", "maxLength": 6}
    properties = {"s": string, "n": {"type": "integer", "minimum": 1}, "l": {"type": "array"}}
    made = tool("make", properties=properties, required=["s", "n"], additionalProperties=False)
    format_, n_read = FORMATS[family], 0
    marks = tuple(mark for mark in MARKS if mark in str(vars(format_)) and mark != format_.tag)
    held = Held(marks, format_, [made], "required", parallel=False)
    for seed in range(8):
        parser = ReplyParser(format_, tools=[made])
        deltas = joined([*parser.feed(walked(held, seed)), *parser.finish()])
        assert not any(isinstance(delta, Content) for delta in deltas)
        if not parser.in_call and deltas:
            start, arguments = deltas
            assert isinstance(start, CallStart) and isinstance(arguments, CallArguments)
            given = json.loads(arguments.text)
            assert (start.name, {"s", "n"} - given.keys()) == ("make", set())
            assert len(given["s"]) <= 6 and given["n"] >= 1
            assert isinstance(given.get("l", []), list)
            n_read += 1
    assert n_read >= 3


def test_bare_keys_follow_their_schema() -> None:
    properties = {
        "b": {"type": "string"},
        "a": {"type": "array", "items": {"type": "integer"}},
        "c": {"anyOf": [{"type": "null"}, {"enum": ["x", 2]}]},
        "d": {"type": "object", "properties": {"e": {"type": "boolean"}}},
        "f": {},
        "g": {"type": "string", "maxLength": 2},
    }
    made = tool("make", properties=properties, required=["b"])
    held = Held(FAMILIES["bare keys"].marks, FORMATS["bare keys"], [made], "required")

    def accepts(arguments: str) -> bool:
        return held(f"<|tool_call>call:make{{{arguments}}}<tool_call|>".replace("'", '<|"|>'))

    assert accepts("a:[1,-2],b:'x < y',c:'x',d:{e:true},f:[{g:'h'},1.5,null]")
    assert accepts("b:''") and accepts("a:[],b:'',c:2,d:{}")
    assert accepts("b:'',g:'xy'")
    for wrong in (
        "b:'',g:'xyz'",
        "a:[1]",
        "b:1",
        "a:['1'],b:''",
        "b:'',c:3",
        "b:'',d:{e:1}",
        "b:'',z:1",
        "",
    ):
        assert not accepts(wrong)


def test_tool_choice_says_which_calls_there_may_be() -> None:
    def asked(choice: Any, **more: Any) -> Held:
        return Held((), HERMES, TOOLS, choice, **more)

    def call(name: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": []}}}}\n</tool_call>'.replace(
            '{"a": []}', '{"a": []}' if name == "add" else "{}"
        )

    add, now = call("add"), call("now")
    named: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    for choice in (named, {"type": "function", "name": "now"}):
        held = asked(choice)
        assert held(now)
        assert not held(add) and not held("Hm.") and not held(f"{now}\n{now}")
        assert held.forced("").startswith('<tool_call>\n{"name": "now", "arguments": {')
    both = f"{add}\n{now}"
    assert asked("required")(both) and not asked("required", parallel=False)(both)
    once = asked("auto", parallel=False)
    assert once(f"Hm. {add}") and once("Hm.") and not once(both)
    for mode, may_answer in (("auto", True), ("required", False)):
        allowed = {"mode": mode, "tools": [named]}
        for choice in (
            {"type": "allowed_tools", "allowed_tools": allowed},
            {"type": "allowed_tools", **allowed},
        ):
            held = asked(choice)
            assert held(f"{now}\n{now}") and not held(add) and held("Hm.") is may_answer
    bare = FORMATS["json after a tag, one call"]
    assert reply_grammar(none, replace(bare, tag=""), TOOLS, "none") is None
    for forbidding in ("none", {"type": "allowed_tools", "mode": "auto", "tools": []}):
        forbids = asked(forbidding, thinking=THINK)
        assert forbids("<think>hm</think>\n<tool_calls> or <tool_call") and not forbids(now)
    assert reply_grammar(none, HERMES, [], "auto") is None
    assert reply_grammar(none, HERMES, [{"type": "web_search"}], "required") is None


ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "family", ["json between marks", "json after a tag, one call", "bare keys"]
)
def test_a_schema_beside_tools_gives_calls_or_an_answer(family: str) -> None:
    format_, (_, text, marks) = FORMATS[family], FAMILIES[family]
    text = text.partition(";")[0].removeprefix("<|python_tag|>")
    held = Held(marks, format_, TOOLS, "auto", answer=ANSWER, thinking=THINK)
    assert held(text) and held('{"name": "add"}') and held('<think>hm</think>\n\n{"name": "Bo"}')
    assert not held("Hm.") and not held('{"name": 1}') and not held(text.replace("add", "sub"))
    only = Held(marks, format_, TOOLS, "required", answer=ANSWER)
    assert only(text) and not only('{"name": "add"}')
    answer = Held(marks, format_, TOOLS, "none", answer=ANSWER, thinking=THINK, begun=True)
    assert answer('hm</think>{"name": "Bo"}') and not answer('{"name": "Bo"}')


@pytest.mark.parametrize("think", [(), ("<think>", "</think>")])
def test_a_schema_begins_after_the_reasoning(think: tuple[str, ...]) -> None:
    held = Held(think, answer=ANSWER, thinking=thinking_marks("<think>\n"), begun=True)
    assert held('a {"b"</think>\n\n{"name": "Bo"}') and not held("a</think>b", whole=False)
    free = Held(think, answer=ANSWER, thinking=THINK)
    assert free('<think>a</think>{"name": "Bo"}') and free('{"name": "Bo"}')
    for endless in (" \n \n", "\u205f"):  # small models like nothing better
        assert not free(endless, whole=False) and not held(f"a</think>{endless}{{", whole=False)


def test_reasoning_is_closed_when_its_budget_is_spent() -> None:
    marks = ("<think>", "</think>")
    for begun, start in ((True, ""), (False, "<think>")):
        held = Held(marks, thinking=THINK, begun=begun, budget=5)
        assert held(f"{start}abcde</think>Yes.") and held(f"{start}ab</think>Yes.")
        assert not held(f"{start}abcdef", whole=False)
    for begun, start in ((True, ""), (False, "<think>")):
        spelled = Held((), thinking=THINK, begun=begun, budget=1, answer=ANSWER)
        assert spelled.forced(f"{start}abcd") == "</think>"
        assert spelled(f'{start}a</think>{{"name": "Bo"}}')
    assert Held(marks, thinking=THINK, budget=5)("Yes.")
    none_left = Held(marks, thinking=THINK, begun=True, budget=0, answer=ANSWER)
    assert none_left('</think>{"name": "Bo"}') and not none_left("a", whole=False)
    calls = Held(marks, HERMES, TOOLS, "auto", thinking=THINK, begun=True, budget=3)
    assert calls(f"abc</think>{HERMES.opening}now{HERMES.middle}{{}}{HERMES.close}")
    assert reply_grammar(none, thinking=THINK) is None and reply_grammar(none, budget=5) is None


@pytest.mark.parametrize(
    "marks", [("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"), ("<|end|>",)]
)
def test_calls_and_answers_in_channels(marks: tuple[str, ...]) -> None:
    format_, thinking = tool_format(CHANNELS), thinking_marks(CHANNELS)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    final = "<|channel|>final<|message|>"
    auto = Held(marks, format_, TOOLS, "auto", thinking=thinking, end="<|call|>")
    for start in ("", thought):
        assert auto(f"{start}{call}") and auto(f"{start}{final}yes")
    assert not auto(name_swapped(call)) and not auto(f"{thought}yes")
    forbids = Held(marks, format_, TOOLS, "none", thinking=thinking, end="<|call|>")
    assert forbids(f"{thought}{final}yes") and not forbids(call) and not forbids(thought + call)
    needed = Held(marks, format_, TOOLS, "required", thinking=thinking, end="<|call|>")
    assert needed(f"{thought}{call}") and not needed(f"{thought}{final}yes")
    more: dict[str, Any] = {"answer": ANSWER, "thinking": thinking, "end": "<|call|>"}
    answer = Held(marks, format_, TOOLS, "auto", **more)
    assert (
        answer(f'{thought}{final}{{"name": "Bo"}}') and answer(call) and not answer(f"{final}yes")
    )


def test_a_call_in_free_text_is_held_from_its_first_mark_on() -> None:
    held = Held((), HERMES, TOOLS, "auto")
    assert held.forced("Well, <b> ") == ""
    assert held.forced("Well, <tool_call>") == '\n{"name": "'
    assert held.forced('<tool_call>\n{"name": "n') == 'ow", "arguments": {}}\n</tool_call>'
    llama = Held((), FORMATS["json after a tag, one call"], TOOLS, "auto")
    assert llama('{"name": "Bob"}') and llama('So {"name": "add"')
    assert not llama('{"name": "add", "parameters": {"a": 1', whole=False)


XML = FORMATS["an element for each argument"]
STRICT = tool("now", properties={"a": {"type": "string", "pattern": "(?=b)"}})


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([{"type": "function"}], "auto", "invalid tool .*; each needs the type function"),
        ([tool("a b")], "auto", "invalid tool name 'a b'; use 1 to 64 of"),
        ([tool("now"), tool("now")], "auto", "two tools have the name now; rename one"),
        ([tool("now", type="string")], "auto", "parameters of tool now are not a JSON schema of"),
        ([ADD, tool("now", properties={"a": {"$ref": "#/b"}})], "auto", "parameters of tool now"),
        ([{"type": "function", "function": {**STRICT["function"], "strict": True}}], "required",
         "argument a in the parameters of tool now: '\\(\\?=b\\)' cannot be followed"),
        (TOOLS, "always", "tool_choice is 'always'; give auto, required, none"),
        (TOOLS, {"function": {"name": "sing"}}, "tool_choice names 'sing', which is not among"),
    ],
)  # fmt: skip
def test_invalid_tools_and_choices_are_refused(tools: list[Any], choice: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        reply_grammar(none, XML if "argument a" in reason else HERMES, tools, choice)
    assert reply_grammar(none, XML, [STRICT]) is not None


def test_a_tool_with_more_arguments_than_can_be_followed_one_by_one_is_refused() -> None:
    for n in (500, 501):
        many = [tool("now", properties={f"a{i}": {"type": "null"} for i in range(n)})]
        assert reply_grammar(none, HERMES, many)
        if n == 500:
            assert reply_grammar(none, FORMATS["bare keys"], many)
            continue
        with pytest.raises(InvalidParameter, match="has 501 arguments of 500 at most"):
            reply_grammar(none, FORMATS["bare keys"], many)


def test_arguments_of_any_form_become_an_object_and_have_types() -> None:
    for given, expected in (
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        ("", {}),
        ('{"a": {"b": [1, "x', {"a": {"b": [1, "x"]}}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("{", {}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": 1}} or so', {"a": 1}),
        ("[1]", {"arguments": [1]}),
        (3, {"arguments": 3}),
        ("no JSON", {"arguments": "no JSON"}),
    ):
        assert object_of(given) == expected
    assert list(object_of('{"a": ' * 100_000)) == ["arguments"]
    many = {f"a{i}": {"anyOf": 3 * [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(99)}
    root = {"$defs": {"n": {"type": "number"}, **many, "a99": {"type": "null"}}}
    for schema, types in (
        ({"$ref": "#/$defs/a0"}, "null"),  # by 3**99 ways
        ({"type": "string"}, "string"),
        ({"type": ["string", "null"]}, "null string"),
        ({"enum": ["a", 1]}, "integer string"),
        ({"const": None}, "null"),
        ({"$ref": "#/$defs/n"}, "integer number"),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array"}]}, "array integer number"),
        ({"allOf": [{"type": "string"}, {"enum": ["a", 1]}]}, "string"),
    ):
        assert " ".join(sorted(types_of(schema, root))) == types
    assert len(types_of({}, root)) == len(types_of(True, root)) == 7
