"""A turn of a conversation as HTML. Whatever a model or a user wrote shows as text, never as HTML.

A reply is rendered as Markdown, drafted tokens in spans, which the style sheet colours or not.
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
    """One turn; ``live`` while its reply is in the making, ``last`` where it can be undone.

    ``with_model`` names the model of the reply, in a conversation with several. ``growing`` has
    what was rendered of its text before, while there is more to come.
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
    """A reply in the making: what of it can no longer change is rendered once."""

    def __init__(self) -> None:
        self.reasoning = Growing()
        self.answer = Growing()


def text_html(reply: Reply, growing: GrowingReply | None = None) -> str:
    """The text as Markdown, drafted tokens in spans; reasoning is folded away."""
    text, found, marks = reply.text, reply.reasoning, Marks.of(reply.pieces)
    start, end, answer = found or (0, 0, 0)
    if growing is None:
        reasoning, said = text[start:end], text[answer:]
        return _folded(render(reasoning, marks, start)) + render(said, marks, answer)
    reasoning = growing.reasoning.render(text[start:end], marks, start)
    return _folded(reasoning) + growing.answer.render(text[answer:], marks, answer)


def _folded(html: str) -> str:
    """What a model thinks before it answers, to be opened by whoever wants to read it."""
    return f"<details><summary>Reasoning</summary>{html}</details>" if html.strip() else ""


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


def _body(reply: Reply, growing: GrowingReply | None) -> str:
    text = ""
    if reply.pieces:
        source = "" if growing else f' data-source="{escape(reply.answer)}"'  # what Copy takes
        html = text_html(reply, growing)
        text = f'<div class="text markdown" dir="auto"{source}>{html}</div>'
    return text + notice_html(reply.notice) + error_html(reply.error)


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
