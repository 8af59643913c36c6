"""Completes unfinished Markdown while a reply streams, so that the display does not flicker."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

# A last line that may still become a bullet, a heading's underline, a fence and so on.
_OPEN_LINE = re.compile(r"(?:^|(?<=\n))[ \t]*(?:[-=+*#>|`~]+|\d{1,9}[.)]?)[ \t]*\Z")
_OPEN_TABLE = re.compile(r"(?:^|\n)(\|[^\n]*\|)[ \t]*\n[|:\- ]*\Z")
_OPEN_LINK = re.compile(r"\[[^\[\]\n]*\]\([^()\s]*\Z")
_MARKERS = "*_~` "


def completed(text: str) -> tuple[str, int]:
    """The text with its last block completed, and the offset from which that is a guess.

    The offset is that of an unfinished table, else the text's length.
    """
    table = _OPEN_TABLE.search(text)
    if table is not None:
        n_cells = len(re.findall(r"(?<!\\)\|", table[1])) - 1
        return f"{text[: table.end(1)]}\n|{'---|' * n_cells}", table.start(1)
    open_line = _OPEN_LINE.search(text)
    return text[: open_line.start()] if open_line is not None else text, len(text)


def completed_inline(markdown: MarkdownIt, text: str, env: MutableMapping[str, Any]) -> str:
    """The last block's text with open emphasis, code or link closed."""
    base = text.rstrip(_MARKERS)
    if not base or base.endswith("\\"):
        return text
    if _OPEN_LINK.search(base):
        return f"{base})"
    ticks = re.findall("`+", base)
    if ticks:
        last = markdown.parseInline(base + ticks[-1], {**env, "live": None})[0].children or []
        if last and last[-1].type == "code_inline":
            return base + str(ticks[-1])
    state = StateInline(base, markdown, env, [])
    markdown.inline.tokenize(state)
    balance = markdown.inline.ruler2.getRules("")[0]
    balance(state)
    ends = [
        chr(found.marker) * (2 if found.marker == ord("~") else 1)
        for found in reversed(state.delimiters)
        if found.open and found.end < 0
    ]
    return base + "".join(ends)
