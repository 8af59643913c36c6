"""The model in memory, and another one in its place: downloads, progress, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.worker.jobs import Job, message_of
from app.worker.messages import Failed, Loaded, LoadedModel, Loading, ModelSpec, Status
from batching.gguf.splits import part_names
from batching.llama.context import ContextParams
from batching.llama.hardware import physical_cores
from batching.llama.model import check_file
from speculation.engine import Engine
from speculation.heads.load import require_no_heads
from speculation.registry import PAIRED, heads_for, paired_draft, resolve

TINY_BYTES = 64 * 2**20  # a model whose step takes a few milliseconds at most


class ModelSlot:
    """The engine, of which there is one at a time, and what is known of it.

    engine  None where no model is loaded
    status  may be read by any thread; everything else belongs to the thread that runs jobs
    """

    def __init__(self, trace_batches: str | Path | None = None) -> None:
        self._trace_batches = trace_batches
        self.engine: Engine | None = None
        self.status = Status()
        self._n_loads = 0
        self._params = ContextParams()  # of the engine's context

    def load(self, job: Job, spec: ModelSpec) -> None:
        """Put ``spec`` in place of the present model: ``job`` emits Loading, then Loaded or Failed.

        When it fails or is stopped the model that was there before is there again.
        """
        before, params_before = self.status.model, self._params
        try:
            # All that can fail without touching the old model comes first. Two models at once may
            # not fit into memory, so then the old one goes, and comes back should the new one fail.
            params = _context_params(spec)
            self._tell(job, Loading(spec.model, "load", 0, 100))
            path = self._fetch(job, spec.model)
            check_file(path)
            require_no_heads(path)
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
            message = message_of(error)
            if self.engine is None and before is not None:
                message = f"{message}\n{self._restore(job, before.spec, params_before)}"
            self.status = Status(self.status.model, error=message)
            job.emit(Failed(message))
        else:
            self.status = Status(loaded)
            job.emit(Loaded(loaded))

    def forget_error(self) -> None:
        """Say no more of a load that failed and left the old model in place."""
        if self.status.error is not None and self.status.model is not None:
            self.status = Status(self.status.model)

    def _fetch(self, job: Job, name: str) -> Path:
        """The file of a name or path, downloaded if need be."""
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

        def check() -> None:
            if may_stop and job.cancelled.is_set():
                raise _Stopped

        def progress(share: float) -> None:
            check()
            self._tell(job, Loading(spec.model, "load", int(100 * share), 100))

        engine = Engine.load(
            spec.model,  # by its name: what is paired with it goes by that
            params,
            draft_model=spec.draft_model,
            heads=spec.heads,
            mtp=spec.mtp,
            n_gpu_layers=spec.n_gpu_layers,
            trace_batches=self._trace_batches,
            progress=progress,
        )
        try:
            self._tell(job, Loading(spec.model, "measure", 0, 0))
            engine.prepare(check)
            check()
        except BaseException:
            engine.close()
            raise
        self.engine = engine
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
        )

    def _restore(self, job: Job, spec: ModelSpec, params: ContextParams) -> str:
        """Load the model that was there before; what to tell about it."""
        try:
            self.status = Status(self._swap(job, spec, params, may_stop=False))
        except Exception as error:
            self.status = Status(error=message_of(error))
            return f"{spec.model} could not be loaded again: {message_of(error)}"
        return f"{spec.model} is loaded as before."

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
    """Raised in the middle of a download or load that was stopped; what has arrived is kept."""


class _Bar:
    """The progress bar of a download: tells the job, and ends the download when it is stopped."""

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
    """How many threads are to decode with a model of ``n_bytes`` while a browser draws its text.

    All cores, but for one that a tiny model leaves to the browser: its threads wait for each other
    hundreds of thousands of times a second, and one that has lost its core holds up the others.
    Measured on 2 cores beside Chromium, 14M parameters, one thread and two, medians of five: 430
    and 210 tokens/s in a story, 610 and 740 in a copied text, 360 and 350 in one copied again.
    """
    return n_cores if n_bytes > TINY_BYTES else max(1, n_cores - 1)


def _context_params(spec: ModelSpec) -> ContextParams:
    return ContextParams(
        n_ctx=spec.n_ctx,
        n_threads=spec.n_threads,
        kv_type=spec.kv_type,
        flash_attn=spec.flash_attn,
    )
