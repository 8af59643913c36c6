"""A backend whose engine runs in the tests' own process."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from app.worker.backend import Backend
from app.worker.events import Events
from app.worker.messages import (
    ChatRequest,
    ModelSpec,
    Question,
    Report,
    Status,
)
from app.worker.serving import Serving


class LocalBackend(Backend):
    """As ``RemoteBackend``, without a process."""

    def __init__(self, *, trace_batches: Path | None = None, memory: Path | None = None) -> None:
        self.serving = Serving(self._take, trace_batches=trace_batches, memory=memory)
        self._requests: list[tuple[str, Events]] = []  # by number
        self._lock = Lock()

    def _take(self, number: int, message: Any) -> None:
        if number:
            self._requests[number - 1][1].put(message)

    def status(self) -> Status:
        return self.serving.status

    def report(self) -> Report:
        return self.serving.report()

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        return self.started(spec, request_id)

    def reply(self, request: ChatRequest) -> Events:
        return self.started(request, request.id)

    def ask(self, question: Question) -> Events:
        return self.started(question)

    def started(self, message: Any, request_id: str = "", body: bytes = b"") -> Events:
        """The events of a request; ``body`` stands for its written form."""
        with self._lock:
            number = len(self._requests) + 1
            events = Events(lambda: self.serving.cancel(number))
            self._requests.append((request_id, events))
        self.serving.take_in(number, message, body)
        return events

    def stop(self, request_id: str) -> None:
        for id_, events in list(self._requests):
            if id_ == request_id:
                events.close()

    def close(self) -> bool:
        return self.serving.close()
