"""ParallelEngine: an engine that writes several texts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batching.errors import InvalidParameter
from batching.llama.context import ContextParams
from batching.llama.context_params import MAX_SEQUENCES
from speculation.drafter import Requirements
from speculation.engine import Engine
from speculation.generation import GenerationRequest, Settings
from speculation.one_at_a_time import OneAtATime
from speculation.registry import default_model
from speculation.registry.conversion import model_file
from speculation.scheduler import Scheduler
from speculation.submitted import Submitted
from speculation.text_files import TextFiles, identity_of, texts_folder, usual_flash_attn
from speculation.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack


DEFAULT_PARALLEL = 4
SEQUENCES = 40  # of a text: recycling uses as many, lookahead 31


class ParallelEngine(Engine):
    """An engine that writes up to ``parallel`` texts at a time, with one decode for all of them.

    ``submit``, ``generate`` and ``chat`` return at once and may be called from any thread.
    """

    parallel: int
    _worker: Worker
    _scheduler: Scheduler | OneAtATime

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        params: ContextParams | None = None,
        *,
        parallel: int | None = None,
        keep_texts: int = 0,
        measuring: Callable[[], None] | None = None,
        **settings: Any,
    ) -> ParallelEngine:
        """As ``Engine.load``. ``parallel`` is how many texts are written at a time; the sequences
        of the context are divided among them. None = 4. ``keep_texts`` is how many MB of texts that
        nobody writes are kept on disk, in the cache folder; those of all models count. They are
        there again when the model is loaded again with the same settings. Without effect if one
        text is written at a time.

        Measures the cost of a decode if that is not known yet, and calls ``measuring`` meanwhile;
        an exception it raises ends loading. Raises InvalidParameter unless ``parallel`` is 1 to
        256.
        """
        n_slots = DEFAULT_PARALLEL if parallel is None else parallel
        if not 1 <= n_slots <= MAX_SEQUENCES:
            raise InvalidParameter(
                f"{{parallel}} is {parallel}; give 1 to {MAX_SEQUENCES}", settings=("parallel",)
            )
        if keep_texts < 0:
            raise InvalidParameter(
                f"{{keep_texts}} is {keep_texts}; give 0 or more", settings=("keep_texts",)
            )
        params = params or ContextParams()
        if keep_texts:
            model = default_model() if model is None else model
            flash_attn = usual_flash_attn(texts_folder(), model_file(model), params)
            params = replace(params, flash_attn=flash_attn)
        worker = Worker()
        n_seq_max = max(min(SEQUENCES * n_slots, MAX_SEQUENCES), params.n_seq_max)
        params = replace(params, n_seq_max=n_seq_max, n_slots=n_slots)

        def load() -> ParallelEngine:
            engine = super(ParallelEngine, cls).load(model, params, **settings)
            assert isinstance(engine, ParallelEngine)
            try:
                engine._share(n_slots, worker, keep_texts, measuring)
            except BaseException:
                Engine.close(engine)
                raise
            return engine

        try:
            return worker.call(load)
        except BaseException:
            worker.close()
            raise

    def _share(
        self, parallel: int, worker: Worker, keep_texts: int, measuring: Callable[[], None] | None
    ) -> None:
        """Give the context to a scheduler."""
        files = None
        if keep_texts and parallel > 1:
            kv_type, flash_attn = self.context.params.kv_type, self.context.flash_attn
            identity = identity_of(self.model.path, kv_type, flash_attn=flash_attn)
            files = TextFiles(texts_folder(), identity, keep_texts * 10**6)
        if measuring is not None:
            measuring()
        Engine.prepare(self, measuring)
        self.parallel = parallel
        self._worker = worker
        if parallel == 1:
            self._scheduler = OneAtATime(self, worker.wake)
        else:
            self._scheduler = Scheduler(self, parallel, worker.wake, files)
        worker.step = self._scheduler.step

    def submit(self, prompt: str | Sequence[int], **settings: Unpack[Settings]) -> Submitted:
        """Start a generation and return at once; iterate over it in any thread, or ``async for``.

        Arguments as for ``generate``. Raises InvalidParameter, PromptTooLong; what the method finds
        wrong is raised when the result is iterated.
        """
        return self._start(GenerationRequest(self._tokens(prompt), **settings))

    def generate_batch(
        self, prompts: Iterable[str | Sequence[int]], **settings: Unpack[Settings]
    ) -> list[Submitted]:
        """Continue all ``prompts``; return when all texts have ended."""
        started = [self.submit(prompt, **settings) for prompt in prompts]
        for generation in started:
            generation.run()
        return started

    def start(self, request: GenerationRequest) -> Submitted:
        """As ``submit``."""
        return self._scheduler.requests.submit(request)

    _start = start

    @property
    def n_running(self) -> int:
        """How many texts are being written."""
        return self._scheduler.n_running

    def prepare(self, progress: Callable[[], None] | None = None) -> None:
        """Does nothing: the cost was measured on loading."""

    def fit(self, needed: Requirements) -> None:
        if self.parallel > 1:
            raise NotImplementedError("the context of several texts cannot be replaced")
        super().fit(needed)

    def stop_running(self) -> None:
        """End all generations."""
        self._worker.call(self._scheduler.end)

    def close(self) -> None:
        """End all generations, and free the context and the model. Idempotent."""
        if not self.model.is_closed:
            self._worker.call(self._scheduler.close)
            self._worker.call(super().close)
            self._worker.close()

    def __enter__(self) -> ParallelEngine:
        return self
