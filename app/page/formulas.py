"""Math in Markdown: finds TeX and converts it to MathML, which browsers render natively.

Inline: ``$x$``, ``\\(x\\)``; display: ``$$x$$``, ``\\[x\\]``, within a line or as a block. TeX that
cannot be converted is shown as source. An unclosed block ends at a blank line, so that appended
text never changes an earlier block.

Uses math-core because latex2mathml leaves HTML inside ``\\text`` unescaped and lets ``\\href`` link
anywhere.
"""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from math_core import LatexError, LatexToMathML

MAX_TEX = 10_000  # characters
_CLOSING = {"$$": "$$", "\\[": "\\]"}
# A dollar sign next to a word or digit is a price or a shell variable.
_INLINE = re.compile(
    r"\$\$(?P<block>.+?)\$\$|\\\[(?P<brackets>.+?)\\\]|\\\((?P<round>.+?)\\\)"
    r"|(?<![\w$\\])\$(?=[^\s$])(?P<dollar>(?:[^$\\]|\\.)+?)(?<!\s)\$(?![\w$])",
    re.DOTALL,
)
_converter = LatexToMathML(fancy_error=False, max_expansions=100)


@lru_cache(maxsize=512)
def mathml(tex: str, displayed: bool) -> str:
    """MathML of a formula; empty if it cannot be converted."""
    if len(tex) > MAX_TEX or not tex.strip():
        return ""
    try:
        return _converter.convert_with_local_state(tex, displaystyle=displayed)
    except LatexError:
        return ""


def _inline(state: StateInline, silent: bool) -> bool:
    found = _INLINE.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        token = state.push("math_inline", "math", 0)
        token.markup, token.content = found[found.lastgroup or 0], found[0]
        token.meta["displayed"] = found.lastgroup in ("block", "brackets")
    state.pos = found.end()
    return True


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Parse a formula on lines of its own."""
    if state.is_code_block(start):
        return False
    line = state.src[state.bMarks[start] + state.tShift[start] : state.eMarks[start]].rstrip()
    closing = _CLOSING.get(line[:2])
    if closing is None:
        return False
    rest, last = line[2:], start
    if closing in rest and rest.find(closing) != len(rest) - 2:
        return False
    if silent:
        return True
    closed = rest.endswith(closing)
    while not closed and last + 1 < end:
        if state.isEmpty(last + 1) or state.sCount[last + 1] < state.blkIndent:
            break
        last += 1
        closed = state.src[: state.eMarks[last]].rstrip().endswith(closing)
    state.line = last + 1
    token = state.push("math_block", "math", 0)
    token.map = [start, state.line]
    token.content = state.getLines(start, state.line, state.blkIndent, False).lstrip(" \t")
    token.markup = token.content.strip()[2:-2] if closed else ""
    token.meta["displayed"] = True
    return True


def add_formulas(markdown: MarkdownIt) -> None:
    """Add rules for formulas. Their tokens have the TeX as markup and the source as content."""
    markdown.inline.ruler.before("escape", "math_inline", _inline)
    interrupts = ["paragraph", "reference", "blockquote", "list"]
    markdown.block.ruler.before("fence", "math_block", _block, {"alt": interrupts})
