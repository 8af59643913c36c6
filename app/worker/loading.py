"""Loads models: download, progress, cancelling, and restoring the old model after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from app.worker.messages import (
    LAST,
    Answer,
    ChatRequest,
    Done,
    Embed,
    Event,
    Failed,
    Loaded,
    LoadedModel,
    Loading,
    ModelFacts,
    ModelSpec,
    Question,
    Status,
    Unload,
    Waiting,
)
from app.worker.wording import failure
from batching.errors import InvalidParameter, MissingResource, SpeculationError
from batching.gguf.reader import check_file
from batching.gguf.splits import part_names
from batching.gguf.unsupported import check_model_file
from batching.llama.context import ContextParams
from batching.llama.devices import Placement
from batching.llama.hardware import physical_cores
from batching.watched import STEP_SECONDS, GivenUp, Watched, until
from speculation.engine import Engine
from speculation.heads.load import require_no_heads
from speculation.methods import METHODS
from speculation.recommended import recommended
from speculation.registry import PAIRED, heads_for, paired_draft, resolve
from speculation.reply import Reply
from speculation.system.computed_by import computed_by
from speculation.system.files import read_text

DEFAULT_PARALLEL = 4  # texts written at a time
TINY_BYTES = 64 * 2**20  # smaller models take a few milliseconds per step at most


class Job:
    """A request and where its events go. The first of ``LAST`` ends it; later events are dropped.

    lane       which threads work on it: ``load``, ``embed``, ``prepare``, or ``large`` or
               ``grammar`` for what may take long
    text       of a reply, in the engine; None before
    n_ahead    how many others must end before it starts, as last told
    is_taken   whether a thread works on it, or the engine
    has_begun  whether it has the engine: a load goes on, a reply has a slot
    """

    def __init__(
        self,
        number: int,
        message: ModelSpec | ChatRequest | Question,
        pass_on: Callable[[Event], object],
        lane: str = "prepare",
    ) -> None:
        self.number = number
        self.message: Any = message
        self.is_load = isinstance(message, ModelSpec | Unload)
        self.is_reply = isinstance(message, ChatRequest)
        lane = "embed" if isinstance(message, Embed) else lane
        self.lane = "load" if self.is_load else lane
        self.text: Reply | None = None
        self.n_ahead = 0
        self.is_taken = self.is_cancelled = self.has_begun = self.has_ended = False
        self._pass_on = pass_on
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            if not self.has_ended:
                self.has_ended = isinstance(event, LAST)
                self._pass_on(event)

    def waits(self, n_ahead: int, *, loading: bool = False) -> None:
        """Tell how many are ahead, if that has changed."""
        if n_ahead and n_ahead != self.n_ahead:
            self.emit(Waiting(n_ahead, loading))
        self.n_ahead = n_ahead

    @property
    def stopped(self) -> Event:
        """Its last event if it is stopped before it has begun."""
        if isinstance(self.message, ChatRequest):
            return Done("cancelled", self.message.method)
        is_named = isinstance(self.message, ModelSpec)
        what = f"loading {self.message.model}" if is_named else "the question"
        return Failed(f"{what} was stopped")

    def cancel(self) -> None:
        """Stop soon; at once if it has not begun."""
        self.is_cancelled = True
        if not self.has_begun:
            self.emit(self.stopped)
        if self.text is not None:
            self.text.cancel()


class ModelSlot:
    """The engine, of which there is at most one, and its status.

    engine  None if no model is loaded
    is_closed  whether no other may be loaded
    status  may be read by any thread; all else belongs to the thread that loads
    """

    def __init__(
        self,
        trace_batches: str | Path | None,
        memory: str | Path | None,
        on_status: Callable[[Status], object],
        alone: Callable[[Job], AbstractContextManager[None]],
    ) -> None:
        """``memory`` is a file as in ``Engine.load``, for the first model that loads with it;
        ``on_status`` is told of every new status. Inside ``alone(job)`` nobody uses the engine."""
        self._on_status = on_status
        self._alone = alone
        self._trace_batches = trace_batches
        self._memory = memory
        self._memory_model: str | None = None  # which the memory is of, once known
        self.engine: Engine | None = None
        self.is_closed = False
        self.status = Status()
        self._n_loads = 0
        self._facts = ModelFacts()  # of the engine
        self._params = ContextParams()  # of the engine's context

    def _publish(
        self,
        model: LoadedModel | None = None,
        loading: Loading | None = None,
        error: str | None = None,
        failed: str = "",
    ) -> None:
        facts = ModelFacts() if model is None else self._facts
        self.status = Status(model, loading, error, facts, failed=failed)
        self._on_status(self.status)

    def load(self, job: Job, spec: ModelSpec) -> Event:
        """Replace the model: ``job`` emits Loading; returns the last event, Loaded or Failed.

        The old model can be used until the files of the new one are there and checked. If the load
        fails or is stopped, the old model is restored. Raises GivenUp if it is stopped.
        """
        before, params_before, restored = self.status.model, self._params, ""
        try:
            params = self._checked(job, spec)
            with self._alone(job):
                try:
                    # Two models may not fit into memory, so the old one is freed first.
                    loaded = self._swap(job, spec, params)
                except Exception:
                    if before is not None and not self.is_closed:
                        restored = f"\n{self._restore(job, before.spec, params_before)}"
                    raise
                self._publish(loaded)
                return Loaded(loaded)
        except GivenUp:
            self._publish(self.status.model, error=self.status.error, failed=self.status.failed)
            raise
        except Exception as error:
            failed = failure(error)
            failed = replace(failed, message=failed.message + restored)
            self._publish(self.status.model, error=failed.message, failed=spec.model)
            return failed

    def _checked(self, job: Job, spec: ModelSpec) -> ContextParams:
        """The parameters of a model whose files are here. All that can fail without touching the
        old model fails in this method."""
        params = spec.context
        self._tell(job, Loading(spec.model, "load", 0, 100))
        path = self._fetch(job, spec.model)
        check_file(path)
        require_no_heads(path, METHODS.heads_kinds())
        check_model_file(path)  # llama.cpp would abort, and the old model go with it
        for name in heads_for(spec.model, spec.heads):
            self._fetch(job, str(name))
        if spec.draft_model is not None:
            is_paired = spec.draft_model == PAIRED
            draft = paired_draft(spec.model) if is_paired else spec.draft_model
            check_model_file(self._fetch(job, draft))
        if spec.embedding_model is not None:
            check_model_file(self._fetch(job, spec.embedding_model))
        if params.n_threads is None:
            size = sum(path.with_name(name).stat().st_size for name in part_names(path.name))
            n_threads = threads_beside_browser(size, physical_cores())
            params = replace(params, n_threads=n_threads)
        return params

    def forget_error(self) -> None:
        """Clear the error of a failed load if the old model is still there."""
        if self.status.error is not None and self.status.model is not None:
            self._publish(self.status.model)

    def _fetch(self, job: Job, name: str) -> Path:
        """The file of a name or path, downloaded if necessary."""
        return resolve(name, bar=partial(_Bar, partial(self._tell, job), name))

    def _swap(self, job: Job, spec: ModelSpec, params: ContextParams) -> LoadedModel:
        self.close()
        devices = _free_devices(spec)
        watched = Watched(f"loading {spec.model}", STEP_SECONDS)

        def progress(share: float) -> None:
            watched.progress()
            self._tell(job, Loading(spec.model, "load", int(100 * share), 100))

        remembers = self._memory_model in (None, spec.model)
        with watched:
            engine = Engine.load(
                spec.model,  # the name, not the path: models.txt pairs drafts by name
                params,
                **spec.parts,
                memory=self._memory if remembers else None,
                trace_batches=self._trace_batches,
                progress=progress,
                parallel=spec.parallel or DEFAULT_PARALLEL,
                keep_texts=spec.keep_texts,
                chat_template=_template(spec.chat_template),
                embedding_model=spec.embedding_model,
            )
        if self.is_closed:
            engine.close()
            raise GivenUp
        self.engine = engine
        sampling = recommended(spec.model, engine.model.metadata)
        self._facts = replace(facts_of(engine, devices), sampling=sampling)
        if remembers:
            self._memory_model = spec.model
        self._n_loads += 1
        self._params = params
        return LoadedModel(
            spec,
            engine.model.description,
            engine.context.text_limit,
            self._n_loads,
            has_thinking_switch=engine.has_thinking_switch,
            computed_by=computed_by(engine.model),
            can_draft=engine.context.n_rewind > 0,
        )

    def _restore(self, job: Job, spec: ModelSpec, params: ContextParams) -> str:
        """Load the old model again, whoever stops; returns a message for the user."""
        try:
            with until(lambda: False):
                self._publish(self._swap(Job(0, spec, job.emit), spec, params))
        except Exception as error:
            message = failure(error).message
            self._publish(error=message)
            return f"{spec.model} could not be loaded again: {message}"
        return f"{spec.model} is loaded again."

    def _tell(self, job: Job, loading: Loading) -> None:
        """Publish a load's progress. Raises GivenUp."""
        if self.status.loading != loading and not job.is_cancelled:
            self._publish(self.status.model, loading)
            job.emit(loading)
        if job.is_cancelled:  # perhaps by whoever was told: no other word of it may come
            raise GivenUp

    def unload(self, job: Job) -> Event:
        """Free the model once nobody uses it; returns the last event. Raises GivenUp."""
        with self._alone(job):
            self.close()
            return Answer()

    def close(self) -> None:
        """Free the model. Idempotent."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self._publish()


class _Bar:
    """A download's progress bar, told in steps of a thousandth."""

    def __init__(
        self, tell: Callable[[Loading], None], model: str, *, total: int = 0, **_: Any
    ) -> None:
        self._tell, self._model, self._total = tell, model, int(total)
        self._done = 0.0

    def update(self, n: float, /) -> None:
        self._done += n
        permille = int(1000 * self._done / self._total) if self._total else 0
        shown = self._total * permille // 1000
        self._tell(Loading(self._model, "download", shown, self._total))

    def close(self) -> None:
        pass


def threads_beside_browser(n_bytes: int, n_cores: int) -> int:
    """The number of decoding threads for a model of ``n_bytes`` while a browser shows its text.

    One per core; a tiny model leaves one core to the browser. Its threads synchronize hundreds of
    thousands of times a second, so a thread that loses its core holds up the others.
    """
    return n_cores if n_bytes > TINY_BYTES else max(1, n_cores - 1)


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    if Path(path).exists() and not Path(path).is_file():  # a device may have no end
        raise InvalidParameter(f"the chat template {path} is not a file")
    return read_text(Path(path))


def _free_devices(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    try:
        chosen = Placement.of(device=spec.device, rpc=spec.rpc).chosen()
    except SpeculationError:  # the load raises it again
        return ()
    return tuple((device.name, device.memory[0]) for device in chosen if device.memory[1])


def facts_of(engine: Engine, devices: tuple[tuple[str, int], ...] = ()) -> ModelFacts:
    """What the endpoint says of the engine's model."""
    model = engine.model
    return ModelFacts(
        parallel=engine.parallel,
        path=str(model.path),
        chat_template=model.chat_template or "",
        bos=_special(engine, "bos"),
        eos=_special(engine, "eos"),
        ends=tuple(sorted(model.ends)),
        n_vocab=model.n_vocab,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_params=model.n_params,
        n_bytes=model.n_bytes,
        longest=model.longest_token,
        fim=model.fim_tokens,
        embedding_model=engine.embedding_model,
        missing={name: _missing(error) for name, error in engine.unavailable().items()},
        devices=devices,
        n_threads=engine.context.n_threads,
        gpu_layers=(model.n_layer - model.n_host_layers, model.n_layer),
    )


def _missing(error: SpeculationError) -> str:
    """What ``ModelFacts.missing`` says of a method that cannot run."""
    if isinstance(error, MissingResource):
        return error.settings[0]
    return "parameters" if isinstance(error, InvalidParameter) else "model"


def _special(engine: Engine, name: str) -> str:
    token = engine.model.special_token(name)
    return "" if token is None else engine.model.piece(token).decode("utf-8", "replace")
