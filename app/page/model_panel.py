"""The Model section of the drawer: which model, draft model and heads to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from pathlib import Path
from threading import Thread
from typing import Any

import gradio as gr

from app.page.fields import PRIVATE
from app.worker.backend import Backend
from app.worker.messages import ModelSpec
from speculation.registry import PAIRED, ModelEntry

LOAD = "page/load"  # as a request; a new load stops the one before it


class ModelPanel:
    """Fields for a model, its draft model and its heads, and the Load button.

    What comes of a load is in the server's status, which all pages show.
    """

    def __init__(self, backend: Backend, spec: ModelSpec) -> None:
        self._backend = backend
        self._spec = spec  # what the fields do not say

    def show(self) -> None:
        """Make the fields in the current Gradio block, with the values of the loaded model."""
        infos = {info.name: info for info in self._backend.models()}
        loaded = self._backend.status().model
        spec = self._spec if loaded is None else loaded.spec
        info = infos.get(spec.model) or ModelEntry(spec.model, Path(spec.model), None, "")
        draft = info.draft if spec.draft_model == PAIRED else spec.draft_model
        heads = list(info.heads if spec.heads == (PAIRED,) else spec.heads)
        model = gr.Dropdown(
            list(infos),
            value=spec.model,
            allow_custom_value=True,
            interactive=True,
            label="Model",
            info="--model: a name in models.txt, a GGUF's path, or hf:owner/repository/file.gguf",
            elem_id="model-field",
        )
        note = gr.HTML(_note(info), apply_default_css=False, elem_id="model-note")
        draft_model = gr.Dropdown(
            [("None", ""), *((name, name) for name in infos)],
            value=draft or "",
            allow_custom_value=True,
            interactive=True,
            label="Draft model",
            info="--draft-model: a smaller model of the same family, for draft and auto",
            elem_id="draft-model",
        )
        head_files = gr.Dropdown(
            [name for one in infos.values() for name in one.heads],
            value=heads,
            multiselect=True,
            allow_custom_value=True,
            interactive=True,
            label="Drafting heads",
            info="--heads: names or paths, one per method, trained on this model",
            elem_id="heads",
        )
        n_ctx = gr.Number(
            spec.n_ctx,
            label="Context",
            info="--ctx: in tokens; 0: the model's own, up to 8192",
            precision=0,
            interactive=True,
            elem_id="ctx",
        )
        with gr.Row():
            load = gr.Button("Load", variant="primary", size="sm", min_width=0, elem_id="load")
            cancel = gr.Button("Cancel", size="sm", min_width=0, elem_id="cancel")

        def follow(name: str, draft: str, heads: Sequence[str]) -> tuple[Any, Any, Any]:
            return self.follow(infos, name, draft, heads)

        model.input(
            follow, [model, draft_model, head_files], [note, draft_model, head_files], **PRIVATE
        )
        load.click(self.load, [model, draft_model, head_files, n_ctx], None, **PRIVATE)
        cancel.click(self.cancel, None, None, **PRIVATE)

    @staticmethod
    def follow(
        infos: dict[str, ModelEntry], name: str, draft: str, heads: Sequence[str]
    ) -> tuple[Any, Any, Any]:
        """The note, draft model and heads after the choice of another model.

        Draft models and heads fit only one model. If the old model had any, the new one gets those
        paired with it.
        """
        typed = _typed(name)
        info = infos.get(typed) or ModelEntry(typed, Path(typed), None, "")
        return (
            _note(info),
            gr.update(value=(info.draft or "") if draft else ""),
            gr.update(value=list(info.heads) if heads else []),
        )

    def load(self, name: str, draft: str, heads: Sequence[str], n_ctx: float) -> None:
        """Begin to load; the load goes on whether or not a page shows it."""
        wanted = dataclasses.replace(
            self._spec,
            model=_typed(name),
            draft_model=_typed(draft) or None,
            heads=tuple(map(_typed, heads or ())),
            n_ctx=int(n_ctx or 0),
        )
        self.cancel()
        events = self._backend.load(wanted, LOAD)
        Thread(target=lambda: list(events), name="load", daemon=True).start()

    def cancel(self) -> None:
        """Stop the load that a page began, if any."""
        self._backend.stop(LOAD)


def _note(info: ModelEntry) -> str:
    """A model's description in models.txt, and what is paired with it there."""
    parts = [info.description] if info.description else []
    if info.draft:
        parts.append(f"draft model: {info.draft}")
    if info.heads:
        parts.append(f"drafting heads: {', '.join(info.heads)}")
    return f'<p class="quiet">{escape("; ".join(parts))}</p>' if parts else ""


def _typed(name: str | None) -> str:
    """A typed name or path without quotes, which Windows puts around copied paths."""
    return (name or "").strip().strip('"')
