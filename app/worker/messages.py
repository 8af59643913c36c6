"""What crosses between the app and its engine: requests one way, events the other.

Frozen dataclasses of strings, numbers, tuples and mappings, so that the engine may live in another
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
    """A parameter of a method: its name, its default, which tells the type, and what it does."""

    name: str
    default: Value
    help: str


@dataclass(frozen=True)
class MethodInfo:
    """A method that can be chosen."""

    name: str
    title: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A line of models.txt, and the names of those that draft for it."""

    name: str
    description: str
    draft: str | None = None
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and how to load it. Models are names of models.txt, paths or ``hf:…``."""

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
    """The model in memory. ``load`` counts loads: speeds of different loads do not compare.

    has_thinking_switch  whether a request's ``thinking`` means anything to it
    has_mtp               whether it has layers of its own for multi-token prediction
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
    """What the backend is doing. ``loading`` and ``error`` concern the model."""

    model: LoadedModel | None = None
    loading: Loading | None = None
    error: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """So many of the first turns are not read: with them a context of ``n_ctx`` tokens is full."""

    n_turns: int = 0
    n_ctx: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to reply to. ``id`` is what ``stop`` takes.

    messages    ``{"role": "system" | "user" | "assistant", "content": "..."}``
    method      a method with its parameters as on the command line, ``lookahead:window=5``
    sampling    fields of SamplingParams; what is missing keeps its default
    max_tokens  None goes on to the end of the context
    thinking    whether to think before the answer, for models that can be told; None leaves it
    leave_out   whether the first turns are left out where not all of them fit
    left_out    those that were left out of the request before
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
    """Other jobs come first: ``n_ahead`` of them, with a model to load among them or not."""

    n_ahead: int
    loading: bool = False


@dataclass(frozen=True)
class Loading:
    """A model on its way: bytes while ``stage`` is ``download``, percent while it is ``load``; then
    comes ``measure``, of what its steps cost."""

    model: str
    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Loaded:
    """The end of a load that went well."""

    model: LoadedModel


@dataclass(frozen=True)
class Prefill:
    """The prompt is being read: ``done`` of ``total`` tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Opening:
    """The reply begins with reasoning, and the mark before them is not part of it."""

    mark: str


@dataclass(frozen=True)
class Text:
    """More text: for each token the characters it completed, and whether it was a draft."""

    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Done:
    """The end of a reply, with its counters; they mean what they mean in ``speculation.stats``.

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
    """The end of a job that did not go well; ``message`` is for the person who asked."""

    message: str


Event = Waiting | Loading | Loaded | LeftOut | Prefill | Opening | Text | Done | Failed
