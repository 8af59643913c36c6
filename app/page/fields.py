"""The settings in the drawer: Gradio fields for the JSON that ``settings.py`` reads.

They are made from the parameters of the method and the fields of ``SamplingParams``. The values
live in the browser (settings.js): each field only tells it of a change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import gradio as gr

from app.page.settings import RANDOM, Settings
from app.worker.backend import MethodInfo
from speculation.sampling import SamplingParams

# The sampling settings that have a field: its label, and more.
_OFTEN = {
    "temperature": ("Temperature", "0: always the most likely token"),
    "top_k": ("Likeliest tokens to choose from", "0: all"),
    "top_p": ("Their probability together", "1: all"),
    "min_p": ("Least probability, in shares of the likeliest token's", "0: any"),
    "repeat_penalty": ("Penalty for repeated tokens", "a factor; 1: off"),
    "presence_penalty": ("Penalty for tokens that were there", "0: off"),
    "seed": ("Seed", f"{RANDOM}: a new one for each reply"),
}
_MORE = {
    "frequency_penalty": ("Penalty for each time they were there", "0: off"),
    "penalty_last_n": ("Tokens that penalties look back", "-1: all"),
    "typical_p": ("Probability of typical tokens together", "1: all"),
    "xtc_probability": ("How often the likeliest tokens are left out", "0: never"),
    "xtc_threshold": ("Least probability of those", ""),
    "dry_multiplier": ("Penalty for repeated sequences", "0: off"),
    "dry_base": ("Its growth with each token", "a factor"),
    "dry_allowed_length": ("Length of sequences that may repeat", "in tokens"),
    "mirostat": ("Mirostat, which holds the surprise of tokens", "0: off; 1 or 2"),
    "mirostat_tau": ("The surprise that it aims at", ""),
    "mirostat_eta": ("How fast it gets there", ""),
    "grammar": ("Grammar", "In GBNF."),
    "json_schema": ("JSON schema", "The reply is held to it."),
}
_ENDS = {"temperature": 2, "top_p": 1, "min_p": 1, "typical_p": 1}  # of sliders
_USUAL = {one.name: one.default for one in fields(SamplingParams)} | {
    "seed": RANDOM,
    "grammar": "",
    "json_schema": "",
}


class Fields:
    """Makes fields that show ``settings``; ``sampling`` is the model's usual one."""

    def __init__(self, settings: Mapping[str, Any], sampling: Mapping[str, float]) -> None:
        self._settings = settings
        self._usual = {**_USUAL, **sampling}

    def add(self, name: str, usual: Any, label: str, info: str = "", **options: Any) -> None:
        """A field for a setting, by its path in the JSON; ``usual`` is the value that the setting
        has if it is not given."""
        value: Any = self._settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        kind: Any
        if "choices" in options:
            kind, fits = gr.Radio, value in [choice for _, choice in options["choices"]]
        elif isinstance(usual, bool):
            kind, fits = gr.Checkbox, isinstance(value, bool)
        elif isinstance(usual, int | float):
            kind = gr.Slider if "maximum" in options else gr.Number
            fits = isinstance(value, int | float) and math.isfinite(value)
            if isinstance(usual, int):
                options["precision"] = 0
        else:
            kind, fits = gr.Textbox, isinstance(value, str)
        shown = value if fits else usual
        options |= {"label": label, "info": info or None, "elem_id": f"field-{name}"}
        field = kind(value=shown, interactive=True, **options)
        js = f"(value) => page.set({json.dumps(name)}, value, {json.dumps(usual)})"
        field.input(
            None, [field], js=js, queue=False, show_progress="hidden", api_visibility="private"
        )

    def add_sampling(self, told: Mapping[str, tuple[str, str]]) -> None:
        for name, (label, info) in told.items():
            options: dict[str, Any] = {}
            if name in _ENDS:
                options = {"minimum": 0, "maximum": _ENDS[name], "step": 0.01}
            elif isinstance(self._usual[name], str):
                options = {"lines": 2, "max_lines": 12}
            self.add(f"sampling.{name}", self._usual[name], label, f"{info} ({name})", **options)


def settings_fields(
    settings: Mapping[str, Any],
    methods: tuple[MethodInfo, ...],
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """All fields but those of the model, in the current Gradio block."""
    fields = Fields(settings, sampling)
    name = str(settings.get("method", "")).partition(":")[0]
    method = next((info for info in methods if info.name == name), None)
    if method is not None and method.parameters:
        with gr.Accordion(f"Parameters of {method.title}", open=False):
            for one in method.parameters:
                label, *more = re.split(r"(?<=.{8})[;:] ", one.help or one.name, maxsplit=1)
                info = " ".join([*more, f"({one.name})"])
                label = label[:1].upper() + label[1:]
                fields.add(f"parameters.{one.name}", one.default, label, info)
    fields.add(
        "thinking",
        None,
        "Reasoning",
        "Whether the model reasons before it answers.",
        choices=[("default", None), ("on", True), ("off", False)],
    )
    told = "What the model should know or be in this chat."
    fields.add("system", "", "System prompt", told, lines=2, max_lines=12)
    with gr.Accordion("Sampling", open=False):
        told = "0: until the model ends or the context is full"
        fields.add("max_tokens", Settings.max_tokens, "Most tokens of a reply", told)
        fields.add(
            "leave_out",
            True,
            "When the context is full",
            choices=[("leave out the oldest turns", True), ("stop", False)],
        )
        fields.add_sampling(_OFTEN)
        with gr.Accordion("More", open=False):
            fields.add_sampling(_MORE)
