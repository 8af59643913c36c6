"""Renders a turn of a conversation as HTML. Text of the user or the model never becomes HTML.

Replies are rendered as Markdown, with drafted tokens in spans that the style sheet can colour.
"""

from __future__ import annotations

from html import escape

from app.page.conversation import Reply, Turn, stats_line
from app.page.files import File, size_of
from app.page.markdown import Growing, Marks, render


def turn_html(
    turn: Turn,
    *,
    live: bool,
    last: bool,
    with_model: bool = False,
    growing: GrowingReply | None = None,
) -> str:
    """A turn as HTML.

    live        its reply is being generated
    last        it is the last turn, which can be undone
    with_model  show the reply's model, in conversations with several
    growing     the state of rendering the unfinished reply
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
            f'<div class="reply" role="group" aria-label="Model">{_body(reply, growing)}'
            f'<div class="foot">{foot}</div></div>'
        )
    article = f'<article class="turn{" live" if live else ""}">{"".join(parts)}</article>'
    return _left_out(turn.n_ctx) + article


class GrowingReply:
    """The rendered parts of an unfinished reply that can no longer change."""

    def __init__(self) -> None:
        self.reasoning = Growing()
        self.answer = Growing()


def text_html(reply: Reply, growing: GrowingReply | None = None) -> str:
    """The reply's Markdown as HTML, with its reasoning collapsed."""
    text, found, marks = reply.text, reply.reasoning, Marks.of(reply.pieces)
    start, end, answer = found or (0, 0, 0)
    if growing is None:
        reasoning, said = text[start:end], text[answer:]
        return _folded(render(reasoning, marks, start)) + render(said, marks, answer)
    reasoning = growing.reasoning.render(text[start:end], marks, start)
    return _folded(reasoning) + growing.answer.render(text[answer:], marks, answer)


def _folded(html: str) -> str:
    """The reasoning in a collapsed element; empty if there is none."""
    return f"<details><summary>Reasoning</summary>{html}</details>" if html.strip() else ""


def notice_html(text: str) -> str:
    """A notice as HTML; empty if there is no text."""
    return f'<div class="notice" role="status">{escape(text)}</div>' if text else ""


def error_html(text: str) -> str:
    """An error as HTML; empty if there is no text."""
    return f'<div class="error" role="alert">{escape(text)}</div>' if text else ""


def _left_out(n_ctx: int) -> str:
    """The divider above the first turn still in context; empty if ``n_ctx`` is 0."""
    if not n_ctx:
        return ""
    text = f"The model no longer reads the turns above: its context of {n_ctx} tokens is full"
    return f'<p class="left-out" role="note">{text}</p>'


def _file(n: int, file: File) -> str:
    """A file of a message, collapsed.

    The page inserts its text, which may be long, when it is opened (``unfold`` in files.js).
    ``data-content`` tells whether the file is still the same.
    """
    name = f"<bdi>{escape(file.name)}</bdi> <span>{size_of(file.text)}</span>"
    text = f'<div class="code" data-content="{hash(file)}"></div>'
    return f'<details class="file" data-file="{n}"><summary>{name}</summary>{text}</details>'


def _body(reply: Reply, growing: GrowingReply | None) -> str:
    text = ""
    if reply.pieces:
        source = "" if growing else f' data-source="{escape(reply.answer)}"'  # what Copy copies
        html = text_html(reply, growing)
        text = f'<div class="text markdown" dir="auto"{source}>{html}</div>'
    return text + notice_html(reply.notice) + error_html(reply.error)


def _foot(reply: Reply, with_model: bool) -> str:
    # Lines break only between the figures.
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
