"""A backend that replays scripted events."""

from __future__ import annotations

from collections.abc import Iterable

from app.worker.backend import Backend, MethodInfo, Parameter
from app.worker.events import Events
from app.worker.messages import (
    LAST,
    ChatRequest,
    Done,
    Event,
    Failed,
    Loaded,
    LoadedModel,
    ModelSpec,
    Question,
    Report,
    Status,
)

MODEL = LoadedModel(ModelSpec("m.gguf"), "llama 7M", 2048, 1)
DONE = Done(
    "stop",
    "prompt-lookup",
    MODEL,
    n_prompt=228,
    n_tokens=84,
    n_first=4,
    n_steps=40,
    n_drafted=107,
    n_accepted=44,
    prefill_seconds=0.25,
    decode_seconds=1.0,
)


def played(events: Iterable[Event]) -> Events:
    """Events that have all come."""
    made = Events(lambda: None)
    last: Event | None = None
    for last in events:
        made.put(last)
    if not isinstance(last, LAST):
        made.put(Failed("The script is over."))
    return made


class FakeBackend(Backend):
    """Replays the script, one list of events per reply."""

    def __init__(self, *script: Iterable[Event]) -> None:
        self.script = list(script)
        self.requests: list[ChatRequest] = []

    def methods(self) -> tuple[MethodInfo, ...]:
        return (
            MethodInfo("ar", "Autoregressive", ()),
            MethodInfo("auto", "Auto", ()),
            MethodInfo("guess", "Guess", (Parameter("width", 4, ""), Parameter("deep", True, ""))),
        )

    def status(self) -> Status:
        return Status(MODEL)

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        return played([Loaded(MODEL)])

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        return played(self.script.pop(0))

    def report(self) -> Report:
        return Report()

    def ask(self, question: Question) -> Events:
        raise AssertionError("only the engine can answer this")

    def stop(self, request_id: str) -> None: ...

    def close(self) -> bool:
        return True


class Recording(FakeBackend):
    """Keeps requests, and answers each with one event."""

    def reply(self, request: ChatRequest) -> Events:
        self.requests.append(request)
        return played([DONE])
