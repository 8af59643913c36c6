"""The settings in the drawer: Gradio fields for the JSON that ``settings.py`` reads.

A method's fields are made from its parameters, so a new method needs no code here. The values live
in the browser (settings.js): each field only tells it of a change, and nothing asks the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import gradio as gr

from app.page.settings import MAX_TOKENS, RANDOM
from app.worker.backend import MethodInfo, Parameter

PRIVATE: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}


class Fields:
    """Makes fields that show ``settings``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def add(self, name: str, usual: Any, kind: Any, label: str, **options: Any) -> None:
        """A field of Gradio's class ``kind`` for a setting, by its path in the JSON; ``usual`` is
        the value that the setting has if it is not given."""
        value: Any = self._settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if kind is gr.Radio:
            fits = value in [choice for _, choice in options["choices"]]
        elif isinstance(usual, bool | str):
            fits = type(value) is type(usual)
        else:
            fits = isinstance(value, int | float) and math.isfinite(value)
        if not fits:
            value = usual
        field = kind(value=value, label=label, interactive=True, **options)
        js = f"(value) => page.set({json.dumps(name)}, value, {json.dumps(usual)})"
        field.input(None, [field], js=js, **PRIVATE)

    def number(self, name: str, usual: float, label: str, info: str | None = None) -> None:
        precision = 0 if isinstance(usual, int) else None
        self.add(name, usual, gr.Number, label, info=info, precision=precision)

    def share(self, name: str, usual: float, label: str, info: str | None = None) -> None:
        self.add(name, usual, gr.Slider, label, info=info, minimum=0, maximum=1, step=0.01)

    def lines(self, name: str, label: str, info: str | None = None) -> None:
        self.add(name, "", gr.Textbox, label, info=info, lines=2, max_lines=12)


def settings_fields(settings: Mapping[str, Any], methods: tuple[MethodInfo, ...]) -> None:
    """All fields but those of the model, in the current Gradio block."""
    fields = Fields(settings)
    name = str(settings.get("method", "")).partition(":")[0]
    method = next((info for info in methods if info.name == name), None)
    if method is not None and method.parameters:
        with gr.Accordion(f"Parameters of {method.title}", open=False):
            for parameter in method.parameters:
                _parameter(fields, parameter)
    fields.add(
        "thinking",
        None,
        gr.Radio,
        "Reasoning",
        choices=[("default", None), ("on", True), ("off", False)],
        info="Whether the model reasons before it answers.",
        elem_id="thinking",
    )
    fields.lines("system", "System prompt", "What the model should know or be in this chat.")
    with gr.Accordion("Sampling", open=False):
        _sampling(fields)


def _parameter(fields: Fields, parameter: Parameter) -> None:
    name, usual = f"parameters.{parameter.name}", parameter.default
    label, info = parameter.name.replace("_", " "), parameter.help or None
    if isinstance(usual, bool):
        fields.add(name, usual, gr.Checkbox, label, info=info)
    elif isinstance(usual, int | float):
        fields.number(name, usual, label, info)
    else:
        fields.add(name, usual, gr.Textbox, label, info=info, max_lines=1)


def _sampling(fields: Fields) -> None:
    """Fields with the names and defaults of SamplingParams, but a random seed."""
    fields.add(
        "sampling.temperature",
        0.0,
        gr.Slider,
        "Temperature",
        info="0: always the most likely token",
        minimum=0,
        maximum=2,
        step=0.01,
    )
    fields.number("max_tokens", MAX_TOKENS, "Max tokens", "0: until the context is full")
    fields.add(
        "leave_out",
        True,
        gr.Radio,
        "When the context is full",
        choices=[("leave out the oldest turns", True), ("stop", False)],
    )
    fields.number("sampling.top_k", 0, "Top k", "0: off")
    fields.share("sampling.top_p", 1.0, "Top p", "1: off")
    fields.share("sampling.min_p", 0.0, "Min p", "0: off")
    fields.number("sampling.repeat_penalty", 1.0, "Repeat penalty", "1: off")
    fields.number("sampling.presence_penalty", 0.0, "Presence penalty", "0: off")
    fields.number("sampling.seed", RANDOM, "Seed", f"{RANDOM}: a new one for each reply")
    with gr.Accordion("More", open=False):
        fields.number("sampling.frequency_penalty", 0.0, "Frequency penalty", "0: off")
        fields.number("sampling.penalty_last_n", 64, "Penalty range", "in tokens; -1: all")
        fields.share("sampling.typical_p", 1.0, "Typical p", "1: off")
        fields.share("sampling.xtc_probability", 0.0, "XTC probability", "0: off")
        fields.share("sampling.xtc_threshold", 0.1, "XTC threshold")
        fields.number("sampling.dry_multiplier", 0.0, "DRY multiplier", "0: off")
        fields.number("sampling.dry_base", 1.75, "DRY base")
        fields.number("sampling.dry_allowed_length", 2, "DRY allowed length", "in tokens")
        fields.add(
            "sampling.mirostat",
            0,
            gr.Radio,
            "Mirostat",
            choices=[("off", 0), ("1", 1), ("2", 2)],
        )
        fields.number("sampling.mirostat_tau", 5.0, "Mirostat tau")
        fields.number("sampling.mirostat_eta", 0.1, "Mirostat eta")
        fields.lines("sampling.grammar", "Grammar (GBNF)")
        fields.lines("sampling.json_schema", "JSON schema", "The reply is held to it.")
