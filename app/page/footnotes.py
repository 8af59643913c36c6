"""Footnotes in Markdown: ``[^1]`` in the text, and ``[^1]: its note`` in a block of its own.

A note stays where it was written, so that a growing reply changes its last block alone. Only labels
that have a note become links: ``[^a-z]`` may be a part of a pattern.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

_LABEL = r"\[\^([^\s\[\]]{1,40})\]"
_MARK, _NOTE = re.compile(_LABEL), re.compile(f"{_LABEL}:[ \t]*")


def _notes(env: MutableMapping[str, Any]) -> dict[str, Any]:
    """The targets of links, which ``Growing`` watches: a late one changes earlier blocks."""
    found: dict[str, Any] = env.setdefault("references", {})
    return found


def _key(label: str) -> str:
    """A key that no link has: theirs have no small letters."""
    return f"note {label}"


def _mark(state: StateInline, silent: bool) -> bool:
    found = _MARK.match(state.src, state.pos, state.posMax)
    if found is None or _key(found[1]) not in _notes(state.env):
        return False
    if not silent:
        token = state.push("footnote_mark", "sup", 0)
        token.markup, token.content = found[1], found[0]
    state.pos = found.end()
    return True


def _note(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Parse a note: its first line, and the lines and blocks that follow with four spaces."""
    begin, shift, indent = state.bMarks[start], state.tShift[start], state.sCount[start]
    found = _NOTE.match(state.src, begin + shift, state.eMarks[start])
    if found is None or state.is_code_block(start):
        return False
    if silent:
        return True
    _notes(state.env).setdefault(_key(found[1]), {})
    token = state.push("footnote_open", "div", 1)
    token.markup, token.map = found[1], [start, end]
    kind, tight = state.parentType, state.tight
    state.parentType = "footnote"
    state.blkIndent += 4
    state.bMarks[start], state.tShift[start], state.sCount[start] = found.end(), 0, state.blkIndent
    state.md.block.tokenize(state, start, end)
    state.bMarks[start], state.tShift[start], state.sCount[start] = begin, shift, indent
    state.blkIndent -= 4
    state.parentType, state.tight = kind, tight
    token.map[1] = state.line
    state.push("footnote_close", "div", -1)
    return True


def add_footnotes(markdown: MarkdownIt) -> None:
    """Add rules for footnotes. Their tokens have the label as markup."""
    markdown.inline.ruler.before("link", "footnote_mark", _mark)
    markdown.block.ruler.before(
        "reference", "footnote", _note, {"alt": ["paragraph", "reference", "blockquote"]}
    )
