"""--list-methods: all methods and their parameters, described by their docstrings."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from speculation.drafter import MethodSpec
from speculation.methods import METHODS, parameter_docs

WIDTH = 100
COLUMN = 34  # rightmost start of the descriptions


def list_methods() -> str:
    """Every method with its summary, parameters and defaults."""
    return "\n\n".join(_describe(spec) for spec in METHODS.values())


def _describe(spec: MethodSpec) -> str:
    fields = dataclasses.fields(spec.params)
    lines = textwrap.wrap(f"{spec.name}  {spec.summary}", WIDTH, subsequent_indent="    ")
    shown = [(f"{field.name}={_show(field.default)}", field.name) for field in fields]
    column = min(COLUMN, 6 + max((len(text) for text, _ in shown), default=0))
    docs = parameter_docs(spec.params)
    for text, name in shown:
        head = f"    {text}"
        if len(head) >= column:  # too long: the description starts on the next line
            lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")
            head = ""
        lines += textwrap.wrap(
            docs[name], WIDTH, initial_indent=head.ljust(column), subsequent_indent=" " * column
        ) or [head.rstrip()]
    return "\n".join(lines)


def _show(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
