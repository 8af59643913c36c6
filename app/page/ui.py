"""The page: Gradio blocks, and the wires between them and the conversation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from app.page.conversation import Reply, markdown
from app.page.events import QUICK, SLOW
from app.page.fields import Fields, method_fields, read_settings, sampling_fields
from app.page.files import files_to_text, read_files
from app.page.guard import Guard, Names
from app.page.model_panel import ModelPanel
from app.page.session import Session
from app.worker.backend import Backend
from app.worker.messages import ModelSpec

PAGE = Path(__file__).parent / "static"
IN_HEAD = ("store.js", "tab.js", "archive.js")  # they are there before Gradio's first event
SCRIPTS = (
    *("transcript.js", "turns.js", "box.js", "settings.js", "history.js", "chats.js"),
    *("files.js", "drafts.js", "window.js"),
)
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")

WELCOME = """
<div class="turns" role="region" aria-label="Conversation"></div>
<div class="unseen" role="status"></div>
<div class="unkept error" role="alert" hidden></div>
<div class="refused error" role="alert" hidden></div>
<div class="welcome">
  <h1>See what speculation does</h1>
  <p>Say something. A method guesses several tokens ahead, the model checks the guesses in one step,
  and what holds is kept: the same text as without, in fewer steps.</p>
  <p><span class="drafted">Tokens like these</span> were guessed right; all others the model
  added itself, one each step.</p>
</div>
"""

KEEP_SECONDS = 3.0  # after so long the browser gets what there is of a reply, to keep it
REFUSED = "this reply could not begin: a value in the sidebar was refused; set it right and retry"

CHATS = """
<div class="chats">
  <input type="search" placeholder="Search" aria-label="Search chats" hidden>
  <p class="found" role="status"></p>
  <ul></ul>
  <p class="none">None yet.</p>
  <p class="trouble" role="alert"></p>
  <label><input type="checkbox"> Keep chats in this browser</label>
  <div class="all"><button type="button" data-all="export">Export all</button>
  <button type="button" data-all="import">Import</button></div>
  <p class="told" role="status"></p>
</div>
"""

FILES = '<ul class="files" aria-label="Files of your message"></ul>'

# history.js keeps it.
KEEP = """(text) => {
  if ("leaving" in document.documentElement.dataset) return;
  document.dispatchEvent(new CustomEvent("kept", { detail: text }));
}"""
KEEP_TAIL = "(text) => keepTail(text)"
KEPT = "async () => [await revived, keptValues(), null]"

# Gradio handles calls side by side: which came first, only the page knows.
CLOCK = "(...inputs) => [...inputs.slice(0, -1), performance.now()]"

# The message is what the box held when it was sent (box.js notes it): what was typed since, while
# Gradio made up its call, is no part of it. What the page knows of the conversation,
# ``kept`` may lack where it was just loaded …
SAID = """async (text, _, kept, session) => {
  const said = document.querySelector("#entry").said ?? { text, files: [] };
  const at = performance.now();
  await revived;
  return [said.text, JSON.stringify(said.files), known, session, at];
}"""
# … and stays in the box.
REST = """(text, sent) => {
  if (!sent) return text;
  const said = JSON.parse(sent);
  document.dispatchEvent(new CustomEvent("sent", { detail: said.names }));
  return text.startsWith(said.text) ? text.slice(said.text.length) : text;
}"""

# What was taken back is put beside the box, unless something is there or in it.
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
    """The page. ``spec`` and ``method`` are those of the command line; without ``method`` the page
    starts with the one that was last used in the browser."""
    fields = Fields()
    page: gr.Blocks
    with gr.Blocks(title="Speculation", fill_height=True, fill_width=True) as page:
        session = gr.State(Session())
        with gr.Sidebar(width=330, elem_id="settings"):
            method_fields(fields, backend.methods(), method)
            # The style sheet looks whether it is checked.
            fields.keep(
                "colour", gr.Checkbox(True, label="Colour drafted tokens", elem_id="colour")
            )
            fields.add(
                "compare",
                gr.Checkbox(
                    False,
                    label="Compare with plain decoding",
                    info="Runs each reply once more without drafts and shows the speed-up.",
                    elem_id="compare",
                ),
            )
            fields.add(
                "thinking",
                gr.Radio(
                    [("default", ""), ("on", "on"), ("off", "off")],
                    value="",
                    label="Thinking",
                    info="Whether the model thinks before it answers.",
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
            with gr.Accordion("Chats"):  # opening one loads the page again
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
            kept = gr.Textbox(visible=False)  # the conversation …
            tail = gr.Textbox(visible=False)  # what a reply has gained since
            sent = gr.Textbox(visible=False)  # what the box is to be rid of
            attached = gr.Textbox(visible=False)  # the files beside it
            clicked = gr.Number(visible=False)  # when, by the page's clock
            kept_values = gr.Textbox(visible=False)  # … and the fields, when the page is loaded
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
            box = fields.keep(
                "box",
                gr.Textbox(
                    placeholder="Say something",
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

    # A reply begins with a quick call, which says at once that it was taken, and goes on with one
    # that streams: of that, the client may put the first updates together and lose some.

    def begin(tab: Session) -> dict[Any, Any]:
        tab.busy, tab.stops, tab.ends = True, False, False
        return shown(tab)

    def shown(tab: Session) -> dict[Any, Any]:
        buttons: dict[str, Any] = {"submit_btn": False, "stop_btn": "Stop"}
        if not tab.busy:
            buttons = {"submit_btn": "Send", "stop_btn": False}
        return {
            box: gr.update(**buttons),
            transcript: tab.html(),
            kept: tab.kept(),
            tail: "",
        }

    def ask(text: str, given: str, known: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.revive(known)
        files = read_files(json.loads(given))
        if not tab.is_open(at) or not (text.strip() or files):
            return nothing() | {sent: ""}
        tab.conversation.ask(text.strip("\n"), files)
        names = [file.name for file in files]
        return begin(tab) | {sent: json.dumps({"text": text, "names": names})}

    def retry(known: str, tab: Session, at: float, event: gr.EventData) -> dict[Any, Any]:
        tab.revive(known)
        if not tab.is_open(at):
            return nothing()
        tab.conversation.retry(event.index)
        return begin(tab)

    def go_on(known: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.revive(known)
        if not tab.is_open(at) or not tab.begun:
            return nothing()
        tab.conversation.go_on()
        return begin(tab)

    def edit(known: str, tab: Session, at: float, event: gr.EventData) -> dict[Any, Any]:
        tab.revive(known)
        if not tab.is_open(at):
            return nothing()
        tab.conversation.edit(event.index, event.text, read_files(event.files))
        return begin(tab)

    def answer(tab: Session, request: gr.Request, *values: Any) -> Iterator[dict[Any, Any]]:
        if not tab.busy or tab.begun:  # the call before this one was not taken, or taken back
            yield nothing() if tab.busy else shown(tab)
            return
        try:
            settings = read_settings(fields.read(values), backend.methods())
            due = monotonic() + KEEP_SECONDS
            for _ in tab.conversation.answer(backend, settings, _tab_id(request)):
                if tab.ends:
                    break
                if tab.stops:  # asked for, maybe before there was anything to stop
                    backend.stop(_tab_id(request))
                update: dict[Any, Any] = {transcript: tab.html()}
                if monotonic() >= due:
                    update[kept] = tab.kept()
                    due = monotonic() + KEEP_SECONDS
                yield update | {tail: tab.tail()}
        finally:
            tab.busy = False
            if tab.ends:
                tab.end()
        yield shown(tab) | {header: models.status_html()}

    def give_up(tab: Session) -> dict[Any, Any]:
        """After a reply that Gradio did not let begin, and says why, or that broke off."""
        tab.busy = False
        if not tab.knows:  # the server was started anew, and what it lacks the browser has
            return nothing()
        if tab.conversation.turns and not tab.begun:
            turn = tab.conversation.turns[-1]
            turn.reply, turn.before = turn.before or Reply(""), None
            turn.reply.error = REFUSED
        return shown(tab)

    def undo(text: str, given: str, known: str, tab: Session, at: float) -> dict[Any, Any]:
        tab.revive(known)
        if not tab.is_open(at):
            return nothing() | {attached: ""}
        turn, back = tab.conversation.undo(), ""
        if not text and not json.loads(given):
            text, back = turn.user, files_to_text(turn.files)
        return {box: text, attached: back, transcript: tab.html(), kept: tab.kept()}

    def clear(tab: Session, at: float, request: gr.Request) -> dict[Any, Any]:
        tab.ends, tab.ended_at = True, at
        backend.stop(_tab_id(request))
        if tab.busy and tab.begun:  # the reply that is due ends it
            return nothing()
        tab.end()
        return shown(tab)

    def nothing() -> dict[Any, Any]:
        return {part: gr.skip() for part in taken}

    def restore(known: str, values: str, tab: Session) -> dict[Any, Any]:
        tab.revive(known)
        return {transcript: tab.html(), kept: tab.kept()} | fields.updates(values)

    def as_markdown(known: str, tab: Session) -> str:
        tab.revive(known)
        return markdown(tab.conversation)

    def stop(tab: Session, request: gr.Request) -> None:
        tab.stops = True
        backend.stop(_tab_id(request))

    def leave(request: gr.Request) -> None:
        backend.stop(_tab_id(request))
        models.stop(request)

    taken = [box, transcript, kept, tail]
    acted = [kept, session, clicked]
    in_order = {**QUICK, "js": CLOCK}
    with page:
        said = box.submit(ask, [box, attached, *acted], [*taken, sent], **{**QUICK, "js": SAID})
        said.then(None, [box, sent], [box], js=REST, api_visibility="private")
        for asked in (
            said,
            transcript.retry(retry, acted, taken, **in_order),
            transcript.go_on(go_on, acted, taken, **in_order),
            transcript.edit(edit, acted, taken, **in_order),
        ):
            replied = asked.then(answer, [session, *fields.for_replies], [*taken, header], **SLOW)
            replied.failure(give_up, [session], taken, **QUICK)
        transcript.undo(
            undo, [box, attached, *acted], [*taken, attached], **{**QUICK, "js": WRITTEN}
        ).then(None, [attached], js=PUT_BACK, api_visibility="private")
        transcript.focus(models.status, None, [header, models.in_effect], **QUICK)
        box.stop(stop, [session], **QUICK)
        new.click(clear, [session, clicked], taken, **in_order)
        export.click(as_markdown, [kept, session], [exported], **QUICK).then(
            None, [exported], js=DOWNLOAD, api_visibility="private"
        )
        models.wire(page, header)
        kept.change(None, [kept], js=KEEP, api_visibility="private")
        tail.change(None, [tail], js=KEEP_TAIL, api_visibility="private")
        every = list(fields.components.values())
        values = f"({json.dumps(fields.defaults)}, values)"
        for events, keeps in (
            ([component.change for component in every], "keepValues"),
            ([box.submit], "rememberValues"),
        ):
            js = f"(...values) => {keeps}{values}"
            gr.on(events, None, every, js=js, api_visibility="private")
        page.load(
            restore,
            [kept, kept_values, session],
            [transcript, kept, *every],
            js=KEPT,
            **QUICK,
        )
        page.unload(leave)
    return page


def launch(page: gr.Blocks, host: str, allowed: Iterable[str] = (), **options: Any) -> str:
    """Serve the page, without anything that would leave this machine; the page's address.

    ``host`` is the address to listen on, ``allowed`` are further names that the page may be asked
    for by. Raises OSError when the port is taken.
    """
    # Gradio asks its own server whether it is up; a proxy must not come between the two.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    theme = gr.themes.Base(
        primary_hue="emerald", neutral_hue="zinc", font=SANS, font_mono=MONO, radius_size="md"
    )
    _, url, _ = page.launch(
        server_name=host,
        theme=theme,
        css=_text("page.css"),
        head="".join(f"<script>{_text(name)}</script>" for name in IN_HEAD),
        footer_links=[],
        share=False,
        show_error=True,
        quiet=True,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(Guard, names=Names(host, allowed))]},
        **options,
    )
    return str(url)


def _text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _tab_id(request: gr.Request) -> str:
    return str(request.session_hash)
