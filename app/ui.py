"""The page: Gradio blocks, and the wires between them and the conversation."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import sleep
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.backend import Backend
from app.chat import Conversation, Reply, Turn, markdown, waiting_notice
from app.fields import Fields, method_fields, read_settings, sampling_fields
from app.messages import Failed, Loading, ModelSpec, Status, Waiting
from app.render import turn_html
from speculation.engine import DEFAULT_METHOD

HERE = Path(__file__).parent
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

# The browser itself refuses whatever would leave this machine.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"

WELCOME = """
<div class="turns" role="region" aria-label="Conversation"></div>
<div class="welcome">
  <h1>See what speculation does</h1>
  <p>Say something. A method guesses several tokens ahead, the model checks the guesses in one step,
  and what holds is kept: the same text as without, in fewer steps.</p>
  <p><span class="drafted">Tokens like these</span> were guessed right; all others the model
  added itself, one each step.</p>
</div>
"""

DOWNLOAD = """(text) => {
  if (!text) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "text/markdown"}));
  link.download = "conversation.md";
  link.click();
  URL.revokeObjectURL(link.href);
}"""


@dataclass
class Session:
    """What one tab has: its conversation, whether drafts are coloured, whether a reply is due."""

    conversation: Conversation = field(default_factory=Conversation)
    coloured: bool = True
    busy: bool = False
    _finished: list[tuple[Reply | None, tuple[str, bool, bool], str]] = field(default_factory=list)

    def html(self) -> list[str]:
        """The turns; those that are finished are rendered once, as a long chat has many."""
        turns = self.conversation.turns
        del self._finished[len(turns) :]
        return [self._turn_html(index, turn) for index, turn in enumerate(turns)]

    def _turn_html(self, index: int, turn: Turn) -> str:
        last = index == len(self.conversation.turns) - 1
        if self.busy and last:
            del self._finished[index:]
            return turn_html(turn, coloured=self.coloured, live=True, last=True)
        key = (turn.user, self.coloured, last)
        if index < len(self._finished):
            reply, known, html = self._finished[index]
            if reply is turn.reply and known == key:
                return html
        html = turn_html(turn, coloured=self.coloured, live=False, last=last)
        self._finished[index : index + 1] = [(turn.reply, key, html)]
        return html


def build(backend: Backend, spec: ModelSpec, method: str = DEFAULT_METHOD) -> gr.Blocks:
    """The page. ``spec`` and ``method``, as on the command line, are what it starts with."""
    fields = Fields()
    page: gr.Blocks
    with gr.Blocks(title="Speculation", fill_height=True, fill_width=True) as page:
        session = gr.State(Session())
        with gr.Sidebar(width=330, elem_id="settings"):
            method_fields(fields, backend.methods(), method)
            colour = gr.Checkbox(True, label="Colour drafted tokens", elem_id="colour")
            fields.add(
                "compare",
                gr.Checkbox(
                    False,
                    label="Compare with plain decoding",
                    info="Runs each reply once more without drafts and shows the speed-up.",
                    elem_id="compare",
                ),
            )
            with gr.Accordion("Model", open=False):
                model, n_ctx, load, cancel, load_note = _model_fields(backend, spec)
            with gr.Accordion("System prompt", open=False):
                fields.add(
                    "system",
                    gr.Textbox(
                        placeholder="You are a helpful assistant.",
                        lines=3,
                        max_lines=12,
                        show_label=False,
                        container=False,
                        elem_id="system",
                    ),
                )
            with gr.Accordion("Sampling", open=False):
                sampling_fields(fields)
        with gr.Row(elem_id="top"):
            header = gr.HTML(
                _header(backend.status()), elem_id="header", apply_default_css=False, scale=1
            )
            new = gr.Button("New chat", size="sm", min_width=0, scale=0, elem_id="new")
            export = gr.Button("Export", size="sm", min_width=0, scale=0, elem_id="export")
            exported = gr.Textbox(visible=False)
        transcript = gr.HTML(
            value=[],
            html_template=WELCOME,
            js_on_load=(HERE / "page.js").read_text(encoding="utf-8"),
            apply_default_css=False,
            elem_id="transcript",
        )
        box = gr.Textbox(
            placeholder="Say something",
            show_label=False,
            container=False,
            lines=1,
            max_lines=8,
            autofocus=True,
            submit_btn=True,
            elem_id="box",
        )

    def answer(tab: Session, tab_id: str, values: tuple[Any, ...]) -> Iterator[dict[Any, Any]]:
        tab.busy = True
        try:
            yield {
                box: gr.update(value="", submit_btn=False, stop_btn=True),
                transcript: tab.html(),
            }
            settings = read_settings(fields.read(values), backend.methods())
            for _ in tab.conversation.answer(backend, settings, tab_id):
                yield {transcript: tab.html()}
        finally:
            tab.busy = False
        yield {
            box: gr.update(submit_btn=True, stop_btn=False),
            transcript: tab.html(),
            header: _header(backend.status()),
        }

    def ask(text: str, tab: Session, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        if text.strip() and not tab.busy:
            tab.conversation.ask(text.strip("\n"))
            yield from answer(tab, _tab_id(request), values)

    def retry(
        tab: Session, event: gr.EventData, request: gr.Request, *values: Any
    ) -> Iterator[dict[Any, Any]]:
        if not tab.busy:
            tab.conversation.retry(event.index)
            yield from answer(tab, _tab_id(request), values)

    def edit(
        tab: Session, event: gr.EventData, request: gr.Request, *values: Any
    ) -> Iterator[dict[Any, Any]]:
        if not tab.busy:
            tab.conversation.edit(event.index, event.text)
            yield from answer(tab, _tab_id(request), values)

    def undo(tab: Session) -> dict[Any, Any]:
        if tab.busy:
            return {}
        return {box: tab.conversation.undo(), transcript: tab.html()}

    def clear(tab: Session, request: gr.Request) -> list[str]:
        backend.stop(_tab_id(request))
        if not tab.busy:
            tab.conversation.clear()
        return tab.html()

    def set_colour(coloured: bool, tab: Session) -> list[str]:
        tab.coloured = coloured
        return tab.html()

    def stop(request: gr.Request) -> None:
        backend.stop(_tab_id(request))
        backend.stop(_load_id(request))

    def load_model(name: str, cells: float, request: gr.Request) -> Iterator[dict[Any, Any]]:
        name = (name or "").strip()
        wanted = dataclasses.replace(spec, model=name, n_ctx=int(cells or 0))
        if name != spec.model:  # what drafts fits that model alone
            wanted = dataclasses.replace(wanted, draft_model=None, heads=())
        yield {load: gr.update(visible=False), cancel: gr.update(visible=True), load_note: ""}
        note = ""
        for event in backend.load(wanted, _load_id(request)):
            if isinstance(event, Waiting):
                note = _note(waiting_notice(event))
            elif isinstance(event, Loading):
                note = _note(_loading(event))
            else:
                note = _alarm(event.message) if isinstance(event, Failed) else ""
            yield {load_note: note, header: _header(backend.status())}
        yield {
            load: gr.update(visible=True),
            cancel: gr.update(visible=False),
            header: _header(backend.status()),
        }

    def watch() -> Iterator[str]:
        """The header, followed for as long as a model is being loaded."""
        while (status := backend.status()).loading is not None:
            yield _header(status)
            sleep(0.3)
        yield _header(status)

    inputs = list(fields.components.values())
    answers: dict[str, Any] = {
        "outputs": [box, transcript, header],
        "show_progress": "hidden",
        "concurrency_limit": None,  # the backend has the queue, and tells who waits
        "api_visibility": "private",
    }
    quick: dict[str, Any] = {
        "queue": False,
        "show_progress": "hidden",
        "api_visibility": "private",
    }
    with page:
        box.submit(ask, [box, session, *inputs], **answers)
        transcript.retry(retry, [session, *inputs], **answers)
        transcript.edit(edit, [session, *inputs], **answers)
        transcript.undo(undo, [session], [box, transcript], **quick)
        box.stop(stop, **quick)
        new.click(clear, [session], [transcript], **quick)
        colour.input(set_colour, [colour, session], [transcript], **quick)
        export.click(lambda tab: markdown(tab.conversation), [session], [exported], **quick).then(
            None, [exported], js=DOWNLOAD, api_visibility="private"
        )
        load.click(
            load_model,
            [model, n_ctx],
            [load, cancel, load_note, header],
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )
        cancel.click(stop, **quick)
        page.load(
            watch,
            outputs=[header],
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )
        page.unload(stop)
    return page


def launch(page: gr.Blocks, **options: Any) -> str:
    """Serve the page, without anything that would leave this machine; the page's address.

    Raises OSError when the port is taken.
    """
    # Gradio asks its own server whether it is up; a proxy must not come between the two.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    theme = gr.themes.Base(
        primary_hue="emerald", neutral_hue="zinc", font=SANS, font_mono=MONO, radius_size="md"
    )
    _, url, _ = page.launch(
        theme=theme,
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        footer_links=[],
        share=False,
        show_error=True,
        quiet=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(_StayHere)]},
        **options,
    )
    return str(url)


def _model_fields(backend: Backend, spec: ModelSpec) -> tuple[Any, Any, Any, Any, Any]:
    notes = {info.name: info.note for info in backend.models()}
    model = gr.Dropdown(
        list(notes),
        value=spec.model,
        allow_custom_value=True,
        label="Model",
        info="A name of models.txt, a path to a GGUF, or hf:owner/repository/file.gguf",
        elem_id="model",
    )
    note = gr.HTML(_note(notes.get(spec.model, "")), apply_default_css=False)
    n_ctx = gr.Number(
        spec.n_ctx,
        label="Context",
        info="In tokens; 0 for the model's own, at most 8192",
        precision=0,
        minimum=0,
        elem_id="ctx",
    )
    load = gr.Button("Load", variant="primary", size="sm", elem_id="load")
    cancel = gr.Button("Cancel", size="sm", visible=False, elem_id="cancel")
    load_note = gr.HTML(apply_default_css=False, elem_id="load-note")
    model.change(
        lambda name: _note(notes.get(name, "")),
        [model],
        [note],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    return model, n_ctx, load, cancel, load_note


def _header(status: Status) -> str:
    """What is loaded or on its way, or why nothing is."""
    parts = []
    if status.model is not None:
        name = Path(status.model.spec.model).name
        details = f"{status.model.description} · context {status.model.n_ctx}"
        if not status.model.has_chat_template:
            details += " · no chat template: a plain transcript is continued"
        parts.append(f"<b>{escape(name)}</b><span>{escape(details)}</span>")
    if status.loading is not None:
        parts.append(_note(_loading(status.loading)))
    elif status.error is not None and status.model is None:
        parts.append(_alarm(status.error))
    return "".join(parts) or _note("No model is loaded")


def _loading(event: Loading) -> str:
    if event.stage == "download":
        return f"Downloading {event.model}: {event.done / 1e9:.2f} of {event.total / 1e9:.2f} GB"
    return f"Loading {event.model}: {event.done} %"


def _note(text: str) -> str:
    return f'<div class="notice" role="status">{escape(text)}</div>' if text else ""


def _alarm(text: str) -> str:
    return f'<div class="error" role="alert">{escape(text)}</div>'


def _tab_id(request: gr.Request) -> str:
    return str(request.session_hash)


def _load_id(request: gr.Request) -> str:
    return f"{request.session_hash}/load"


class _StayHere:
    """Sends ``POLICY`` with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"content-security-policy", POLICY.encode()))
            await send(message)

        await self._app(scope, receive, send_with_policy)
