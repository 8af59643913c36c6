"""A turn of a conversation as HTML. Whatever a model or a user wrote shows as text, never as HTML.

With colours a reply is the text as it is, drafted tokens in spans; without, it is rendered as
Markdown, in which HTML stays text and images become links, so that no reply can load anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

from app.page.conversation import Reply, Turn, stats_line
from app.page.files import File, size_of

_MATH = re.compile(r"\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$", re.DOTALL)

_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True})
_markdown.enable(["table", "strikethrough"]).disable("image")


def _link_open(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """A link in a tab of its own: in this one it would end the reply that is being written."""
    tokens[index].attrSet("target", "_blank")
    tokens[index].attrSet("rel", "noopener noreferrer")
    return str(self.renderToken(tokens, index, options, env))


def _fence(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """A block of code, with a button that copies it."""
    code = f"<pre><code>{escape(tokens[index].content)}</code></pre>"
    button = '<button type="button" data-action="copy-code">Copy</button>'
    return f'<div class="code">{code}<span class="actions">{button}</span></div>'


def _math(state: StateInline, silent: bool) -> bool:
    """TeX stays as it is written, backslashes and all."""
    found = _MATH.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


_markdown.add_render_rule("link_open", _link_open)
_markdown.add_render_rule("fence", _fence)
_markdown.inline.ruler.before("escape", "math", _math)


def turn_html(
    turn: Turn, *, coloured: bool, live: bool, last: bool, with_model: bool = False
) -> str:
    """One turn; ``live`` while its reply is in the making, ``last`` where it can be undone.

    ``with_model`` names the model of the reply, in a conversation with several.
    """
    edit = "" if live else _actions("edit")
    files = [(file.leads, _file(n, file)) for n, file in enumerate(turn.files)]
    before = "".join(html for leads, html in files if leads)
    after = "".join(html for leads, html in files if not leads)
    said = f'{before}<div class="said" dir="auto">{escape(turn.user)}</div>{after}'
    parts = [f'<div class="user" role="group" aria-label="You">{said}{edit}</div>']
    reply = turn.shown
    if reply is not None:
        actions = [
            *(["copy"] if reply.pieces else []),
            *(["continue"] if last and reply.is_cut_short else []),
            "retry",
            *(["undo"] if last else []),
        ]
        foot = _foot(reply, with_model) + ("" if live else _actions(*actions))
        parts.append(
            f'<div class="reply" role="group" aria-label="Model">{_body(reply, coloured)}'
            f'<div class="foot">{foot}</div></div>'
        )
    article = f'<article class="turn{" live" if live else ""}">{"".join(parts)}</article>'
    return _left_out(turn.n_ctx) + article


def coloured_html(reply: Reply) -> str:
    """The text with a span around each run of drafted tokens, which one step accepted; thoughts are
    folded away."""
    found = reply.thoughts
    if found is None:
        return _spans(reply.pieces)
    thoughts = _spans(_cut(reply.pieces, found.start, found.end))
    return _folded(thoughts) + _spans(_cut(reply.pieces, found.answer, len(reply.text)))


def _cut(pieces: Iterable[tuple[str, bool]], first: int, end: int) -> list[tuple[str, bool]]:
    """The pieces of the characters from ``first`` to ``end``."""
    found, at = [], 0
    for text, drafted in pieces:
        part = text[max(0, first - at) : max(0, end - at)]
        if part or (not text and first < at < end):
            found.append((part, drafted))
        at += len(text)
    return found


def _spans(pieces: Iterable[tuple[str, bool]]) -> str:
    parts = []
    for drafted, group in groupby(pieces, key=lambda piece: piece[1]):
        run = list(group)
        text = escape("".join(text for text, _ in run))
        if drafted:
            title = f"{len(run)} drafted token{'' if len(run) == 1 else 's'} accepted in one step"
            text = f'<span class="drafted" title="{title}">{text}</span>'
        parts.append(text)
    return "".join(parts)


def markdown_html(reply: Reply) -> str:
    """The text as Markdown; what a model thinks before it answers is folded away."""
    found, text = reply.thoughts, reply.text
    if found is None:
        return str(_markdown.render(text))
    thoughts = str(_markdown.render(text[found.start : found.end]))
    return _folded(thoughts) + str(_markdown.render(text[found.answer :]))


def _folded(html: str) -> str:
    """What a model thinks before it answers, to be opened by whoever wants to read it."""
    return f"<details><summary>Thoughts</summary>{html}</details>" if html.strip() else ""


def notice_html(text: str) -> str:
    """What is going on, or nothing."""
    return f'<div class="notice" role="status">{escape(text)}</div>' if text else ""


def error_html(text: str) -> str:
    """What went wrong, or nothing."""
    return f'<div class="error" role="alert">{escape(text)}</div>' if text else ""


def _left_out(n_ctx: int) -> str:
    """The line above the first turn that the model still reads, or nothing."""
    if not n_ctx:
        return ""
    text = f"Above this line: no longer read by the model; its context of {n_ctx} tokens is full"
    return f'<p class="left-out" role="note">{text}</p>'


def _file(n: int, file: File) -> str:
    """A file of a message, to be unfolded. Its text, which may be long, is put in by the page, and
    stays in there for as long as the file is the same."""
    name = f"<bdi>{escape(file.name)}</bdi> <span>{size_of(file.text)}</span>"
    text = f'<div class="code" data-keeps="{hash(file)}"></div>'
    return f'<details class="file" data-file="{n}"><summary>{name}</summary>{text}</details>'


def _body(reply: Reply, coloured: bool) -> str:
    parts = []
    if reply.pieces:
        kind = "plain" if coloured else "markdown"
        html = coloured_html(reply) if coloured else markdown_html(reply)
        source = escape(reply.answer)  # what Copy takes
        parts.append(f'<div class="text {kind}" dir="auto" data-source="{source}">{html}</div>')
    return "".join(parts) + notice_html(reply.notice) + error_html(reply.error)


def _foot(reply: Reply, with_model: bool) -> str:
    # Lines break between the parts of the stats, never within one.
    parts = (f"<span>{escape(part)}</span>" for part in stats_line(reply).split(" · "))
    method = f"<code>{escape(reply.method)}</code>" if reply.method else ""
    if with_model and reply.model_name:
        method = f"<code>{escape(reply.model_name)}</code>{method}"
    return f'{method}<span class="stats">{" · ".join(parts)}</span>'


def _actions(*names: str) -> str:
    buttons = "".join(
        f'<button type="button" data-action="{name}">{name.capitalize()}</button>' for name in names
    )
    return f'<span class="actions">{buttons}</span>'
