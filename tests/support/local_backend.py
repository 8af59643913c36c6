"""A backend whose engine runs in the tests' own process."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from app.worker.backend import known_methods, known_models
from app.worker.events import Events
from app.worker.loading import Job
from app.worker.messages import (
    ChatRequest,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Question,
    Report,
    Status,
)
from app.worker.serving import Serving


class LocalBackend:
    """As ``RemoteBackend``, without a process."""

    def __init__(self, *, trace_batches: Path | None = None, memory: Path | None = None) -> None:
        self.serving = Serving(trace_batches=trace_batches, memory=memory)
        self._jobs: list[tuple[str, Job]] = []
        self._lock = Lock()  # held while a request that may be stopped is added

    def methods(self) -> tuple[MethodInfo, ...]:
        return known_methods()

    def models(self) -> tuple[ModelInfo, ...]:
        return known_models()

    def status(self) -> Status:
        return self.serving.status

    def report(self) -> Report:
        return self.serving.report()

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        return self._started(spec, request_id)

    def reply(self, request: ChatRequest) -> Events:
        return self._started(request, request.id)

    def ask(self, question: Question) -> Events:
        return self._started(question)

    def _started(self, message: Any, request_id: str = "") -> Events:
        events = Events(lambda: self.serving.cancel(job))
        with self._lock:
            job = self.serving.take_in(message, events.put)
            self._jobs.append((request_id, job))
        return events

    def stop(self, request_id: str) -> None:
        with self._lock:
            found = [job for id_, job in self._jobs if id_ == request_id]
        for job in found:
            self.serving.cancel(job)

    def close(self) -> bool:
        return self.serving.close()
