"""Grammars that make models write valid calls to their tools. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batching.errors import GrammarError, InvalidParameter
from batching.llama.grammar import json_schema_to_gbnf
from speculation.chat.reasoning import REASONING_MARKS
from speculation.chat.tools import Tool, ToolFormat, checked_tools


class ToolGrammar(NamedTuple):
    """A GBNF grammar; with ``triggers`` it applies once one of them matches the reply."""

    gbnf: str
    triggers: tuple[str, ...]


def tool_grammar(
    format_: ToolFormat,
    tools: Sequence[Tool],
    choice: str | Mapping[str, Any] = "auto",
    parallel: bool = True,
    opening: str = "",
) -> ToolGrammar | None:
    """A grammar for calls to ``tools``: of their names and, in JSON, of their parameters' schemas.

    choice    OpenAI's tool_choice: ``auto`` leaves it to the model whether to call a tool;
              ``required``, or ``{"type": "function", "function": {"name": …}}``, makes it call one,
              after its reasoning if it reasons; ``none`` gives no grammar
    parallel  whether a reply may have several calls
    opening   the opening mark of reasoning if the prompt ends with it

    Raises InvalidParameter, with the tool's name, for an invalid tool or an unknown choice.
    """
    functions = [tool["function"] for tool in checked_tools(tools)]
    if isinstance(choice, Mapping):
        wanted = choice.get("function")
        name = wanted.get("name") if isinstance(wanted, Mapping) else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise InvalidParameter(f"tool_choice names {name!r:.80}, which is not among the tools")
        parallel = False
    elif choice not in ("auto", "required", "none"):
        raise InvalidParameter(
            f"tool_choice is {choice!r:.80}; give auto, required, none or a function of the tools"
        )
    if choice == "none" or not functions:
        return None
    names = [function["name"] for function in functions]
    rules = _notation(format_.quote) if format_.quote else _arguments(functions)
    calls = [
        format_.call.replace("ARGUMENTS", f"alternative-{i}").replace("NAME", name)
        for i, name in enumerate(names)
    ]
    before, between, after = format_.calls
    more = f"({between} call)*" if parallel else ""
    rules += ["gap ::= [ \\n]{0,4}", f"call ::= {' | '.join(calls)}"]
    rules.append(f"calls ::= {before} call {more} {after}")
    if choice == "auto":
        either = "|".join(map(re.escape, names))
        triggers = [trigger.replace("NAMES", either) for trigger in format_.triggers]
        outside = tuple(start + trigger for start in _starts(opening) for trigger in triggers)
        return ToolGrammar("\n".join(["root ::= calls", *rules]), outside)
    return ToolGrammar("\n".join([*_after_reasoning(opening), *rules]), ())


def _starts(opening: str) -> list[str]:
    """Patterns of a reply up to its answer: without reasoning, and with each kind of marks."""
    if opening:
        return [
            rf"\A[\s\S]*?{after}"
            for before, after in REASONING_MARKS
            if re.fullmatch(before, opening)
        ]
    befores = "|".join(before for before, _ in REASONING_MARKS)
    reasoning = [rf"\A{before}[\s\S]*?{after}" for before, after in REASONING_MARKS]
    return [rf"\A(?!{befores})", *reasoning]


# The marks that reasoning may start and end with, when the model writes both.
_LITERAL_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


def _after_reasoning(opening: str) -> list[str]:
    """Rules for calls after reasoning; it may be left out unless ``opening`` has started it."""
    opening = opening.strip()
    marks = dict(_LITERAL_MARKS)
    if opening:
        marks = {opening: marks.get(opening, f"{opening[:1]}/{opening[1:]}")}
    rules, options = [], []
    for i, (before, after) in enumerate(marks.items()):
        rules += _until(after, f"thought-{i}")
        options.append(f"thought-{i}-0" if opening else f'"{before}" thought-{i}-0')
    optional = "" if opening else "?"
    return [f"root ::= ({' | '.join(options)}){optional} gap calls", *rules]


def _until(mark: str, name: str) -> list[str]:
    """Rules for a text that ends with the first ``mark`` in it; rule ``name-n`` is for the rest
    after the first n characters of the mark."""
    characters = sorted(set(mark))
    others = "".join(f"\\{c}" if c in r"\[]" else c for c in characters)  # none has ^ or -
    rules = []
    for n in range(len(mark)):
        options = [f"[^{others}] {name}-0"]
        for character in characters:
            seen = mark[:n] + character
            length = max(k for k in range(n + 2) if seen.endswith(mark[:k]))
            rest = f" {name}-{length}" if length < len(mark) else ""
            quoted = character.replace('"', '\\"')
            options.append(f'"{quoted}"{rest}')
        rules.append(f"{name}-{n} ::= {' | '.join(options)}")
    return rules


def _notation(quote: str) -> list[str]:
    """Rules for arguments in Gemma's notation: keys are bare, and strings have delimiters."""
    delimiter = quote.replace('"', '\\"')
    return [
        'notation-object ::= "{" (notation-pair ("," notation-pair)*)? "}"',
        'notation-pair ::= [a-zA-Z0-9_.-]+ ":" notation-value',
        "notation-value ::= notation-string | notation-object | notation-list | notation-literal",
        'notation-list ::= "[" (notation-value ("," notation-value)*)? "]"',
        'notation-literal ::= "true" | "false" | "null" | "-"? [0-9]+ ("." [0-9]+)?',
        f'notation-string ::= "{delimiter}" notation-text-0',
        *_until(quote, "notation-text"),
    ]


def _arguments(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rules ``alternative-0``, … for the functions' arguments as JSON."""
    defs: dict[str, Any] = {}
    for i, function in enumerate(functions):
        _collect(function["parameters"], f"tool-{i}", function["name"], defs)
    options = [{"$ref": f"#/$defs/tool-{i}"} for i in range(len(functions))]
    try:
        gbnf = json_schema_to_gbnf({"$defs": defs, "anyOf": options})
    except GrammarError as error:
        for function in functions if len(functions) > 1 else ():
            _arguments([function])  # raises for the tool at fault
        raise InvalidParameter(f"the parameters of tool {functions[0]['name']}: {error}") from error
    return [line for line in gbnf.splitlines() if line and not line.startswith("root ::=")]


def _collect(schema: Mapping[str, Any], key: str, tool: str, defs: dict[str, Any]) -> None:
    """Add a schema to ``defs``, and each part of it that it refers to as a definition of its own,
    because the converter tells definitions apart only by the last part of their path."""
    keys = {"#": key}

    def place(ref: str) -> str:
        if ref not in keys:
            keys[ref] = f"{key}-{len(keys)}"
            target: Any = schema
            try:
                for part in ref.removeprefix("#/").split("/"):
                    part = part.replace("~1", "/").replace("~0", "~")
                    target = target[int(part) if isinstance(target, list) else part]
            except (LookupError, ValueError, TypeError):
                raise InvalidParameter(
                    f"the parameters of tool {tool} refer to {ref!r:.80}, which they do not have"
                ) from None
            defs[keys[ref]] = copied(target)
        return f"#/$defs/{keys[ref]}"

    def copied(node: Any) -> Any:
        if isinstance(node, list):
            return [copied(item) for item in node]
        if not isinstance(node, Mapping):
            return node
        ref = node.get("$ref")
        if isinstance(ref, str):
            return {"$ref": place(ref)}
        return {k: copied(v) for k, v in node.items()}

    defs[key] = copied({"type": "object", **schema})
