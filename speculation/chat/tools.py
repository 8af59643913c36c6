"""The formats in which models call tools, and the tools. Pure.

A format is recognised by its marks in the chat template. ``chat.reply_parser`` reads the calls,
``chat.tool_grammar`` makes models write valid ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batching.errors import InvalidParameter

Tool = Mapping[str, Any]  # {"type": "function", "function": {name, description, parameters}}

NAME = "([a-zA-Z0-9_.-]+)"
_COMMA, _COLON = r"\s*,\s*", r"\s*:\s*"
_NAMED = rf'\{{\s*"name"{_COLON}"{NAME}"{_COMMA}'
_TYPED = rf'\{{\s*("type"{_COLON}"function"{_COMMA})?"name"{_COLON}"{NAME}"{_COMMA}'
_JSON_CALL = r'"{" gap "\"name\"" gap ":" gap "\"NAME\"" gap "," gap "\"%s\"" gap ":" gap ARGUMENTS'


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls.

    head      regular expression of a call up to the ``{`` of its arguments; the last group is the
              tool's name
    tail      regular expression of the rest of a call
    bare      as ``head``, for calls at the start of an answer or after another call
    quote     delimiter of strings, if the arguments are Gemma's notation instead of JSON
    call      GBNF of a call; NAME and ARGUMENTS stand for those of a tool
    calls     GBNF of what is around the calls: before, between and after them
    triggers  regular expressions of an answer up to a call, whose first group is the call's start;
              NAMES stands for the tools' names
    """

    head: str
    tail: str
    call: str
    triggers: tuple[str, ...]
    calls: tuple[str, str, str] = ("", "gap", "")
    bare: str = ""
    quote: str = ""


HERMES = ToolFormat(  # Qwen 2.5 and 3 too
    head=rf'\s*<tool_call>\s*{_NAMED}"(?:arguments|parameters)"{_COLON}\{{',
    tail=r"\s*\}\s*</tool_call>",
    call=rf'"<tool_call>" gap {_JSON_CALL % "arguments"} gap "}}" gap "</tool_call>"',
    triggers=(r"[\s\S]*?(<tool_call>)",),
)
LLAMA = ToolFormat(
    head=rf'\s*<\|python_tag\|>\s*{_TYPED}"(?:arguments|parameters)"{_COLON}\{{',
    bare=rf'\s*;?\s*{_TYPED}"(?:arguments|parameters)"{_COLON}\{{',
    tail=r"\s*\}",
    call=rf'{_JSON_CALL % "parameters"} gap "}}"',
    calls=('"<|python_tag|>"?', '";" gap', ""),
    triggers=(r"[\s\S]*?(<\|python_tag\|>)", rf'\s*(\{{\s*"name"{_COLON}"(?:NAMES)")'),
)
MISTRAL_LIST = ToolFormat(  # up to Nemo
    head=rf'\s*\[TOOL_CALLS\]\s*\[\s*{_NAMED}"arguments"{_COLON}\{{',
    bare=rf'{_COMMA}{_NAMED}"arguments"{_COLON}\{{',
    tail=rf'(?:{_COMMA}"id"{_COLON}"[^"]*")?\s*\}}(?:\s*\])?',
    call=rf'{_JSON_CALL % "arguments"} ("," gap "\"id\"" gap ":" gap "\"" [a-zA-Z0-9]{{9}} "\"")? '
    r'gap "}"',
    calls=('"[TOOL_CALLS]" gap "[" gap', '"," gap', 'gap "]"'),
    triggers=(r"[\s\S]*?(\[TOOL_CALLS\])",),
)
MISTRAL = ToolFormat(
    head=rf"\s*\[TOOL_CALLS\]\s*{NAME}\s*(?:\[CALL_ID\]\s*[a-zA-Z0-9_-]*\s*)?\[ARGS\]\s*\{{",
    tail="",
    call='"[TOOL_CALLS]NAME" ("[CALL_ID]" [a-zA-Z0-9]{9})? "[ARGS]" gap ARGUMENTS',
    calls=("", "", ""),
    triggers=(r"[\s\S]*?(\[TOOL_CALLS\])",),
)
GEMMA = ToolFormat(
    head=rf"\s*<\|tool_call>\s*call:\s*{NAME}\s*\{{",
    tail=r"\s*<tool_call\|>",
    quote='<|"|>',
    call='"<|tool_call>call:NAME" notation-object "<tool_call|>"',
    calls=("", "", ""),
    triggers=(r"[\s\S]*?(<\|tool_call>)",),
)
FUNCTION_GEMMA = ToolFormat(
    head=rf"\s*<start_function_call>\s*call:\s*{NAME}\s*\{{",
    tail=r"\s*<end_function_call>",
    quote="<escape>",
    call='"<start_function_call>call:NAME" notation-object "<end_function_call>"',
    calls=("", "", ""),
    triggers=(r"[\s\S]*?(<start_function_call>)",),
)

# All texts of the first tuple are in the template, and none of the second.
_RECOGNISED = (
    (("<|tool_call>", "call:"), (), GEMMA),
    (("<start_function_call>", "call:"), (), FUNCTION_GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), (), MISTRAL),
    (("[TOOL_CALLS]",), (), MISTRAL_LIST),
    (("<tool_call>", "arguments"), ("<function=", "<arg_key>", "<invoke", "<tool_calls>"), HERMES),
    (("ipython", '"parameters": '), ("<function=",), LLAMA),
)


def tool_format(template: str | None) -> ToolFormat | None:
    """The format of the calls that a chat template shows its model; None if it is not known."""
    for present, absent, found in _RECOGNISED if template else ():
        assert template is not None
        if all(t in template for t in present) and not any(t in template for t in absent):
            return found
    return None


def checked_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools with a description and parameters each, as templates expect them.

    Raises InvalidParameter, with the tool's name, for an invalid tool.
    """
    checked: list[dict[str, Any]] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise InvalidParameter(
                f"invalid tool {tool!r:.120}; each needs the type function and a function with a "
                f"name"
            )
        if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name):
            raise InvalidParameter(
                f"invalid tool name {name!r:.120}; use 1 to 64 of the characters a-z, A-Z, 0-9, _, "
                f". and -"
            )
        if any(other["function"]["name"] == name for other in checked):
            raise InvalidParameter(f"two tools have the name {name}; rename one")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise InvalidParameter(
                f"the parameters of tool {name} are not a JSON schema of an object; "
                f'give {{"type": "object", "properties": …}}'
            )
        description = str(function.get("description") or "")
        plain = {"name": name, "description": description, "parameters": {**parameters}}
        checked.append({"type": "function", "function": plain})
    return checked
