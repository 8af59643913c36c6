"""The settings in the sidebar: Gradio fields, and the ``Settings`` that their values mean.

A method's fields are made from its parameters, so a new method needs no code here.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

import gradio as gr

from app.page.conversation import Settings
from app.page.events import QUICK
from app.worker.backend import MethodInfo, Parameter
from speculation.drafter import BASELINE
from speculation.settings import DEFAULT_METHOD

MAX_TOKENS = 1024
RANDOM = -1  # as a seed: a new one for each reply
N_SEEDS = 2**32 - 1


class Fields:
    """The fields by name.

    components   all fields, whose values the browser saves
    for_replies  the fields that a reply depends on
    defaults     each field's value without command-line flags
    given        names of the fields set by flags, which remembered values do not change
    """

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self.for_replies: list[Any] = []
        self.defaults: dict[str, Any] = {}
        self.given: set[str] = set()
        self._names: list[str] = []  # of ``for_replies``

    def add(self, name: str, component: Any, default: Any = None) -> Any:
        """Add a field that a reply depends on; ``default`` is by default the component's value."""
        self._names.append(name)
        self.for_replies.append(component)
        return self.add_other(name, component, default)

    def add_other(self, name: str, component: Any, default: Any = None) -> Any:
        """Add a field that no reply depends on."""
        self.components[name] = component
        self.defaults[name] = component.value if default is None else default
        return component

    def read(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The values of ``for_replies`` by name."""
        return dict(zip(self._names, values, strict=True))

    def updates(self, saved: str) -> dict[Any, Any]:
        """Updates by component for the values that the browser saved (``savedValues`` in tab.js).

        ``saved`` is JSON: values by name, under ``tab`` if they are this tab's own, under
        ``browser`` if they are remembered from an earlier tab. Unknown names and invalid values
        are ignored.
        """
        try:
            data = json.loads(saved or "{}")
        except ValueError:
            return {}
        if not isinstance(data, dict):
            return {}
        values, skipped = data.get("tab"), set[str]()
        if values is None:
            values, skipped = data.get("browser"), self.given
        if not isinstance(values, dict):
            return {}
        return {
            component: gr.update(value=_within(component, values[name]))
            for name, component in self.components.items()
            if name in values and name not in skipped and _fits(component, values[name])
        }


def _fits(component: Any, value: Any) -> bool:
    """Whether a value from JSON is valid for a component."""
    if isinstance(component, gr.Checkbox):
        return isinstance(value, bool)
    if isinstance(component, gr.Dropdown | gr.Radio):
        # The types must agree too, because 1 == True.
        return any(type(value) is type(one) and value == one for _, one in component.choices)
    if isinstance(component, gr.Slider):
        return _is_number(value)
    if isinstance(component, gr.Number):
        return value is None or (
            _is_number(value) and (component.precision != 0 or value == int(value))
        )
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _within(component: Any, value: Any) -> Any:
    """The value, or the nearest one in a slider's range: a half-typed number may lie outside."""
    if isinstance(component, gr.Slider):
        return min(max(value, component.minimum), component.maximum)
    return value


def read_settings(values: Mapping[str, Any], methods: tuple[MethodInfo, ...]) -> Settings:
    """The settings that the fields' values mean. Empty fields keep their defaults."""
    sampling = {
        name.removeprefix("sampling."): value
        for name, value in values.items()
        if name.startswith("sampling.") and value is not None and str(value).strip()
    }
    if sampling.get("seed", RANDOM) == RANDOM:
        # Greedy decoding ignores the seed, so a fixed one lets equal requests compare equal.
        sampling["seed"] = random.randrange(N_SEEDS) if sampling.get("temperature") else 0
    name = values["method"]
    info = next(info for info in methods if info.name == name)
    changed = []
    for parameter in info.parameters:
        value = values[f"{name}.{parameter.name}"]
        if value not in (None, "") and value != parameter.default:
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            changed.append(f"{parameter.name}={shown}")
    return Settings(
        method=f"{name}:{','.join(changed)}" if changed else name,
        sampling=sampling,
        max_tokens=_whole(values["max_tokens"], MAX_TOKENS) or None,
        system=values["system"] or "",
        compare=values["compare"],
        thinking={"on": True, "off": False}.get(values["thinking"]),
        leave_out=values["leave_out"],
    )


def _whole(value: Any, default: int) -> int:
    return default if value is None else int(value)


def method_fields(fields: Fields, methods: tuple[MethodInfo, ...], flag: str | None = None) -> None:
    """The choice of method, and an accordion of parameters for each, of which one is visible.

    ``flag`` is the value of ``--method``, if given.
    """
    name, _, rest = (flag or DEFAULT_METHOD).partition(":")
    given = dict(item.split("=", 1) for item in rest.split(",") if "=" in item)
    choice = fields.add(
        "method",
        gr.Dropdown(
            [(_title(info), info.name) for info in methods],
            value=name,
            label="Method",
            filterable=False,
            elem_id="method",
        ),
        default=DEFAULT_METHOD,
    )
    groups = []
    for info in methods:
        shown = info.name == name
        with gr.Accordion(
            "Parameters", open=bool(shown and given), visible=shown and bool(info.parameters)
        ) as group:
            for parameter in info.parameters:
                value = given.get(parameter.name) if shown else None
                fields.add(
                    f"{info.name}.{parameter.name}",
                    _parameter_field(parameter, value),
                    default=parameter.default,
                )
        groups.append(group)
    if flag is not None:
        fields.given |= {field for field in fields.components if field.startswith(f"{name}.")}
        fields.given.add("method")

    def show(chosen: str) -> list[Any]:
        return [
            gr.update(visible=info.name == chosen and bool(info.parameters)) for info in methods
        ]

    choice.change(show, [choice], groups, **QUICK)


def _parameter_field(parameter: Parameter, given: str | None) -> Any:
    label = parameter.name.replace("_", " ")
    default, info = parameter.default, parameter.help or None
    if isinstance(default, bool):
        on = default if given is None else given.lower() in ("on", "true", "1")
        return gr.Checkbox(on, label=label, info=info)
    value = default if given is None else given
    if isinstance(default, int):
        return gr.Number(int(value), label=label, info=info, precision=0)
    if isinstance(default, float):
        return gr.Number(float(value), label=label, info=info)
    return gr.Textbox(str(value), label=label, info=info, max_lines=1)


def sampling_fields(fields: Fields) -> None:
    """Fields for sampling, with the names and defaults of SamplingParams, but a random seed."""

    def number(name: str, value: float, label: str, info: str | None = None) -> None:
        precision = 0 if isinstance(value, int) else None
        fields.add(
            f"sampling.{name}", gr.Number(value, label=label, info=info, precision=precision)
        )

    def slider(
        name: str, value: float, label: str, most: float = 1.0, info: str | None = None
    ) -> None:
        fields.add(f"sampling.{name}", gr.Slider(0, most, value, step=0.01, label=label, info=info))

    slider("temperature", 0.0, "Temperature", 2.0, "0: always the most likely token")
    fields.add(
        "max_tokens",
        gr.Number(MAX_TOKENS, label="Max tokens", info="0: until the context is full", precision=0),
    )
    fields.add(
        "leave_out",
        gr.Radio(
            [("leave out the oldest turns", True), ("stop", False)],
            value=True,
            label="When the context is full",
            elem_id="leave-out",
        ),
    )
    number("top_k", 0, "Top k", "0: off")
    slider("top_p", 1.0, "Top p", info="1: off")
    slider("min_p", 0.0, "Min p", info="0: off")
    number("repeat_penalty", 1.0, "Repeat penalty", "1: off")
    number("presence_penalty", 0.0, "Presence penalty", "0: off")
    number("seed", RANDOM, "Seed", f"{RANDOM}: a new one for each reply")
    with gr.Accordion("More", open=False):
        number("frequency_penalty", 0.0, "Frequency penalty", "0: off")
        number("penalty_last_n", 64, "Penalty range", "in tokens; -1: the whole context")
        slider("typical_p", 1.0, "Typical p", info="1: off")
        slider("xtc_probability", 0.0, "XTC probability", info="0: off")
        slider("xtc_threshold", 0.1, "XTC threshold")
        number("dry_multiplier", 0.0, "DRY multiplier", "0: off")
        number("dry_base", 1.75, "DRY base")
        number("dry_allowed_length", 2, "DRY allowed length", "in tokens")
        fields.add(
            "sampling.mirostat",
            gr.Radio([("off", 0), ("1", 1), ("2", 2)], value=0, label="Mirostat"),
        )
        number("mirostat_tau", 5.0, "Mirostat tau")
        number("mirostat_eta", 0.1, "Mirostat eta")
        for name, label, info in (
            ("grammar", "Grammar (GBNF)", None),
            ("json_schema", "JSON schema", "The reply is held to it."),
        ):
            box = gr.Textbox(label=label, info=info, lines=2, max_lines=12)
            fields.add(f"sampling.{name}", box)


def _title(info: MethodInfo) -> str:
    return f"{info.title} (plain decoding)" if info.name == BASELINE else info.title
