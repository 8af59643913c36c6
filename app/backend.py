"""The way to the engine: plain values in, plain values out.

Everything that crosses ``Backend`` is a frozen dataclass of strings, numbers, tuples and mappings,
so that the engine may live in another process. ``LocalBackend`` keeps it in this one, on a thread
of its own, where replies and loads take turns. Nothing here knows of Gradio or of HTML.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, cast

from batching.context import ContextParams
from batching.errors import ModelError, SpeculationError
from speculation.engine import DEFAULT_METHOD, DEFAULT_MODEL, Engine, Generation
from speculation.methods import METHODS, parameter_docs, parse_method
from speculation.registry import RegistryError, read_registry, resolve
from speculation.sampling import SamplingParams

log = logging.getLogger(__name__)

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
    """A line of models.txt."""

    name: str
    note: str


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and how to load it. Models are names of models.txt, paths or ``hf:…``."""

    model: str = DEFAULT_MODEL
    n_ctx: int = 0
    n_gpu_layers: int | None = None
    n_threads: int | None = None
    kv_type: str = "f16"
    flash_attn: str = "auto"
    draft_model: str | None = None
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """The model in memory. ``load`` counts loads: speeds of different loads do not compare."""

    spec: ModelSpec
    description: str
    n_ctx: int
    has_chat_template: bool
    load: int


@dataclass(frozen=True)
class Status:
    """What the backend is doing. ``loading`` and ``error`` concern the model."""

    model: LoadedModel | None = None
    loading: Loading | None = None
    error: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to reply to. ``id`` is what ``stop`` takes.

    messages    ``{"role": "system" | "user" | "assistant", "content": "..."}``
    method      a method with its parameters as on the command line, ``lookahead:window=5``
    sampling    fields of SamplingParams; what is missing keeps its default
    max_tokens  None goes on to the end of the context
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    method: str = DEFAULT_METHOD
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True)
class Waiting:
    """Other jobs come first: ``n_ahead`` of them, with a model to load among them or not."""

    n_ahead: int
    loading: bool = False


@dataclass(frozen=True)
class Loading:
    """A model on its way: bytes while ``stage`` is ``download``, percent while it is ``load``."""

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
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The end of a job that did not go well; ``message`` is for the person who asked."""

    message: str


Event = Waiting | Loading | Loaded | Prefill | Text | Done | Failed


class Backend(Protocol):
    """What the app needs of an engine."""

    def methods(self) -> tuple[MethodInfo, ...]: ...

    def models(self) -> tuple[ModelInfo, ...]: ...

    def status(self) -> Status: ...

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        """Load a model in place of the present one: Waiting, Loading, then Loaded or Failed.

        When it fails the model that was there before is there again.
        """
        ...

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        """Reply to a conversation: Waiting, Prefill, Text, then Done or Failed.

        It begins when iterated; closing the iterator stops it.
        """
        ...

    def stop(self, request_id: str) -> None:
        """End what has this id, within one step; its iterator still yields its last event."""
        ...

    def close(self) -> None: ...


class LocalBackend:
    """An engine in this process. One reply or load runs at a time, in the order of arrival."""

    def __init__(self, *, trace_batches: str | Path | None = None) -> None:
        """``trace_batches`` names a file that gets one JSON line for each decode."""
        self._trace_batches = trace_batches
        self._engine: Engine | None = None
        self._status = Status()
        self._n_loads = 0
        self._queue = _Queue()

    def methods(self) -> tuple[MethodInfo, ...]:
        return tuple(
            MethodInfo(kind.name, kind.title, _parameters(kind.params)) for kind in METHODS.values()
        )

    def models(self) -> tuple[ModelInfo, ...]:
        try:
            entries = read_registry().values()
            return tuple(ModelInfo(e.name, e.note) for e in entries if not e.is_heads)
        except RegistryError as error:
            log.warning("%s", error)
            return ()

    def status(self) -> Status:
        return self._status

    def load(self, spec: ModelSpec, request_id: str = "") -> Iterator[Event]:
        stopped = Failed(f"loading {spec.model} was stopped")
        return self._queue.run(_Job(request_id, lambda job: self._load(job, spec), stopped, True))

    def reply(self, request: ChatRequest) -> Iterator[Event]:
        stopped = Done("cancelled", request.method)
        return self._queue.run(_Job(request.id, lambda job: self._reply(job, request), stopped))

    def stop(self, request_id: str) -> None:
        self._queue.stop(request_id)

    def close(self) -> None:
        """Stop everything and free the model. Idempotent."""
        self._queue.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._status = Status()

    def _load(self, job: _Job, spec: ModelSpec) -> None:
        before = self._status.model
        try:
            # All that can fail without touching the old model comes first. Two models at once may
            # not fit into memory, so then the old one goes, and comes back should the new one fail.
            params = _context_params(spec)
            self._tell(job, Loading(spec.model, "load", 0, 100))
            path = resolve(
                spec.model, bar=lambda **keywords: _Bar(self, job, spec.model, **keywords)
            )
            loaded = self._swap(job, spec, path, params)
        except _Stopped:
            self._status = Status(self._status.model)
            job.emit(job.stopped)
        except Exception as error:
            message = _message(error)
            if self._engine is None and before is not None:
                message = f"{message}\n{self._restore(job, before.spec)}"
            self._status = Status(self._status.model, error=message)
            job.emit(Failed(message))
        else:
            self._status = Status(loaded)
            job.emit(Loaded(loaded))

    def _swap(self, job: _Job, spec: ModelSpec, path: Path, params: ContextParams) -> LoadedModel:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._status = Status()

        def progress(share: float) -> None:
            self._tell(job, Loading(spec.model, "load", int(100 * share), 100))

        self._engine = engine = Engine.load(
            path,
            params,
            draft_model=spec.draft_model,
            heads=spec.heads,
            n_gpu_layers=spec.n_gpu_layers,
            trace_batches=self._trace_batches,
            progress=progress,
        )
        engine.prepare()
        self._n_loads += 1
        return LoadedModel(
            spec,
            _description(engine),
            engine.context.n_ctx,
            engine.model.chat_template is not None,
            self._n_loads,
        )

    def _restore(self, job: _Job, spec: ModelSpec) -> str:
        """Load the model that was there before; what to tell about it."""
        try:
            path = resolve(spec.model)
            self._status = Status(self._swap(job, spec, path, _context_params(spec)))
        except Exception as error:
            return f"{spec.model} could not be loaded again: {_message(error)}"
        return f"{spec.model} is loaded as before."

    def _tell(self, job: _Job, loading: Loading) -> None:
        if self._status.loading != loading:
            self._status = Status(self._status.model, loading)
            job.emit(loading)

    def _reply(self, job: _Job, request: ChatRequest) -> None:
        try:
            generation = self._generate(job, request)
            for token in generation:
                job.emit(Text(((token.text, token.drafted),)))
        except Exception as error:
            job.emit(Failed(_message(error)))
        else:
            job.emit(_done(generation, self._status.model))

    def _generate(self, job: _Job, request: ChatRequest) -> Generation:
        if self._engine is None:
            raise ModelError(
                f"no model is loaded; choose one and load it. {self._status.error or ''}".strip()
            )
        return self._engine.chat(
            request.messages,
            method=parse_method(request.method),
            sampling=SamplingParams(**request.sampling),
            max_tokens=request.max_tokens,
            progress=lambda done, total: job.emit(Prefill(done, total)),
            cancelled=job.cancelled.is_set,
        )


class _Job:
    """Work for the engine's thread, and what it has to say. ``stopped`` is its end if it is stopped
    before it began."""

    def __init__(
        self, id_: str, work: Callable[[_Job], None], stopped: Event, loads: bool = False
    ) -> None:
        self.id = id_
        self.work = work
        self.stopped = stopped
        self.loads = loads
        self.cancelled = threading.Event()
        self.events: SimpleQueue[Event | None] = SimpleQueue()  # None ends it
        self.n_ahead = 0

    def emit(self, event: Event) -> None:
        self.events.put(event)

    def end(self) -> None:
        self.events.put(None)


class _Queue:
    """Jobs one at a time in the order of arrival, on one thread; those who wait are told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def run(self, job: _Job) -> Iterator[Event]:
        with self._changed:
            if self._closed:
                raise RuntimeError("the backend is closed")
            self._waiting.append(job)
            self._tell_waiting()
            self._changed.notify()
        try:
            while (event := job.events.get()) is not None:
                yield event
        finally:
            self._cancel(job)

    def stop(self, id_: str) -> None:
        with self._changed:
            jobs = [job for job in (self._running, *self._waiting) if job and job.id == id_]
        for job in jobs:
            self._cancel(job)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            jobs = [job for job in (self._running, *self._waiting) if job]
            self._changed.notify()
        for job in jobs:
            self._cancel(job)
        self._thread.join()

    def _cancel(self, job: _Job) -> None:
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.emit(job.stopped)
                job.end()
                self._tell_waiting()

    def _tell_waiting(self) -> None:
        ahead = [self._running] if self._running else []
        for job in self._waiting:
            if ahead and job.n_ahead != len(ahead):
                job.n_ahead = len(ahead)
                job.emit(Waiting(len(ahead), any(other.loads for other in ahead)))
            ahead.append(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._running = job = self._waiting.popleft()
                self._tell_waiting()
            try:
                job.work(job)
            except Exception as error:
                log.exception("a job failed")
                job.emit(Failed(_message(error)))
            with self._changed:
                self._running = None
            job.end()


class _Stopped(Exception):
    """Raised in the middle of a download that was stopped; what has arrived is kept."""


class _Bar:
    """The progress bar of a download: tells the job, and ends the download when it is stopped."""

    def __init__(
        self, backend: LocalBackend, job: _Job, model: str, *, total: int = 0, **_: Any
    ) -> None:
        self._backend = backend
        self._job = job
        self._model = model
        self._total = int(total)
        self._done = 0.0
        self._shown = -1

    def update(self, n: float, /) -> None:
        if self._job.cancelled.is_set():
            raise _Stopped
        self._done += n
        permille = int(1000 * self._done / self._total) if self._total else 0
        if permille != self._shown:
            self._shown = permille
            self._backend._tell(
                self._job, Loading(self._model, "download", int(self._done), self._total)
            )

    def close(self) -> None:
        pass


def _description(engine: Engine) -> str:
    """llama.cpp's description, with the size it does not know for models off the beaten track."""
    n_params = engine.model.n_params
    size = f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.2g}M"
    return engine.model.description.replace("?B", size)


def _context_params(spec: ModelSpec) -> ContextParams:
    return ContextParams(
        n_ctx=spec.n_ctx,
        n_threads=spec.n_threads,
        kv_type=spec.kv_type,
        flash_attn=spec.flash_attn,
    )


def _parameters(params: type[Any]) -> tuple[Parameter, ...]:
    """The fields of a method's dataclass, with what its docstring says of them."""
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
        n_steps=stats.n_steps,
        n_drafted=stats.n_drafted,
        n_accepted=stats.n_accepted,
        prefill_seconds=stats.prefill_seconds,
        decode_seconds=stats.decode_seconds,
    )


def _message(error: Exception) -> str:
    """What to show of an error: those we raise on purpose speak for themselves."""
    if isinstance(error, SpeculationError):
        return str(error)
    log.error("unexpected", exc_info=error)
    return f"unexpected {type(error).__name__}: {error}"
