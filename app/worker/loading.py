"""Loads models: download, progress, cancelling, and restoring the old model after a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculation.parallel import ParallelEngine

from app.worker.jobs import Job, failure
from app.worker.messages import Loaded, LoadedModel, Loading, ModelFacts, ModelSpec, Status
from batching.errors import InvalidParameter
from batching.gguf.reader import check_file
from batching.gguf.splits import part_names
from batching.llama.context import ContextParams
from batching.llama.hardware import physical_cores
from batching.watched import STEP_SECONDS, Watched
from speculation.chat.template import template_of
from speculation.heads.load import require_no_heads
from speculation.methods import METHODS
from speculation.registry import PAIRED, heads_for, paired_draft, resolve

TINY_BYTES = 64 * 2**20  # smaller models take a few milliseconds per step at most


class ModelSlot:
    """The engine, of which there is at most one, and its status.

    engine  None if no model is loaded
    status  may be read by any thread; all else belongs to the thread that runs jobs
    """

    def __init__(
        self,
        trace_batches: str | Path | None = None,
        memory: str | Path | None = None,
        on_status: Callable[[Status], object] = lambda _: None,
    ) -> None:
        """``memory`` is a file as in ``Engine.load``, for the first model that loads with it;
        ``on_status`` is told of every new status."""
        self._on_status = on_status
        self._trace_batches = trace_batches
        self._memory = memory
        self._memory_model: str | None = None  # which the memory is of, once known
        self.engine: ParallelEngine | None = None
        self._status = Status()
        self._n_loads = 0
        self._params = ContextParams()  # of the engine's context

    @property
    def status(self) -> Status:
        return self._status

    @status.setter
    def status(self, status: Status) -> None:
        if self.engine is not None and status.model is not None:
            status = replace(status, facts=facts_of(self.engine))
        self._status = status
        self._on_status(status)

    def load(self, job: Job, spec: ModelSpec) -> None:
        """Replace the model: ``job`` emits Loading, then Loaded or Failed.

        If it fails or is stopped, the old model is restored.
        """
        before, params_before = self.status.model, self._params
        try:
            # First everything that can fail without touching the old model. Two models may not fit
            # into memory, so the old one is then freed, and loaded again if the new one fails.
            params = _context_params(spec)
            self._tell(job, Loading(spec.model, "load", 0, 100))
            path = self._fetch(job, spec.model)
            check_file(path)
            require_no_heads(path, METHODS.heads_kinds())
            for name in heads_for(spec.model, spec.heads):
                self._fetch(job, str(name))
            if spec.draft_model is not None:
                is_paired = spec.draft_model == PAIRED
                self._fetch(job, paired_draft(spec.model) if is_paired else spec.draft_model)
            if params.n_threads is None:
                size = sum(path.with_name(name).stat().st_size for name in part_names(path.name))
                n_threads = threads_beside_browser(size, physical_cores())
                params = replace(params, n_threads=n_threads)
            loaded = self._swap(job, spec, params, may_stop=True)
        except _Stopped:
            if self.engine is None and before is not None:
                self._restore(job, before.spec, params_before)
            else:
                self.status = Status(self.status.model)
            job.emit(job.stopped)
        except Exception as error:
            failed = failure(error)
            if self.engine is None and before is not None:
                restored = self._restore(job, before.spec, params_before)
                failed = replace(failed, message=f"{failed.message}\n{restored}")
            self.status = Status(self.status.model, error=failed.message)
            job.emit(failed)
        else:
            self.status = Status(loaded)
            job.emit(Loaded(loaded))

    def forget_error(self) -> None:
        """Clear the error of a failed load if the old model is still there."""
        if self.status.error is not None and self.status.model is not None:
            self.status = Status(self.status.model)

    def _fetch(self, job: Job, name: str) -> Path:
        """The file of a name or path, downloaded if necessary."""
        if job.cancelled.is_set():
            raise _Stopped
        return resolve(name, bar=lambda **keywords: _Bar(self._tell, job, name, **keywords))

    def _swap(
        self, job: Job, spec: ModelSpec, params: ContextParams, *, may_stop: bool
    ) -> LoadedModel:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.status = Status()

        watched = Watched(f"loading {spec.model}", STEP_SECONDS)

        def check() -> None:
            watched.progress()
            if may_stop and job.cancelled.is_set():
                raise _Stopped

        def progress(share: float) -> None:
            check()
            self._tell(job, Loading(spec.model, "load", int(100 * share), 100))

        remembers = self._memory_model in (None, spec.model)

        def measuring() -> None:
            self._tell(job, Loading(spec.model, "measure", 0, 0))
            check()

        with watched:
            engine = ParallelEngine.load(
                spec.model,  # the name, not the path: models.txt pairs drafts by name
                params,
                draft_model=spec.draft_model,
                heads=spec.heads,
                mtp=spec.mtp,
                n_gpu_layers=spec.n_gpu_layers,
                device=spec.device,
                draft_device=spec.draft_device,
                rpc=spec.rpc,
                memory=self._memory if remembers else None,
                trace_batches=self._trace_batches,
                progress=progress,
                parallel=spec.parallel,
                keep_texts=spec.keep_texts,
                chat_template=_template(spec.chat_template),
                measuring=measuring,
            )
        self.engine = engine
        if remembers:
            self._memory_model = spec.model
        self._n_loads += 1
        self._params = params
        return LoadedModel(
            spec,
            engine.model.description,
            engine.context.n_ctx,
            engine.model.chat_template is not None,
            self._n_loads,
            engine.has_thinking_switch,
            engine.model.n_mtp > 0,
            engine.model.placed,
        )

    def _restore(self, job: Job, spec: ModelSpec, params: ContextParams) -> str:
        """Load the old model again; return a message for the user."""
        try:
            self.status = Status(self._swap(job, spec, params, may_stop=False))
        except Exception as error:
            message = failure(error).message
            self.status = Status(error=message)
            return f"{spec.model} could not be loaded again: {message}"
        return f"{spec.model} is loaded again."

    def _tell(self, job: Job, loading: Loading) -> None:
        if self.status.loading != loading:
            self.status = Status(self.status.model, loading)
            job.emit(loading)

    def close(self) -> None:
        """Free the model. Idempotent."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.status = Status()


class _Stopped(Exception):
    """Raised within a download or load to stop it. A partial download stays, to be resumed."""


class _Bar:
    """A download's progress bar: reports to the job, and stops the download with it."""

    def __init__(
        self,
        tell: Callable[[Job, Loading], None],
        job: Job,
        model: str,
        *,
        total: int = 0,
        **_: Any,
    ) -> None:
        self._tell = tell
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
            self._tell(self._job, Loading(self._model, "download", int(self._done), self._total))

    def close(self) -> None:
        pass


def threads_beside_browser(n_bytes: int, n_cores: int) -> int:
    """The number of decoding threads for a model of ``n_bytes`` while a browser shows its text.

    One per core; a tiny model leaves one core to the browser. Its threads synchronize hundreds of
    thousands of times a second, so a thread that loses its core holds up the others. Measured on 2
    cores beside Chromium with 14M parameters, one thread against two, medians of five: 430 and 210
    tokens/s in a story, 610 and 740 in a copied text, 360 and 350 in one copied again.
    """
    return n_cores if n_bytes > TINY_BYTES else max(1, n_cores - 1)


def _context_params(spec: ModelSpec) -> ContextParams:
    return ContextParams(
        n_ctx=spec.n_ctx,
        n_threads=spec.n_threads,
        kv_type=spec.kv_type,
        flash_attn=spec.flash_attn,
    )


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device may have no end
            raise OSError(0, "it is not a file")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidParameter(f"cannot read the chat template {path}: {reason}") from None


def facts_of(engine: ParallelEngine) -> ModelFacts:
    """What the endpoint says of the engine's model."""
    model = engine.model
    return ModelFacts(
        engine.parallel,
        str(model.path),
        model.chat_template or "",
        template_of(model, tools=True),
        _special(engine, "bos"),
        _special(engine, "eos"),
        tuple(sorted(model.ends)),
        model.n_vocab,
        model.n_ctx_train,
        model.n_embd,
        model.n_params,
        model.n_bytes,
    )


def _special(engine: ParallelEngine, name: str) -> str:
    token = engine.model.special_token(name)
    return "" if token is None else engine.model.piece(token).decode("utf-8", "replace")
