"""Messages between the page and the engine: requests, status and events.

Frozen dataclasses of strings, numbers, tuples and mappings, so that the engine could run in another
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculation.engine import DEFAULT_METHOD
from speculation.registry import default_model

Value = bool | int | float | str


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method. The default also gives the type."""

    name: str
    default: Value
    help: str


@dataclass(frozen=True)
class MethodInfo:
    """A method and its parameters."""

    name: str
    title: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A model of models.txt, with the names of its draft model and drafting heads."""

    name: str
    description: str
    draft: str | None = None
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Which model to load, and how. Models are names from models.txt, paths or ``hf:…``."""

    model: str = field(default_factory=default_model)
    n_ctx: int = 0
    n_gpu_layers: int | None = None
    n_threads: int | None = None
    kv_type: str = "f16"
    flash_attn: str = "auto"
    draft_model: str | None = None
    heads: tuple[str, ...] = ()
    mtp: bool = True


@dataclass(frozen=True)
class LoadedModel:
    """The loaded model.

    load                  counts loads: speeds of different loads are not comparable
    has_thinking_switch   whether a request's ``thinking`` has an effect
    has_mtp               whether the model has multi-token prediction layers
    """

    spec: ModelSpec
    description: str
    n_ctx: int
    has_chat_template: bool
    load: int
    has_thinking_switch: bool = False
    has_mtp: bool = False


@dataclass(frozen=True)
class Status:
    """The loaded model, a load's progress, and why the last load failed."""

    model: LoadedModel | None = None
    loading: Loading | None = None
    error: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """The prompt leaves out the ``n_turns`` oldest turns to fit a context of ``n_ctx`` tokens."""

    n_turns: int = 0
    n_ctx: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to reply to. ``id`` is what ``stop`` takes.

    messages    ``{"role": "system" | "user" | "assistant", "content": "..."}``
    method      a method with its parameters as on the command line, ``lookahead:window=5``
    sampling    fields of SamplingParams; missing ones keep their defaults
    max_tokens  None: until the context is full
    thinking    whether to reason before the answer, if the model supports it; None: its default
    leave_out   whether to leave out the oldest turns if not all fit
    left_out    what the previous request left out
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    method: str = DEFAULT_METHOD
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    thinking: bool | None = None
    leave_out: bool = True
    left_out: LeftOut = LeftOut()


@dataclass(frozen=True)
class Waiting:
    """``n_ahead`` other jobs run first; ``loading`` if one of them loads a model."""

    n_ahead: int
    loading: bool = False


@dataclass(frozen=True)
class Loading:
    """A load's progress.

    stage  ``download`` (``done`` and ``total`` in bytes), ``load`` (in percent), then ``measure``
           (of the steps' cost, without progress)
    """

    model: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """The end of a successful load."""

    model: LoadedModel


@dataclass(frozen=True)
class Prefill:
    """Progress of the prompt: ``done`` of ``total`` tokens are decoded."""

    done: int
    total: int


@dataclass(frozen=True)
class Opening:
    """The reply starts with reasoning, whose opening mark is in the prompt."""

    mark: str


@dataclass(frozen=True)
class Text:
    """More text: for each token, the characters it completed and whether it was drafted."""

    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Done:
    """The end of a reply, with its counters, which ``speculation.stats`` explains.

    finish_reason  ``stop``, ``length``, ``context`` or ``cancelled``
    """

    finish_reason: str
    method: str = ""
    model: LoadedModel | None = None
    n_prompt: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    n_first: int = 0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The end of a failed job; ``message`` is for the user."""

    message: str


Event = Waiting | Loading | Loaded | LeftOut | Prefill | Opening | Text | Done | Failed
