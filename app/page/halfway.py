"""Markdown that is half written: shown as what it is about to be, so that it does not flicker."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

# A last line that may yet become anything: a bullet, a heading's underline, a fence.
_OPEN_LINE = re.compile(r"(?:^|(?<=\n))[ \t]*(?:[-=+*#>|`~]+|\d{1,9}[.)]?)[ \t]*\Z")
_OPEN_TABLE = re.compile(r"(?:^|\n)(\|[^\n]*\|)[ \t]*\n[|:\- ]*\Z")
_OPEN_LINK = re.compile(r"\[[^\[\]\n]*\]\([^()\s]*\Z")
_MARKERS = "*_~` "


def completed(text: str) -> tuple[str, int]:
    """The text with its last block made whole, as far as can be foreseen; where a table begins
    that may not become one, or else the text's length."""
    table = _OPEN_TABLE.search(text)
    if table is not None:
        n_cells = len(re.findall(r"(?<!\\)\|", table[1])) - 1
        return f"{text[: table.end(1)]}\n|{'---|' * n_cells}", table.start(1)
    open_line = _OPEN_LINE.search(text)
    return text[: open_line.start()] if open_line is not None else text, len(text)


def completed_inline(markdown: MarkdownIt, text: str, env: MutableMapping[str, Any]) -> str:
    """The text of the last block, with an end to what is open in it: emphasis, code, a link."""
    base = text.rstrip(_MARKERS)
    if not base or base.endswith("\\"):
        return text
    if _OPEN_LINK.search(base):
        return f"{base})"
    ticks = re.findall("`+", base)
    if ticks:
        last = markdown.parseInline(base + ticks[-1], {**env, "live": False})[0].children or []
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
