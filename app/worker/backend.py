"""The interface to the engine for the page and the endpoint: knows nothing of processes or HTTP."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, Protocol, cast

from app.worker.events import Events
from app.worker.messages import (
    ChatRequest,
    Event,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Parameter,
    Question,
    Report,
    Status,
    Value,
)
from speculation.methods import METHODS, parameter_docs
from speculation.registry import RegistryError, read_registry

log = logging.getLogger(__name__)


class Backend(Protocol):
    """The page's interface to an engine."""

    def methods(self) -> tuple[MethodInfo, ...]: ...

    def models(self) -> tuple[ModelInfo, ...]: ...

    def status(self) -> Status: ...

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        """Replace the model. Yields Waiting, Loading, then Loaded or Failed.

        If it fails, the old model is restored.
        """
        ...

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        """Reply to a conversation.

        Yields Waiting, LeftOut, Opening, Prefill, Tokens, then Done or Failed. LeftOut comes only
        if it differs from the request's. Leaving the loop over them early stops the reply.
        """
        ...

    def stop(self, request_id: str) -> None:
        """Stop the request with this id within one step. Its iterator still yields a last event."""
        ...

    def close(self) -> bool:
        """Stop everything; return whether all has ended within a few seconds."""
        ...


class AsyncBackend(Backend, Protocol):
    """The endpoint's interface to an engine: its events can also be taken in an event loop.

    ``status`` and ``report`` are what the engine has published; they wait for nothing.
    """

    def report(self) -> Report: ...

    def load(self, spec: ModelSpec, request_id: str = "") -> Events: ...

    def reply(self, request: ChatRequest) -> Events: ...

    def ask(self, question: Question) -> Events:
        """Answer a question. Yields Answer or Failed."""
        ...


def known_methods() -> tuple[MethodInfo, ...]:
    """All methods."""
    return tuple(
        MethodInfo(kind.name, kind.title, _parameters(kind.params)) for kind in METHODS.values()
    )


def known_models() -> tuple[ModelInfo, ...]:
    """The models of models.txt."""
    try:
        entries = read_registry().values()
        return tuple(
            ModelInfo(e.name, e.description, e.draft, e.heads) for e in entries if not e.is_heads
        )
    except RegistryError as error:
        log.warning("%s", error)
        return ()


def _parameters(params: type[Any]) -> tuple[Parameter, ...]:
    """The fields of a method's dataclass, with their help from its docstring."""
    helps = parameter_docs(params)
    return tuple(
        Parameter(item.name, cast("Value", item.default), helps[item.name])
        for item in dataclasses.fields(params)
    )
