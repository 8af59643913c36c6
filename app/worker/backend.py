"""The interface to the engine for the page and the endpoint: knows nothing of processes or HTTP."""

from __future__ import annotations

import dataclasses
from typing import Protocol, cast

from app.worker.events import Events
from app.worker.messages import ChatRequest, ModelSpec, Question, Report, Status
from speculation.methods import METHODS, parameter_docs

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a method. The default also gives the type."""

    name: str
    default: Value
    help: str


@dataclasses.dataclass(frozen=True)
class MethodInfo:
    """A method and its parameters."""

    name: str
    title: str
    parameters: tuple[Parameter, ...]


class Backend(Protocol):
    """An engine. ``status`` and ``report`` are what it has published; they wait for nothing."""

    def methods(self) -> tuple[MethodInfo, ...]:
        """All methods."""
        found = []
        for kind in METHODS.values():
            helps = parameter_docs(kind.params)
            parameters = [
                Parameter(one.name, cast("Value", one.default), helps[one.name])
                for one in dataclasses.fields(kind.params)
            ]
            found.append(MethodInfo(kind.name, kind.title, tuple(parameters)))
        return tuple(found)

    def status(self) -> Status: ...

    def report(self) -> Report: ...

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        """Replace the model. Yields Waiting, Loading, then Loaded or Failed.

        If it fails, the old model is restored.
        """
        ...

    def reply(self, request: ChatRequest) -> Events:
        """Reply to a conversation.

        Yields Waiting, LeftOut, Opening, Prefill, Tokens, then Done or Failed. LeftOut comes only
        if it differs from the request's. Leaving the loop over them early stops the reply.
        """
        ...

    def ask(self, question: Question) -> Events:
        """Answer a question. Yields Answer or Failed."""
        ...

    def stop(self, request_id: str) -> None:
        """Stop the request with this id within one step. Its iterator still yields a last event."""
        ...

    def close(self) -> bool:
        """Stop everything; return whether all has ended within a few seconds."""
        ...
