"""Formats of calls, checks of tools, and the grammars that hold replies to both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

from batching.errors import InvalidParameter
from batching.llama.grammar import grammar_allows, load_grammar
from batching.llama.model import Model
from speculation.chat.tool_grammar import ToolGrammar, tool_grammar
from speculation.chat.tools import (
    FUNCTION_GEMMA,
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    ToolFormat,
    tool_format,
)

FIRST_BYTE = 3  # the token of byte 0 in a tiny GGUF


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or None}}


OBJECT = {"type": "object", "required": ["a"]}
NUMBERS = {"$defs": {"number": {"type": "integer"}}}
ADD = tool(
    "add", properties={"a": {"$ref": "#/$defs/number"}, "more": {"$ref": "#"}}, **OBJECT, **NUMBERS
)
SAY = tool(
    "say",
    properties={"a": {"$ref": "#/definitions/number"}},
    definitions={"number": {"enum": ["one", "two"]}},
    **OBJECT,
)
TOOLS = [ADD, SAY, tool("now")]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as model:
        yield model


def accepts(model: Model, grammar: ToolGrammar | None, text: str) -> bool:
    """Whether a grammar accepts a text, byte by byte, and its end."""
    assert grammar is not None
    sampler = load_grammar(model, grammar.gbnf, "root")
    for byte in text.encode():
        if not grammar_allows(sampler, FIRST_BYTE + byte):
            return False
        C.llama_sampler_accept(sampler.handle, FIRST_BYTE + byte)
    return all(grammar_allows(sampler, end) for end in model.ends)


def test_a_format_is_recognised_by_the_template() -> None:
    for template, expected in (
        ('<tool_call>{"name": x, "arguments": y}</tool_call>', HERMES),
        ('Environment: ipython {"name": x, "parameters": y}', LLAMA),
        ("[TOOL_CALLS][{{ calls }}]", MISTRAL_LIST),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", MISTRAL),
        ("<|tool_call>call:{{ name }}", GEMMA),
        ("<start_function_call>call:{{ name }}", FUNCTION_GEMMA),
        ("<tool_call><function={{ name }}>{{ arguments }}</function></tool_call>", None),
        ("{{ messages }}", None),
        (None, None),
    ):
        assert tool_format(template) is expected


@pytest.mark.parametrize(
    ("format_", "good", "bad"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "more": {"a": 2}}}\n</tool_call>',
            '<tool_call>\n{"name": "add", "arguments": {"a": "one"}}\n</tool_call>',
        ),
        (
            LLAMA,
            '{"name": "say", "parameters": {"a": "one"}}',
            '{"name": "say", "parameters": {"a": 1}}',
        ),
        (
            MISTRAL_LIST,
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
            '[TOOL_CALLS] [{"name": "then", "arguments": {}}]',
        ),
        (MISTRAL, '[TOOL_CALLS]say[ARGS]{"a": "two"}', '[TOOL_CALLS]say[ARGS]{"b": "two"}'),
        (
            GEMMA,
            '<|tool_call>call:say{a:<|"|>one < <|two<|"|>,b:[-1.5,true,{}]}<tool_call|>',
            "<|tool_call>call:sing{}<tool_call|>",
        ),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:say{a:<escape>one<escape>}<end_function_call>",
            "<start_function_call>call:say{a:one}<end_function_call>",
        ),
    ],
)
def test_calls_are_held_to_names_and_schemas(
    model: Model, format_: ToolFormat, good: str, bad: str
) -> None:
    grammar = tool_grammar(format_, TOOLS, "required")
    assert grammar is not None and grammar.triggers == ()
    assert accepts(model, grammar, good)
    assert accepts(model, grammar, f"<think>\nI </ <</thinks>\n</think>\n\n{good}")
    assert not accepts(model, grammar, bad)
    assert not accepts(model, grammar, f"Yes. {good}")
    assert accepts(model, tool_grammar(format_, TOOLS, "auto"), good)
    inside = tool_grammar(format_, TOOLS, "required", opening="[THINK]")
    assert accepts(model, inside, f"hm[/[/THINK]{good}") and not accepts(model, inside, good)


def test_a_named_tool_is_called_once(model: Model) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    once = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert accepts(model, tool_grammar(HERMES, TOOLS, choice), once)
    assert not accepts(model, tool_grammar(HERMES, TOOLS, choice), once + once)
    assert not accepts(model, tool_grammar(HERMES, TOOLS, choice), once.replace("now", "add"))
    assert accepts(model, tool_grammar(HERMES, TOOLS, "required"), f"{once}\n{once}")
    assert not accepts(model, tool_grammar(HERMES, TOOLS, "required", parallel=False), once + once)
    assert tool_grammar(HERMES, TOOLS, "none") is None
    assert tool_grammar(HERMES, [], "auto") is None


def starts(grammar: ToolGrammar | None, text: str) -> int | None:
    """Where a lazy grammar begins to apply."""
    assert grammar is not None
    found = (re.match(trigger, text) for trigger in grammar.triggers)
    return next((match.start(1) for match in found if match), None)


def test_with_auto_the_grammar_waits_for_a_call_outside_of_reasoning() -> None:
    free = tool_grammar(HERMES, TOOLS, "auto")
    assert starts(free, "Yes. <tool_call>") == 5
    assert starts(free, "Yes. <tool_ca") is None
    assert starts(free, "<think>a <tool_call>") is None
    assert starts(free, "<think>a</think><tool_call>") == 16
    inside = tool_grammar(HERMES, TOOLS, "auto", opening="<think>\n")
    assert starts(inside, "a <tool_call>") is None
    assert starts(inside, "a</think>\n<tool_call>") == 10
    llama = tool_grammar(LLAMA, TOOLS, "auto")
    assert starts(llama, ' {"name": "add"') == 1
    assert starts(llama, '{"name": "Bob"') is None
    assert starts(llama, 'So {"name": "add"') is None
    assert starts(llama, "So <|python_tag|>") == 3


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([{"type": "web_search"}], "auto", "invalid tool .*; each needs the type function"),
        ([tool("a b")], "auto", "invalid tool name 'a b'; use 1 to 64 of"),
        ([tool("now"), tool("now")], "auto", "two tools have the name now; rename one"),
        ([tool("now", type="string")], "auto", "parameters of tool now are not a JSON schema of"),
        (
            [tool("now", properties={"a": {"$ref": "#/$defs/b"}})],
            "auto",
            "parameters of tool now refer to '#/\\$defs/b', which they do not have",
        ),
        (
            [ADD, tool("now", properties={"a": {"type": "string", "pattern": "b"}})],
            "auto",
            "parameters of tool now: the JSON schema cannot be read",
        ),
        (TOOLS, "always", "tool_choice is 'always'; give auto, required, none"),
        (TOOLS, {"function": {"name": "sing"}}, "tool_choice names 'sing', which is not among"),
    ],
)
def test_invalid_tools_and_choices_are_refused(tools: list[Any], choice: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        tool_grammar(HERMES, tools, choice)
