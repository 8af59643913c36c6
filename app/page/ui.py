"""The page: its Gradio components and their events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr
from fastapi import FastAPI

from app.page.conversation import Reply, markdown
from app.page.events import QUICK, SLOW
from app.page.fields import Fields, method_fields, read_settings, sampling_fields
from app.page.files import files_to_text, read_files
from app.page.model_panel import ModelPanel
from app.page.session import Session
from app.worker.backend import Backend
from app.worker.messages import ModelSpec

PAGE = Path(__file__).parent / "static"
IN_HEAD = ("store.js", "tab.js", "archive.js")  # run before Gradio's first event
SCRIPTS = (
    *("transcript.js", "turns.js", "box.js", "settings.js", "history.js", "chats.js"),
    *("files.js", "unsent.js", "window.js"),
)
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

WELCOME = """
<div class="turns" role="region" aria-label="Conversation"></div>
<div class="unseen" role="status"></div>
<div class="unsaved error" role="alert" hidden></div>
<div class="refused error" role="alert" hidden></div>
<div class="welcome">
  <h1>See speculative decoding at work</h1>
  <p>Send a message. A method drafts several tokens ahead, and the model checks them in one step.
  Accepted drafts save steps, and the text stays the same.</p>
  <p><span class="drafted">Tokens like these</span> were drafted and accepted. The model generated
  the others itself, one per step.</p>
</div>
"""

SAVE_SECONDS = 3.0  # between full saves of a chat during a reply
NOT_STARTED = (
    "The reply could not start: a setting in the sidebar is invalid. Correct it and retry."
)

CHATS = """
<div class="chats">
  <input type="search" placeholder="Search" aria-label="Search chats" hidden>
  <p class="found" role="status"></p>
  <ul></ul>
  <p class="none">No chats yet.</p>
  <p class="trouble" role="alert"></p>
  <label><input type="checkbox"> Save chats in this browser</label>
  <div class="all"><button type="button" data-all="export">Export all</button>
  <button type="button" data-all="import">Import</button></div>
  <p class="status" role="status"></p>
</div>
"""

FILES = '<ul class="files" aria-label="Attached files"></ul>'

# For saveChat in history.js.
SAVE = """(text) => {
  if ("leaving" in document.documentElement.dataset) return;
  document.dispatchEvent(new CustomEvent("saved", { detail: text }));
}"""
SAVE_TAIL = "(text) => saveTail(text)"
SAVED = "async () => [await restored, savedValues(), null]"

# Gradio handles calls concurrently, so the page's clock tells their order.
CLOCK = "(...inputs) => [...inputs.slice(0, -1), performance.now()]"

# The message is the box's text when it was sent (box.js notes it), without what was typed while
# Gradio made the call. ``lastSaved`` is the chat, which the component may lack after a page load.
MESSAGE = """async (text, _, saved, session) => {
  const message = document.querySelector("#entry").message ?? { text, files: [] };
  const at = performance.now();
  await restored;
  return [message.text, JSON.stringify(message.files), lastSaved, session, at];
}"""
# What was typed since stays in the box.
REST = """(text, sent) => {
  if (!sent) return text;
  const message = JSON.parse(sent);
  document.dispatchEvent(new CustomEvent("sent", { detail: message.names }));
  return text.startsWith(message.text) ? text.slice(message.text.length) : text;
}"""

# An undone message returns to the box unless the user has begun another.
WRITTEN = """(text, _, ...inputs) => {
  const { files = [] } = document.querySelector("#entry");
  return [text, JSON.stringify(files), ...inputs.slice(0, -1), performance.now()];
}"""
PUT_BACK = """(files) => {
  if (files) document.dispatchEvent(new CustomEvent("put-back", { detail: JSON.parse(files) }));
}"""

DOWNLOAD = """(text) => {
  if (text) download(new Blob([text], { type: "text/markdown" }), "conversation.md");
}"""


def build(backend: Backend, spec: ModelSpec, method: str | None = None) -> gr.Blocks:
    """Build the page. Without ``method``, it starts with the one last used in the browser."""
    fields = Fields()
    page: gr.Blocks
    with gr.Blocks(title="Speculation", fill_height=True, fill_width=True) as page:
        session = gr.State(Session())
        with gr.Sidebar(width=330, elem_id="settings"):
            method_fields(fields, backend.methods(), method)
            # Only page.css reads it.
            fields.add_other(
                "colour", gr.Checkbox(True, label="Colour drafted tokens", elem_id="colour")
            )
            fields.add(
                "compare",
                gr.Checkbox(
                    False,
                    label="Compare with plain decoding",
                    info="Runs each reply again without drafts and shows the speed-up.",
                    elem_id="compare",
                ),
            )
            fields.add(
                "thinking",
                gr.Radio(
                    [("default", ""), ("on", "on"), ("off", "off")],
                    value="",
                    label="Reasoning",
                    info="Whether the model reasons before it answers.",
                    elem_id="thinking",
                ),
            )
            with gr.Accordion("Model", open=False):
                models = ModelPanel(backend, spec)
            with gr.Accordion("System prompt", open=False):
                fields.add(
                    "system",
                    gr.Textbox(
                        placeholder="You are a helpful assistant.",
                        label="System prompt",
                        lines=3,
                        max_lines=12,
                        show_label=False,
                        container=False,
                        elem_id="system",
                    ),
                )
            with gr.Accordion("Sampling", open=False):
                sampling_fields(fields)
            with gr.Accordion("Chats"):  # starts open, because opening a chat reloads the page
                gr.HTML(
                    CHATS,
                    js_on_load='document.dispatchEvent(new Event("chats"))',
                    apply_default_css=False,
                    elem_id="chats",
                )
        with gr.Row(elem_id="top"):
            header = gr.HTML(
                models.status_html(), elem_id="header", apply_default_css=False, scale=1
            )
            new = gr.Button("New chat", size="sm", min_width=0, scale=0, elem_id="new")
            export = gr.Button("Export", size="sm", min_width=0, scale=0, elem_id="export")
            exported = gr.Textbox(visible=False)
            saved = gr.Textbox(visible=False)  # the chat, as saved by the browser
            tail = gr.Textbox(visible=False)  # the reply's tokens since then
            sent = gr.Textbox(visible=False)  # the message to remove from the box
            attached = gr.Textbox(visible=False)  # the files beside the box
            clicked = gr.Number(visible=False)  # the time of an action, by the page's clock
            saved_values = gr.Textbox(visible=False)  # the fields' values, when the page loads
        transcript = gr.HTML(
            value=[],
            html_template=WELCOME,
            js_on_load="\n".join(_text(name) for name in SCRIPTS),
            apply_default_css=False,
            elem_id="transcript",
        )
        with gr.Row(elem_id="entry"):
            gr.HTML(
                FILES,
                js_on_load='document.dispatchEvent(new Event("files"))',
                apply_default_css=False,
                elem_id="files",
            )
            gr.Button("Add text files", size="sm", min_width=0, scale=0, elem_id="add")
            box = fields.add_other(
                "box",
                gr.Textbox(
                    placeholder="Send a message",
                    label="Message",
                    show_label=False,
                    container=False,
                    lines=1,
                    max_lines=8,
                    autofocus=True,
                    submit_btn="Send",
                    elem_id="box",
                ),
            )

    # A reply starts with a quick call, which shows the message at once, and continues with a
    # streaming one. The client may merge the first updates of a stream and lose some.

    def begin(tab: Session) -> dict[Any, Any]:
        tab.busy, tab.stopping, tab.ending = True, False, False
        return shown(tab)

    def shown(tab: Session) -> dict[Any, Any]:
        buttons: dict[str, Any] = {"submit_btn": False, "stop_btn": "Stop"}
        if not tab.busy:
            buttons = {"submit_btn": "Send", "stop_btn": False}
        return {
            box: gr.update(**buttons),
            transcript: tab.html(),
            saved: tab.saved(),
            tail: "",
        }

    def ask(text: str, given: str, chat: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.restore(chat)
        files = read_files(json.loads(given))
        if not tab.accepts(at) or not (text.strip() or files):
            return nothing() | {sent: ""}
        tab.conversation.ask(text.strip("\n"), files)
        names = [file.name for file in files]
        return begin(tab) | {sent: json.dumps({"text": text, "names": names})}

    def retry(chat: str, tab: Session, at: float, event: gr.EventData) -> dict[Any, Any]:
        tab.restore(chat)
        if not tab.accepts(at):
            return nothing()
        tab.conversation.retry(event.index)
        return begin(tab)

    def continue_reply(chat: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.restore(chat)
        if not tab.accepts(at) or not tab.has_started:
            return nothing()
        tab.conversation.continue_reply()
        return begin(tab)

    def edit(chat: str, tab: Session, at: float, event: gr.EventData) -> dict[Any, Any]:
        tab.restore(chat)
        if not tab.accepts(at):
            return nothing()
        tab.conversation.edit(event.index, event.text, read_files(event.files))
        return begin(tab)

    def answer(tab: Session, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        if not tab.busy or tab.has_started:  # the first call was ignored or undone
            yield nothing() if tab.busy else shown(tab)
            return
        try:
            settings = read_settings(fields.read(values), backend.methods())
            due = monotonic() + SAVE_SECONDS
            for _ in tab.conversation.answer(backend, settings, _tab_id(request)):
                if tab.ending:
                    break
                if tab.stopping:  # maybe requested before the backend had the request
                    backend.stop(_tab_id(request))
                update: dict[Any, Any] = {transcript: tab.html()}
                if monotonic() >= due:
                    update[saved] = tab.saved()
                    due = monotonic() + SAVE_SECONDS
                yield update | {tail: tab.tail()}
        finally:
            tab.busy = False
            if tab.ending:
                tab.end()
        yield shown(tab) | {header: models.status_html()}

    def give_up(tab: Session) -> dict[Any, Any]:
        """Handle a reply that Gradio refused to start, with an error of its own, or that failed."""
        tab.busy = False
        if not tab.is_restored:  # the server has restarted, and only the browser has the chat
            return nothing()
        if tab.conversation.turns and not tab.has_started:
            turn = tab.conversation.turns[-1]
            turn.reply, turn.before = turn.before or Reply(""), None
            turn.reply.error = NOT_STARTED
        return shown(tab)

    def undo(text: str, given: str, chat: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.restore(chat)
        if not tab.accepts(at):
            return nothing() | {attached: ""}
        turn, back = tab.conversation.undo(), ""
        if not text and not json.loads(given):
            text, back = turn.user, files_to_text(turn.files)
        return {box: text, attached: back, transcript: tab.html(), saved: tab.saved()}

    def clear(tab: Session, at: float, request: gr.Request) -> dict[Any, Any]:
        tab.ending, tab.ended_at = True, at
        backend.stop(_tab_id(request))
        if tab.busy and tab.has_started:  # ``answer`` ends it
            return nothing()
        tab.end()
        return shown(tab)

    def nothing() -> dict[Any, Any]:
        return {part: gr.skip() for part in outputs}

    def restore(chat: str, values: str, tab: Session) -> dict[Any, Any]:
        tab.restore(chat)
        return {transcript: tab.html(), saved: tab.saved()} | fields.updates(values)

    def as_markdown(chat: str, tab: Session) -> str:
        tab.restore(chat)
        return markdown(tab.conversation)

    def stop(tab: Session, request: gr.Request) -> None:
        tab.stopping = True
        backend.stop(_tab_id(request))

    def leave(request: gr.Request) -> None:
        backend.stop(_tab_id(request))
        models.stop(request)

    outputs = [box, transcript, saved, tail]
    action_inputs = [saved, session, clicked]
    in_order = {**QUICK, "js": CLOCK}
    with page:
        message = box.submit(
            ask, [box, attached, *action_inputs], [*outputs, sent], **{**QUICK, "js": MESSAGE}
        )
        message.then(None, [box, sent], [box], js=REST, api_visibility="private")
        for asked in (
            message,
            transcript.retry(retry, action_inputs, outputs, **in_order),
            transcript.continue_reply(continue_reply, action_inputs, outputs, **in_order),
            transcript.edit(edit, action_inputs, outputs, **in_order),
        ):
            replied = asked.then(answer, [session, *fields.for_replies], [*outputs, header], **SLOW)
            replied.failure(give_up, [session], outputs, **QUICK)
        transcript.undo(
            undo, [box, attached, *action_inputs], [*outputs, attached], **{**QUICK, "js": WRITTEN}
        ).then(None, [attached], js=PUT_BACK, api_visibility="private")
        transcript.focus(models.status, None, [header, models.context_note], **QUICK)
        box.stop(stop, [session], **QUICK)
        new.click(clear, [session, clicked], outputs, **in_order)
        export.click(as_markdown, [saved, session], [exported], **QUICK).then(
            None, [exported], js=DOWNLOAD, api_visibility="private"
        )
        models.wire(page, header)
        saved.change(None, [saved], js=SAVE, api_visibility="private")
        tail.change(None, [tail], js=SAVE_TAIL, api_visibility="private")
        every = list(fields.components.values())
        values = f"({json.dumps(fields.defaults)}, values)"
        for events, function in (
            ([component.change for component in every], "saveValues"),
            ([box.submit], "rememberValues"),
        ):
            js = f"(...values) => {function}{values}"
            gr.on(events, None, every, js=js, api_visibility="private")
        page.load(
            restore,
            [saved, saved_values, session],
            [transcript, saved, *every],
            js=SAVED,
            **QUICK,
        )
        page.unload(leave)
    return page


def mount(app: FastAPI, page: gr.Blocks) -> None:
    """Serve the page from ``app``, at the addresses that its own routes leave."""
    gr.mount_gradio_app(
        app,
        page,
        "/",
        theme=gr.themes.Base(
            primary_hue="emerald", neutral_hue="zinc", font=SANS, font_mono=MONO, radius_size="md"
        ),
        css=_text("page.css"),
        head="".join(f"<script>{_text(name)}</script>" for name in IN_HEAD),
        footer_links=[],
        show_error=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
    )


def _text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _tab_id(request: gr.Request) -> str:
    return str(request.session_hash)
