"""``Backend``, the app's interface to the engine, and ``LocalBackend``, which runs it on a thread.

Only the dataclasses of ``messages`` cross the interface. Nothing here knows of Gradio or HTML.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from app.worker.jobs import Job, JobQueue, message_of
from app.worker.loading import ModelSlot
from app.worker.messages import (
    ChatRequest,
    Done,
    Event,
    Failed,
    LeftOut,
    LoadedModel,
    MethodInfo,
    ModelInfo,
    ModelSpec,
    Opening,
    Parameter,
    Prefill,
    Status,
    Text,
    Value,
)
from batching.errors import ModelError
from speculation.chat.truncation import room_for_reply, turns_to_leave_out, without_turns
from speculation.engine import Engine, Generation
from speculation.methods import METHODS, parameter_docs, parse_method
from speculation.registry import RegistryError, read_registry
from speculation.sampling import SamplingParams

log = logging.getLogger(__name__)


class Backend(Protocol):
    """The app's interface to an engine."""

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

        Yields Waiting, LeftOut, Opening, Prefill, Text, then Done or Failed. LeftOut comes only if
        it differs from the request's. The reply starts when the iterator is first advanced and
        stops when it is closed.
        """
        ...

    def stop(self, request_id: str) -> None:
        """Stop the request with this id within one step. Its iterator still yields a last event."""
        ...

    def close(self) -> bool:
        """Stop everything; return whether all has ended within a few seconds."""
        ...


class LocalBackend:
    """An engine in this process. Replies and loads run one at a time, in order of arrival."""

    def __init__(
        self, *, trace_batches: str | Path | None = None, memory: str | Path | None = None
    ) -> None:
        """``trace_batches`` names a file that gets one JSON line per decode, ``memory`` one that
        keeps what the first model reads and writes."""
        self._slot = ModelSlot(trace_batches, memory)
        self._queue = JobQueue()

    def methods(self) -> tuple[MethodInfo, ...]:
        return tuple(
            MethodInfo(kind.name, kind.title, _parameters(kind.params)) for kind in METHODS.values()
        )

    def models(self) -> tuple[ModelInfo, ...]:
        try:
            entries = read_registry().values()
            return tuple(
                ModelInfo(e.name, e.description, e.draft, e.heads)
                for e in entries
                if not e.is_heads
            )
        except RegistryError as error:
            log.warning("%s", error)
            return ()

    def status(self) -> Status:
        return self._slot.status

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        stopped = Failed(f"loading {spec.model} was stopped")
        work = partial(self._slot.load, spec=spec)
        return self._queue.run(Job(request_id, work, stopped, loads=True))

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        stopped = Done("cancelled", request.method)
        return self._queue.run(Job(request.id, partial(self._reply, request=request), stopped))

    def stop(self, request_id: str) -> None:
        self._queue.stop(request_id)

    def close(self) -> bool:
        """Stop everything and free the model, unless a job that does not end still uses it.

        Returns whether all has ended. Idempotent.
        """
        has_ended = self._queue.close()
        if has_ended:
            self._slot.close()
        return has_ended

    def _reply(self, job: Job, request: ChatRequest) -> None:
        try:
            generation = self._generate(job, request)
            if generation.opening:
                job.emit(Opening(generation.opening))
            for token in generation:
                job.emit(Text(((token.text, token.drafted),)))
        except Exception as error:
            job.emit(Failed(message_of(error)))
        else:
            job.emit(_done(generation, self._slot.status.model))

    def _generate(self, job: Job, request: ChatRequest) -> Generation:
        engine, error = self._slot.engine, self._slot.status.error
        if engine is None:
            raise ModelError(f"no model is loaded; choose one and load it. {error or ''}".strip())
        self._slot.forget_error()
        thinking = request.thinking if engine.has_thinking_switch else None
        left_out = _left_out(engine, request, thinking)
        if left_out != request.left_out:
            job.emit(left_out)
        return engine.chat(
            without_turns(request.messages, left_out.n_turns),
            thinking=thinking,
            method=parse_method(request.method),
            sampling=SamplingParams(**request.sampling),
            max_tokens=request.max_tokens,
            progress=lambda done, total: job.emit(Prefill(done, total)),
            cancelled=job.cancelled.is_set,
        )


def _left_out(engine: Engine, request: ChatRequest, thinking: bool | None) -> LeftOut:
    if not request.leave_out:
        return LeftOut()
    before, n_ctx = request.left_out, engine.context.n_ctx
    n_turns = turns_to_leave_out(
        request.messages,
        partial(engine.count_tokens, thinking=thinking),
        n_ctx,
        room_for_reply(n_ctx, request.max_tokens),
        before.n_turns if before.n_ctx == n_ctx else 0,
    )
    return LeftOut(n_turns, n_ctx) if n_turns else LeftOut()


def _parameters(params: type[Any]) -> tuple[Parameter, ...]:
    """The fields of a method's dataclass, with their help from its docstring."""
    helps = parameter_docs(params)
    return tuple(
        Parameter(item.name, cast("Value", item.default), helps[item.name])
        for item in dataclasses.fields(params)
    )


def _done(generation: Generation, model: LoadedModel | None) -> Done:
    stats = generation.stats
    return Done(
        finish_reason=generation.finish_reason or "stop",
        method=str(generation.method),
        model=model,
        n_prompt=stats.n_prompt,
        n_reused=stats.n_reused,
        n_tokens=stats.n_tokens,
        n_first=stats.n_first,
        n_steps=stats.n_steps,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        prefill_seconds=stats.prefill_seconds,
        decode_seconds=stats.decode_seconds,
    )
