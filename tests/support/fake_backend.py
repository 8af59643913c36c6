"""A backend that replays scripted events, and conversations with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from app.page.conversation import Conversation, Reply, Settings
from app.worker.messages import (
    ChatRequest,
    Done,
    Event,
    Loaded,
    LoadedModel,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Parameter,
    Status,
    Tokens,
)

MODEL = LoadedModel(ModelSpec("m.gguf"), "llama 7M", 2048, True, 1)
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


class FakeBackend:
    """Replays the script, one list of events per reply."""

    def __init__(self, *script: Iterable[Event]) -> None:
        self.script = list(script)
        self.requests: list[ChatRequest] = []

    def methods(self) -> tuple[MethodInfo, ...]:
        return (
            MethodInfo("ar", "Autoregressive", ()),
            MethodInfo("guess", "Guess", (Parameter("width", 4, ""), Parameter("deep", True, ""))),
        )

    def models(self) -> tuple[ModelInfo, ...]:
        return ()

    def status(self) -> Status:
        return Status(MODEL)

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        yield Loaded(MODEL)

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        self.requests.append(request)
        yield from self.script.pop(0)

    def stop(self, request_id: str) -> None: ...

    def close(self) -> bool:
        return True


def run(conversation: Conversation, backend: Any, **settings: Any) -> Reply:
    for _ in conversation.answer(backend, Settings(**settings), "tab"):
        pass
    reply = conversation.turns[-1].reply
    assert reply is not None
    return reply


def talk(*texts: str) -> Conversation:
    conversation = Conversation()
    for text in texts:
        conversation.ask(text)
        run(conversation, FakeBackend([Tokens(((f"re: {text}", False),)), DONE]))
    return conversation
