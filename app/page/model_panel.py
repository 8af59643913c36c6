"""The Model section of the sidebar: choose and load a model, its draft model and drafting heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import gradio as gr

from app.page.conversation import waiting_notice
from app.page.events import QUICK, SLOW
from app.page.render import error_html, notice_html
from app.worker.backend import Backend
from app.worker.messages import Failed, LoadedModel, Loading, ModelSpec, Status, Waiting
from speculation.registry import PAIRED, ModelEntry

LONGEST_ERROR = 160  # characters in the header; the whole error is shown below Load
UPDATE_SECONDS = 0.3  # between updates of a load's progress


class ModelPanel:
    """Fields for a model, its draft model and its heads, and the Load button."""

    def __init__(self, backend: Backend, spec: ModelSpec) -> None:
        """Create the fields in the current Gradio block; ``spec`` gives their initial values."""
        self._backend = backend
        self._spec = spec
        self._infos = {info.name: info for info in backend.models()}
        model, draft, heads, n_ctx = self._values(spec)
        known_heads = [name for info in self._infos.values() for name in info.heads]
        self._model = gr.Dropdown(
            list(self._infos),
            value=model,
            allow_custom_value=True,
            label="Model",
            info="A name from models.txt, a path to a GGUF, or hf:owner/repository/file.gguf",
            elem_id="model",
        )
        self._note = gr.HTML(self._describe(model), apply_default_css=False, elem_id="model-note")
        self._draft = gr.Dropdown(
            [("None", ""), *((name, name) for name in self._infos)],
            value=draft,
            allow_custom_value=True,
            label="Draft model",
            info="A smaller model of the same family, for the methods draft model and auto",
            elem_id="draft-model",
        )
        self._heads = gr.Dropdown(
            known_heads,
            value=heads,
            multiselect=True,
            allow_custom_value=True,
            label="Drafting heads",
            info="Names or paths, one per method, trained on this model",
            elem_id="heads",
        )
        self._n_ctx = gr.Number(
            n_ctx,
            label="Context",
            info="In tokens; 0: the model's own, up to 8192",
            precision=0,
            elem_id="ctx",
        )
        self.context_note = gr.HTML(
            context_note_html(backend.status()), apply_default_css=False, elem_id="ctx-note"
        )
        self._load = gr.Button("Load", variant="primary", size="sm", elem_id="load")
        self._cancel = gr.Button("Cancel", size="sm", visible=False, elem_id="cancel")
        self._load_note = gr.HTML(apply_default_css=False, elem_id="load-note")

    def wire(self, page: gr.Blocks, header: gr.HTML) -> None:
        """Connect the events of the fields, and of the ``header``, which shows the status."""
        self._model.input(
            self.follow,
            [self._model, self._draft, self._heads],
            [self._note, self._draft, self._heads],
            **QUICK,
        )
        self._load.click(
            self._run,
            [self._model, self._draft, self._heads, self._n_ctx],
            [self._load, self._cancel, self._load_note, header, self.context_note],
            **SLOW,
        )
        self._cancel.click(self.stop, **QUICK)
        page.load(self._watch, outputs=[header, self.context_note], **SLOW)
        page.load(
            self._as_loaded,
            outputs=[self._note, self._model, self._draft, self._heads, self._n_ctx],
            **QUICK,
        )

    def stop(self, request: gr.Request) -> None:
        """Cancel the load that this tab started, if any."""
        self._backend.stop(_load_id(request))

    def _info(self, name: str) -> ModelEntry:
        return self._infos.get(name) or ModelEntry(name, Path(name), None, "")

    def _describe(self, name: str) -> str:
        """A model's description in models.txt, and what is paired with it there."""
        info = self._info(name)
        parts = [info.description] if info.description else []
        if info.draft:
            parts.append(f"draft model: {info.draft}")
        if info.heads:
            parts.append(f"drafting heads: {', '.join(info.heads)}")
        return notice_html("; ".join(parts))

    def follow(self, name: str, draft: str, heads: Sequence[str]) -> tuple[str, Any, Any]:
        """Handle the choice of another model: its description, draft model and heads.

        Draft models and heads fit only one model. If the old model had any, the new one gets those
        paired with it.
        """
        info = self._info(_typed(name))
        return (
            self._describe(info.name),
            gr.update(value=(info.draft or "") if draft else ""),
            gr.update(value=list(info.heads) if heads else []),
        )

    def _run(
        self, name: str, draft: str, heads: Sequence[str], cells: float, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        wanted = dataclasses.replace(
            self._spec,
            model=_typed(name),
            draft_model=_typed(draft) or None,
            heads=tuple(map(_typed, heads or ())),
            n_ctx=int(cells or 0),
        )
        # Every update is complete: the client may merge the first ones and lose one.
        hidden, seen = gr.update(visible=False), gr.update(visible=True)
        yield hidden, seen, "", *self.status()
        note, due = "", 0.0
        for event in self._backend.load(wanted, _load_id(request)):
            if isinstance(event, Waiting):
                note = notice_html(waiting_notice(event))
            elif isinstance(event, Loading):
                if monotonic() < due:  # the browser would fall behind
                    continue
                note = notice_html(loading_notice(event))
                due = monotonic() + UPDATE_SECONDS
            else:
                note = error_html(event.message) if isinstance(event, Failed) else ""
            yield hidden, seen, note, *self.status()
        for status in self._watch():  # another tab may have started a load
            yield seen, hidden, note, *status

    def status_html(self) -> str:
        return status_html(self._backend.status())

    def status(self) -> tuple[str, str]:
        """HTML for the header, and for the note below the Context field."""
        status = self._backend.status()
        return status_html(status), context_note_html(status)

    def _as_loaded(self) -> tuple[Any, ...]:
        """Values of the fields for the loaded model, which another tab may have chosen."""
        loaded = self._backend.status().model
        if loaded is None:
            return (gr.skip(),) * 5
        return self._describe(loaded.spec.model), *self._values(loaded.spec)

    def _values(self, spec: ModelSpec) -> tuple[str, str, list[str], int]:
        """Values of the fields for ``spec``: model, draft model, heads and context."""
        paired = self._info(spec.model)
        draft = paired.draft if spec.draft_model == PAIRED else spec.draft_model
        heads = paired.heads if spec.heads == (PAIRED,) else spec.heads
        return spec.model, draft or "", list(heads), spec.n_ctx

    def _watch(self) -> Iterator[tuple[str, str]]:
        """Yield the status until no model is loading."""
        while self._backend.status().loading is not None:
            yield self.status()
            sleep(UPDATE_SECONDS)
        yield self.status()


def _typed(name: str | None) -> str:
    """A typed name or path without quotes, which Windows puts around copied paths."""
    return (name or "").strip().strip('"')


def status_html(status: Status) -> str:
    """The loaded model, a load's progress, or why the last load failed."""
    parts = []
    if status.model is not None:
        name = Path(status.model.spec.model).name
        thinks = " data-thinks" if status.model.has_thinking_switch else ""
        parts.append(f"<b{thinks}>{escape(name)}</b> <span>{escape(_details(status.model))}</span>")
    if status.loading is not None:
        parts.append(notice_html(loading_notice(status.loading)))
    elif status.error is not None:
        parts.append(error_html(status.error if status.model is None else _short(status.error)))
    return "".join(parts) or notice_html("No model is loaded")


def _short(error: str) -> str:
    """An error's first line, cut to LONGEST_ERROR characters."""
    line = error.partition("\n")[0]
    return line if len(line) <= LONGEST_ERROR else f"{line[: LONGEST_ERROR - 1].rstrip()}…"


def context_note_html(status: Status) -> str:
    """The context's actual size, which may differ from the requested one."""
    return notice_html(f"In effect: {status.model.n_ctx} tokens") if status.model else ""


def loading_notice(event: Loading) -> str:
    if event.stage == "download":
        return f"Downloading {event.model}: {event.done / 1e9:.2f} of {event.total / 1e9:.2f} GB"
    if event.stage == "measure":
        return f"Measuring the speed of {event.model}"
    return f"Loading {event.model}: {event.done} %"


def _details(model: LoadedModel) -> str:
    parts = [model.description, f"context {model.n_ctx}"]
    if model.placed:
        parts.append(model.placed)
    if model.spec.draft_model is not None:
        draft = model.spec.draft_model
        parts.append("with its draft model" if draft == PAIRED else f"draft {Path(draft).name}")
    if model.spec.heads:
        parts.append("with drafting heads")
    if model.has_mtp:
        parts.append("multi-token prediction (MTP)")
    if not model.has_chat_template:
        parts.append("no chat template: continues a plain transcript")
    return " · ".join(parts)


def _load_id(request: gr.Request) -> str:
    return f"{request.session_hash}/load"
