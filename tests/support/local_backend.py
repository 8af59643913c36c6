"""A backend whose engine runs in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

from app.worker.backend import known_methods, known_models
from app.worker.events import Events
from app.worker.loading import Task
from app.worker.messages import (
    ChatRequest,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Question,
    Report,
    Status,
)
from app.worker.serving import PassOn, Serving


class LocalBackend:
    """As ``RemoteBackend``, without a process."""

    def __init__(self, *, trace_batches: Path | None = None, memory: Path | None = None) -> None:
        self.serving = Serving(trace_batches=trace_batches, memory=memory)
        self._tasks: list[tuple[str, Task]] = []
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
        return self._started(request_id, partial(self.serving.load, spec))

    def reply(self, request: ChatRequest) -> Events:
        return self._started(request.id, partial(self.serving.reply, request))

    def ask(self, question: Question) -> Events:
        return self._started("", partial(self.serving.ask, question))

    def _started(self, request_id: str, start: Callable[[PassOn], Task]) -> Events:
        events = Events(lambda: self.serving.cancel(task))
        with self._lock:
            task = start(events.put)
            self._tasks.append((request_id, task))
        return events

    def stop(self, request_id: str) -> None:
        with self._lock:
            found = [task for id_, task in self._tasks if id_ == request_id]
        for task in found:
            self.serving.cancel(task)

    def close(self) -> bool:
        return self.serving.close()
