"""A turn of a conversation as HTML. Whatever a model or a user wrote shows as text, never as HTML.

With colours a reply is the text as it is, drafted tokens in spans; without, it is rendered as
Markdown, in which HTML stays text and images become links, so that no reply can load anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from markdown_it import MarkdownIt

from app.chat import Reply, Turn, stats_line

_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True})
_markdown.enable(["table", "strikethrough"]).disable("image")


def _link_open(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """A link in a tab of its own: in this one it would end the reply that is being written."""
    tokens[index].attrSet("target", "_blank")
    tokens[index].attrSet("rel", "noopener noreferrer")
    return str(self.renderToken(tokens, index, options, env))


_markdown.add_render_rule("link_open", _link_open)


def turn_html(turn: Turn, *, coloured: bool, live: bool, last: bool) -> str:
    """One turn; ``live`` while its reply is in the making, ``last`` where it can be undone."""
    edit = "" if live else _actions("edit")
    parts = [f'<div class="user"><div class="said">{escape(turn.user)}</div>{edit}</div>']
    reply = turn.shown
    if reply is not None:
        actions = [
            *(["copy"] if reply.pieces else []),
            *(["continue"] if last and reply.is_cut_short else []),
            "retry",
            *(["undo"] if last else []),
        ]
        foot = _foot(reply) + ("" if live else _actions(*actions))
        parts.append(
            f'<div class="reply">{_body(reply, coloured)}<div class="foot">{foot}</div></div>'
        )
    return f'<article class="turn{" live" if live else ""}">{"".join(parts)}</article>'


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


def _body(reply: Reply, coloured: bool) -> str:
    parts = []
    if reply.pieces:
        kind = "plain" if coloured else "markdown"
        html = coloured_html(reply) if coloured else markdown_html(reply)
        source = escape(reply.answer)  # what Copy takes
        parts.append(f'<div class="text {kind}" data-source="{source}">{html}</div>')
    return "".join(parts) + notice_html(reply.notice) + error_html(reply.error)


def _foot(reply: Reply) -> str:
    # Lines break between the parts of the stats, never within one.
    parts = (f"<span>{escape(part)}</span>" for part in stats_line(reply).split(" · "))
    method = f"<code>{escape(reply.method)}</code>" if reply.method else ""
    return f'{method}<span class="stats">{" · ".join(parts)}</span>'


def _actions(*names: str) -> str:
    buttons = "".join(
        f'<button type="button" data-action="{name}">{name.capitalize()}</button>' for name in names
    )
    return f'<span class="actions">{buttons}</span>'
