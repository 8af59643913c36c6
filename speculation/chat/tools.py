"""The tools of a request: their checks, which of them may be called, and their arguments. Pure.

``chat.tool_format`` has how a model writes calls to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic_core import from_json

from batching.errors import InvalidParameter

Tool = Mapping[str, Any]  # {"type": "function", "function": {name, description, parameters}}
ToolChoice = str | Mapping[str, Any]

ANY_TYPE = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
STRING = frozenset(("string",))

_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_PYTHON = {"True": True, "False": False, "None": None}


class Choice(NamedTuple):
    """Which functions a reply may call.

    required  whether it must call one
    parallel  whether it may have several calls
    """

    functions: list[Mapping[str, Any]]
    required: bool
    parallel: bool


def checked_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The functions among tools, with a description and parameters each, as templates expect them.

    Tools of another type are left out: they run at other servers. Raises InvalidParameter, with the
    tool's name, for an invalid tool.
    """
    checked: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            continue
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


def chosen(tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True) -> Choice:
    """What OpenAI's ``tool_choice`` and ``parallel_tool_calls`` allow.

    ``choice`` is ``none``, ``auto``, ``required``, a function, or ``allowed_tools`` with a mode and
    some of the tools. Raises InvalidParameter for another one, or for a name not among the tools.
    """
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in checked_tools(tools)]
    if choice == "none":
        return Choice([], False, parallel)
    if choice in ("auto", "required"):
        return Choice(functions, choice == "required" and bool(functions), parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        some = [_named(functions, entry) for entry in allowed.get("tools", ())]
        return Choice(some, allowed.get("mode") == "required" and bool(some), parallel)
    if isinstance(choice, Mapping):
        return Choice([_named(functions, choice)], True, False)
    raise InvalidParameter(
        f"tool_choice is {choice!r:.80}; give auto, required, none or a function of the tools"
    )


def _named(functions: Sequence[Mapping[str, Any]], entry: Any) -> Mapping[str, Any]:
    """The function that a part of a choice names, directly or in its ``function``."""
    fields = entry if isinstance(entry, Mapping) else {}
    inner = fields.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else fields.get("name")
    for function in functions:
        if function["name"] == name:
            return function
    raise InvalidParameter(f"tool_choice names {name!r:.80}, which is not among the tools")


def strict_names(tools: Sequence[Tool]) -> set[str]:
    """The tools that ask that no part of their schemas is left out. They have been checked."""
    functions = [tool["function"] for tool in tools if tool.get("type", "function") == "function"]
    return {function["name"] for function in functions if function.get("strict") is True}


def parameter_types(tools: Sequence[Tool]) -> dict[str, dict[str, frozenset[str]]]:
    """For each tool, the types of JSON that each of its parameters may have."""
    found = {}
    for tool in checked_tools(tools):
        schema = tool["function"]["parameters"]
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        types = {key: types_of(value, schema) for key, value in properties.items()}
        found[tool["function"]["name"]] = types
    return found


def types_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]] | None = None
) -> frozenset[str]:
    """The types of JSON that a schema allows; ``root`` is what its references refer to, and
    ``known`` has those of the references."""
    if not isinstance(schema, Mapping):
        return ANY_TYPE
    known = {} if known is None else known
    types = ANY_TYPE
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = ANY_TYPE  # if it refers to itself
            known[reference] = types_of(referred(root, reference), root, known)
        types &= known[reference]
    if "type" in schema:
        named = listed(schema["type"]) or [schema["type"]]
        types &= frozenset(name for name in named if isinstance(name, str))
        types |= {"integer"} if "number" in types else set()
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, Sequence):
            types &= frozenset(type_name(value) for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        found = [types_of(each, root, known) for each in listed(schema.get(key))]
        if found:
            types &= frozenset.intersection(*found) if key == "allOf" else frozenset.union(*found)
    return types


def listed(value: Any) -> list[Any]:
    """A part of a schema that should be a list; empty if it is none."""
    return list(value) if isinstance(value, list | tuple) else []


def referred(root: Mapping[str, Any], reference: Any) -> Any:
    """What a reference within a schema refers to; an empty schema if it has no such part."""
    found: Any = root
    try:
        for part in str(reference).removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found[int(part) if isinstance(found, list) else part]
    except (LookupError, ValueError, TypeError):
        return {}
    return found


def type_name(value: Any) -> str:
    """The name that JSON schemas have for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    return _TYPE_NAMES.get(type(value), "array")


def value_of(text: str, types: frozenset[str]) -> Any:
    """An argument that a model wrote without a string's quotation marks: as JSON if it is some and
    the parameter may have such a value, else as a string."""
    if types == STRING:
        return text
    stripped = text.strip()
    try:
        value = (
            _PYTHON[stripped] if stripped in _PYTHON else json.loads(stripped, parse_constant=str)
        )
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and type_name(value) not in types else value


def object_of(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object, whatever a client or a model made of them.

    Takes an object, its JSON, or the beginning of its JSON, as a reply has it that was cut short.
    Anything else becomes the argument ``arguments``.
    """
    value = _value_in(arguments) if isinstance(arguments, str) else arguments
    if value is None:
        return {}
    return dict(value) if isinstance(value, Mapping) else {"arguments": value}


def _value_in(text: str) -> Any:
    """The value of a JSON text, or of the beginning of an object's; the text itself if it is
    neither."""
    with suppress(ValueError, RecursionError):
        return json.loads(text.strip() or "{}", strict=False)
    with suppress(ValueError):
        begun = from_json(text, allow_partial="trailing-strings")
        if isinstance(begun, dict):
            return begun
    return text
