"""Renders Markdown as HTML and marks the drafted tokens in the result.

Marks are offsets in the source. Every parser token gets the source offsets of its characters, by a
walk along the source in which each token's text is the next one that is the same. The parser never
sees the marks, so colours cannot change how it parses.

HTML is shown as text, images become links, and links open in a new tab.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, takewhile
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from app.page import formulas
from app.page.completion import completed, completed_inline
from app.page.highlight import Stack, highlighted, settled, suffix

Env = MutableMapping[str, Any]
MOST_GROWING = 1000  # characters of code that later ones may still change
PREVIEWED = ("html", "svg", "xhtml")
_LANGUAGE = re.compile(r"[A-Za-z0-9+#.-]{1,20}")
_TASK = re.compile(r"\[([ xX])\] ")


@dataclass
class Marks:
    """Which characters were drafted.

    runs  [characters, tokens] of the text: a plain run, a drafted one, and so on in turn
    ends  where in the text each of them ends
    sources  of the drafted ones: where each came from, as the page tells it
    """

    runs: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, runs: Iterable[Sequence[int]], n_characters: int, sources: Iterable[str] = ()
    ) -> Marks:
        """The marks with these runs, of a text that may be cut after so many characters."""
        marks = cls(sources=list(sources))
        for number, (n, n_tokens) in enumerate(runs):
            marks.add(min(n, n_characters), number % 2 == 1, n_tokens)
            n_characters -= min(n, n_characters)
        return marks

    def add(self, n_characters: int, is_drafted: bool, n_tokens: int = 1) -> None:
        """Add tokens to the end of the text.

        >>> marks = Marks()
        >>> for n, is_drafted in ((1, False), (1, True), (2, True)): marks.add(n, is_drafted)
        >>> marks.runs, marks.ends
        ([[1, 1], [3, 2]], [1, 4])
        """
        while not self.runs or (len(self.runs) % 2 == 0) != is_drafted:
            self.ends.append(self.ends[-1] if self.ends else 0)
            self.runs.append([0, 0])
        self.runs[-1][0] += n_characters
        self.runs[-1][1] += n_tokens
        self.ends[-1] += n_characters

    def run_at(self, offset: int) -> int:
        """The number of a character's run; 0 if it was not drafted, or is beyond the text, where
        completion added some."""
        number = bisect(self.ends, offset)
        return number if number % 2 and number < len(self.runs) else 0

    @property
    def last_start(self) -> int:
        """Where a run that ends the text begins, as it may still grow; else the text's length."""
        return [0, 0, *self.ends][-2 if len(self.runs) % 2 == 0 else -1]


def render_blocks(text: str, marks: Marks | None = None, at: int = 0) -> list[str]:
    """The blocks of a text as HTML: paragraphs, lists, blocks of code and so on. ``at`` is its
    offset in the text that the marks belong to."""
    env: Env = {"marks": marks, "at": at}
    return _blocks(_markdown.parse(_with_newlines(text), env), env)


def render_message(text: str) -> list[str]:
    """The blocks of what the user wrote: code and tables are rendered, the rest is as it is."""
    env: Env = {"marks": None, "at": 0}
    return _blocks(_messages.parse(_with_newlines(text), env), env)


def _blocks(tokens: Sequence[Token], env: Env) -> list[str]:
    found, start = [], 0
    for end, token in enumerate(tokens, 1):
        if token.level == 0 and token.nesting <= 0:
            found.append(_markdown.renderer.render(tokens[start:end], _markdown.options, env))
            start = end
    return found


@dataclass
class _Live:
    """A growing block of code: its lines that can no longer change.

    at     where the code begins in the text
    stack  of the highlighter after the lines
    """

    at: int = 0
    code: str = ""
    html: str = ""
    stack: Stack = ()


class Growing:
    """Renders a growing text. Blocks, and lines of the last block if that is code, that can no
    longer change are rendered only once.

    blocks  as HTML, as ``update`` found them last
    same    what the first block that changed begins with, as before
    """

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.same = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._settled = ""  # the source of the blocks that can no longer change
        self._n_settled = 0  # the number of these blocks
        self._live = _Live()
        self._references: dict[str, Any] = {}  # the targets of links that the settled source has
        self._seen: dict[str, Any] = {}  # those that the blocks were rendered with

    def update(self, text: str, marks: Marks, at: int = 0) -> int | None:
        """Render the text, which may have grown. Returns the number of the first block that
        changed, came or went; None if all are as before."""
        text = _with_newlines(text)
        if not text.startswith(self._settled):
            self._begin_anew()
        begin = len(self._settled)
        tail = text[begin:]
        env: Env = {
            "marks": marks,
            "at": at + begin,
            "live": self._live,
            "references": dict(self._references),
        }
        source, guessed = completed(tail)
        tokens = _markdown.parse(source, env)
        if self._settled and env["references"] != self._seen:
            self._begin_anew()  # earlier links may now have a target, or none any more
            return self.update(text, marks, at)
        self._seen = env["references"]
        n_settled = self._n_settled
        cut, end = self._cut(tokens, tail, min(guessed - 1, marks.last_start - env["at"]))
        blocks = [*self.blocks[:n_settled], *_blocks(tokens, env)]
        self._n_settled += sum(one.level == 0 and one.nesting <= 0 for one in tokens[:cut])
        if end:
            self._settled = text[: begin + end]
            if self._seen != self._references:
                _markdown.parse(tail[:end], {"references": self._references})
        return self._take(blocks, n_settled)

    def finish(self, text: str, marks: Marks, at: int = 0) -> int | None:
        """Render the whole text as one that grows no more. Returns the same."""
        return self._take(render_blocks(text, marks, at), 0)

    def _take(self, blocks: list[str], n_same: int) -> int | None:
        before, self.blocks = self.blocks, blocks
        if before == blocks:
            return None
        pairs = zip(before[n_same:], blocks[n_same:], strict=False)
        first = n_same + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        old, new = (one[first] if first < len(one) else "" for one in (before, blocks))
        n = bisect(range(len(new)), 0, key=lambda n: new[: n + 1] != old[: n + 1])
        self.same = new[:n]
        return first

    @staticmethod
    def _cut(tokens: Sequence[Token], tail: str, limit: int) -> tuple[int, int]:
        """The index of the last block's first token, and the offset of its first line.

        That line must be complete: until then it may still belong to the block before. It must
        start at ``limit`` or before.
        """
        starts = [0, *(found.end() for found in re.finditer("\n", tail))]
        for i in range(len(tokens) - 1, 0, -1):
            token = tokens[i]
            if token.level == 0 and token.nesting >= 0 and token.map:
                line = token.map[0]
                if line + 1 < len(starts) and starts[line] <= limit:
                    return i, starts[line]
        return 0, 0


def _with_newlines(text: str) -> str:
    """The text with the parser's newlines, at the same length."""
    return text.replace("\r\n", " \n").replace("\r", "\n")


# Source offsets of a token's characters


def _core(state: Any) -> None:
    """Parse inline tokens as usual, and store where what a token shows is in the source, as
    ``meta["at"]``."""
    growing = None  # the token that is still growing: the last one, within the last block
    if state.env.get("live"):
        for token in reversed(state.tokens):
            if not token.nesting:
                growing = token
            if growing is not None or (token.level == 0 and token.nesting > 0):
                break
    starts = [0, *(found.end() for found in re.finditer("\n", state.src)), len(state.src) + 1]
    pos, line = 0, -1
    for before, token in zip([None, None, *state.tokens], state.tokens, strict=False):
        if token.nesting or not token.map:
            continue
        if token.map[0] != line:  # else another cell of the same row
            line = token.map[0]
            pos = starts[line]
        if token.type != "inline":
            token.meta["at"] = _line_offsets(token, starts)
            continue
        content = token.content
        if token is growing:
            content = completed_inline(state.md, content, state.env)
        token.children = []
        state.md.inline.parse(content, state.md, state.env, token.children)
        pos = _locate(token.children, state.src, pos, starts[min(token.map[1], len(starts) - 1)])
        if before is not None and before.type == "list_item_open":
            _mark_task(token.children)


def _line_offsets(token: Token, starts: Sequence[int]) -> list[int]:
    """The offsets of a block whose lines are source lines without their containers' prefixes."""
    assert token.map is not None
    at: list[int] = []
    first = token.map[0] + (token.type == "fence")
    for number, line in enumerate(token.content.split("\n"), first):
        begin, end = starts[min(number, len(starts) - 2)], starts[min(number + 1, len(starts) - 1)]
        at += [max(begin, end - 1 - n) for n in range(len(line), -1, -1)]  # and of the newline
    return at[:-1]


def _locate(children: Sequence[Token], source: str, pos: int, end: int) -> int:
    """Store the offsets of inline tokens, which follow each other from ``pos`` to ``end``; returns
    where the last one ends. One that shows other characters than the source gets none."""
    for token in children:
        if token.type == "link_close" and source.startswith("](", pos):
            pos = max(pos, source.find(")", pos, end))
        text = token.markup if token.info == "entity" else token.content
        found = source.find(text, pos, end)
        at = [*range(found, found + len(text))] if found >= 0 else _scattered(text, source, pos)
        if at and at[-1] < end:
            token.meta["at"], pos = at, at[-1] + 1
    return pos


def _scattered(text: str, source: str, pos: int) -> list[int]:
    """The offsets of characters with others of the source between, such as a backslash; whitespace
    may be another one. Empty if they are not there."""
    at = []
    for char in text:
        pos = pos if char.isspace() else source.find(char, pos)
        if not 0 <= pos < len(source):
            return []
        at.append(pos)
        pos += not char.isspace() or source[pos].isspace()
    return at


def _mark_task(children: list[Token]) -> None:
    """Make a box of ``[ ]`` or ``[x]`` at the beginning of a list item."""
    first = children[0] if children else Token("text", "", 0)
    if first.type != "text" or not (found := _TASK.match(first.content)):
        return
    first.content = first.content[found.end() :]
    if first.meta.get("at") is not None:
        first.meta["at"] = first.meta["at"][found.end() :]
    children.insert(0, Token("task", "", 0, meta={"done": found[1] != " "}))


# Rendering of tokens


def _painted(text: str, at: Sequence[int] | None, env: Env) -> str:
    """The escaped text, with a span around each run of drafted tokens."""
    marks: Marks | None = env.get("marks")
    if marks is None or at is None or len(at) != len(text):
        return escape(text)
    first, parts = env["at"], []
    for run, group in groupby(
        zip(at, text, strict=True), key=lambda pair: marks.run_at(first + pair[0])
    ):
        html = escape("".join(char for _, char in group))
        parts.append(_drafted(html, marks, run) if run else html)
    return "".join(parts)


def _unit(html: str, at: Sequence[int] | None, env: Env) -> str:
    """HTML that stands for several source characters: drafted if most of them were."""
    marks: Marks | None = env.get("marks")
    if marks is None or not at:
        return html
    runs = [marks.run_at(env["at"] + pos) for pos in at]
    drafted = [run for run in runs if run]
    if 2 * len(drafted) <= len(runs):
        return html
    return _drafted(html, marks, max(drafted, key=drafted.count))


def _drafted(html: str, marks: Marks, run: int) -> str:
    source = "".join(marks.sources[run // 2 : run // 2 + 1])
    told = f' data-from="{escape(source)}"' if source else ""
    return f'<span class="drafted" data-n="{marks.runs[run][1]}"{told}>{html}</span>'


def _text(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    token = tokens[index]
    if token.info == "entity":
        return _unit(escape(token.content), token.meta.get("at"), env)
    return _painted(token.content, token.meta.get("at"), env)


def _code_inline(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    token = tokens[index]
    return f"<code>{_painted(token.content, token.meta.get('at'), env)}</code>"


def _code(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    """A code block below a line with its language and buttons."""
    token, language = tokens[index], _language(tokens[index])
    code, at, live = token.content, token.meta.get("at"), _Live()
    if at and "live" in env:
        live, begin = env["live"], env["at"] + at[0]
        if live.at != begin or not code.startswith(live.code):  # it is another block
            live.at, live.code, live.html, live.stack = begin, "", "", ()
        code, at = code[len(live.code) :], at[len(live.code) :]
        if len(code) > 2 * MOST_GROWING:
            limit = bisect(at, env["marks"].last_start - env["at"])
            n, stack = settled(code, language, live.stack, min(limit, len(code) - MOST_GROWING))
            live.html += _code_html(code[:n], language, live.stack, at[:n], env)
            live.code, live.stack, code, at = live.code + code[:n], stack, code[n:], at[n:]
    html = live.html + _code_html(code, language, live.stack, at, env)
    name = f"<span>{escape(language)}</span>" if _LANGUAGE.fullmatch(language) else ""
    actions = {"wrap": "Wrap", "download": "Download", "copy-code": "Copy"}
    if language.lower() in PREVIEWED:
        actions = {"preview": "Preview", **actions}
    buttons = "".join(
        f'<button type="button" data-action="{action}">{label}</button>'
        for action, label in actions.items()
    )
    file = f"code{suffix(language)}"
    return (
        f'<div class="code" data-name="{file}"><div class="actions">{name or "<span></span>"}'
        f"{buttons}</div><pre><code>{html}</code></pre></div>"
    )


def _language(token: Token) -> str:
    return (token.info.split() or [""])[0]


def _code_html(code: str, language: str, stack: Stack, at: Sequence[int] | None, env: Env) -> str:
    pos, parts = 0, []
    for kind, text in highlighted(code, language, stack):
        end = pos + len(text)
        html = _painted(text, at and at[pos:end], env)
        parts.append(f'<span class="{kind}">{html}</span>' if kind else html)
        pos = end
    return "".join(parts)


def _task(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    is_done = tokens[index].meta["done"]
    label = "done" if is_done else "to do"
    return f'<span class="task" role="img" aria-label="{label}">{"☑" if is_done else "☐"}</span> '


def _formula(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    token = tokens[index]
    at = token.meta.get("at")
    html = formulas.mathml(token.markup, bool(token.meta["displayed"]))
    html = _unit(html, at, env) if html else _painted(token.content, at, env)
    return f'<p class="formula">{html}</p>\n' if token.type == "math_block" else html


def _link_open(self: Any, tokens: Sequence[Token], index: int, options: Any, env: Env) -> str:
    """A link that opens in a new tab: in this one it would end a streaming reply."""
    tokens[index].attrSet("target", "_blank")
    tokens[index].attrSet("rel", "noopener noreferrer")
    return str(self.renderToken(tokens, index, options, env))


def _parser(preset: str, *rules: str) -> MarkdownIt:
    made = MarkdownIt(preset, {"html": False, "breaks": True})
    made.enable(rules).disable(["image", "text_join"])
    made.core.ruler.at("inline", _core)
    for name, render_rule in (
        ("text", _text),
        ("text_special", _text),
        ("code_inline", _code_inline),
        ("fence", _code),
        ("task", _task),
        ("code_block", _code),
        ("math_inline", _formula),
        ("math_block", _formula),
        ("link_open", _link_open),
    ):
        made.add_render_rule(name, render_rule)
    return made


_markdown = _parser("commonmark", "table", "strikethrough")
formulas.add_formulas(_markdown)
_messages = _parser("zero", "fence", "table", "backticks")
