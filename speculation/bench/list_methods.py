"""--list-methods: the table of methods, explained by the docstrings of their own files."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from speculation.methods import METHODS, MethodKind

WIDTH = 100


def list_methods() -> str:
    """Every method with what it does, its parameters and their defaults."""
    return "\n\n".join(_describe(kind) for kind in METHODS.values())


def parameter_docs(params: type[Any]) -> dict[str, str]:
    """What the docstring of a parameters dataclass says of each field, on one line.

    The docstring has a line ``name  text`` or ``name: text`` for each, continued on lines that are
    indented further.
    """
    names = [field.name for field in dataclasses.fields(params)]
    docs = dict.fromkeys(names, "")
    current = ""
    for line in (inspect.getdoc(params) or "").splitlines():
        head = re.match(r"(\w+)(?::| {2,}) *(.*)", line)
        if head is not None and head[1] in docs:
            current = head[1]
            docs[current] = head[2].strip()
        elif current and line.startswith("  "):
            docs[current] += " " + line.strip()
        else:
            current = ""
    return {name: text.rstrip(".") for name, text in docs.items()}


def _describe(kind: MethodKind) -> str:
    fields = dataclasses.fields(kind.params)
    lines = [f"{kind.name}  {_summary(kind)}"]
    shown = [(f"{field.name}={_show(field.default)}", field.name) for field in fields]
    column = 6 + max((len(text) for text, _ in shown), default=0)
    docs = parameter_docs(kind.params)
    for text, name in shown:
        head = f"    {text}".ljust(column)
        lines += textwrap.wrap(
            docs[name], WIDTH, initial_indent=head, subsequent_indent=" " * column
        ) or [head.rstrip()]
    return "\n".join(lines)


def _summary(kind: MethodKind) -> str:
    """The first line of the drafter's module, which says what the method does."""
    if not dataclasses.fields(kind.params):
        return (inspect.getdoc(kind.params) or kind.title).splitlines()[0]
    module = inspect.getmodule(kind.params)
    return (inspect.getdoc(module) or kind.title).splitlines()[0]


def _show(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
