"""The engine and the requests to it. The engine's queue is the only one in which a reply waits.

A few threads prepare requests and answer questions, others those that are large or that have a
grammar that may be hard to read; one loads models; the engine has its own. A load waits until no
reply runs. New replies wait for it while it goes on, and before that for 30 of every 60 seconds, so
that it is not starved.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from app.worker.loading import Job, ModelSlot
from app.worker.messages import (
    Asking,
    ChatRequest,
    Done,
    Drafting,
    Event,
    LoadedModel,
    ModelSpec,
    Node,
    Prefill,
    Question,
    Report,
    Status,
    StepRecord,
    Steps,
    Tokens,
    Unload,
)
from app.worker.preparation import answer_to, chances, prepared, shown_prompt
from app.worker.wire import naming
from app.worker.wording import QueueFull, failure
from batching.errors import ModelError
from batching.llama.model import Model
from batching.watched import GivenUp, until
from speculation.auto.drafter import known_asks
from speculation.chat.detokenizer import Token
from speculation.drafting.cost import SIZES
from speculation.engine import Engine
from speculation.meter import RecordedStep
from speculation.reply import Reply
from speculation.sampling import TokenLogprobs

CLOSE_SECONDS = 5.0  # how long ``close`` waits for what runs
MOST_WAITING = 256  # requests without a slot; more are refused
THREADS = {"load": 1, "embed": 1, "prepare": 2, "large": 2, "grammar": 1}
# What may take long to prepare, and the others do not wait for: so many bytes of a request,
# grammars, schemas with many properties or with parts that refer to each other or hold together,
# and marks of DRY.
LARGE, MANY = 2**18, 2**16
HARD = naming("dry_breakers", "grammar", "regex", "pattern", "patternProperties", "allOf", "$ref")
PROPERTIES = naming("properties")
HOLD_SECONDS = 30.0


class Serving:
    """An engine, its model, and the requests to it. Any thread may call any method."""

    def __init__(
        self,
        send: Callable[[int, Any], object],
        *,
        trace_batches: str | Path | None = None,
        memory: str | Path | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """``send`` gets each request's number and events, and 0 with every new status.

        ``trace_batches`` names a file that gets one JSON line per decode, ``memory`` one that keeps
        what the first model reads and writes. ``on_change`` is told that the report changed.
        """
        self._send = send
        self._slot = ModelSlot(trace_batches, memory, self._tell_status, self._alone)
        self._on_change = on_change
        self._changed = threading.Condition()  # holds for all below
        self._jobs: list[Job] = []  # as they came; each until it has ended and no thread has it
        self._is_replacing = False  # whether a load waits for replies or has the engine
        self._is_closed = False
        self._totals = Report()
        for lane, n_threads in THREADS.items():
            for _ in range(n_threads):
                threading.Thread(target=self._work, args=(lane,), name=lane, daemon=True).start()

    @property
    def status(self) -> Status:
        return self._slot.status

    def report(self) -> Report:
        with self._changed:
            replies = [job for job in self._jobs if job.is_reply and not job.has_ended]
            running = tuple(job.message.id for job in replies if job.has_begun)
            return replace(self._totals, running=running, n_waiting=len(replies) - len(running))

    def take_in(
        self, number: int, message: ModelSpec | ChatRequest | Question, body: bytes = b""
    ) -> None:
        """Do what the message with this number asks for. ``body`` is its written form."""
        job = Job(number, message, partial(self._send, number), _lane(body))
        with self._changed:
            if self._is_closed:
                job.emit(failure(QueueFull("the engine is closed")))
            elif sum(not one.has_begun for one in self._jobs) >= MOST_WAITING:
                many = f"{MOST_WAITING} requests wait already; try again later"
                job.emit(failure(QueueFull(many)))
            else:
                if job.is_load and (n_ahead := self._n_loads()):
                    job.waits(n_ahead, loading=True)
                self._jobs.append(job)
                self._tell_held()
                self._changed.notify_all()
        self._on_change()

    def cancel(self, number: int) -> None:
        """Stop a request. Its last event comes at once if the engine does not work on it."""
        for job in [job for job in list(self._jobs) if job.number == number]:
            job.cancel()  # without the lock, which the engine's thread may wait for
            with self._changed:
                if job in self._jobs and not job.is_taken:
                    self._jobs.remove(job)
                self._changed.notify_all()
            self._on_change()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Stop everything and free the model, unless a request that does not end still uses it.

        Returns whether all has ended within ``seconds``, but for a load that has freed the model
        before: nothing is lost with that. Idempotent.
        """
        with self._changed:
            self._is_closed = True
            left = [job.number for job in self._jobs]
        self._slot.is_closed = True
        for number in left:
            self.cancel(number)
        with self._changed:
            has_ended = self._changed.wait_for(self._is_free, seconds)
        if not self._jobs:
            self._slot.close()
        return has_ended

    def _is_free(self) -> bool:
        """Whether nobody uses the model, and no load has one to lose."""
        return all(job.is_load and self._slot.engine is None for job in self._jobs)

    def _tell_status(self, status: Status) -> None:
        self._send(0, status)
        with self._changed:
            self._changed.notify_all()

    def _n_loads(self) -> int:
        return sum(job.is_load for job in self._jobs)

    def _n_replies(self) -> int:
        """How many replies use the engine, or are prepared for it."""
        return sum(job.is_taken and job.is_reply for job in self._jobs)

    def _must_wait(self) -> bool:
        """Whether replies wait for a load."""
        return self._is_replacing or (self._slot.engine is None and self._n_loads() > 0)

    def _tell_held(self) -> None:
        if self._must_wait():
            held = [job for job in self._jobs if job.is_reply and not job.is_taken]
            for place, job in enumerate(held, 1):
                job.waits(place, loading=True)

    def _next(self, lane: str) -> Job | None:
        """What a thread of this lane can take."""
        for job in self._jobs:
            is_held = job.is_reply and self._must_wait()
            if job.lane == lane and not job.is_taken and not is_held:
                return job
        return None

    def _work(self, lane: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next(lane) is not None)
                job = self._next(lane)
                if self._is_closed or job is None:
                    return
                job.is_taken = True
            last: Event | None
            try:
                with until(partial(getattr, job, "is_cancelled")):
                    last = self._do(job)
            except GivenUp:
                last = job.stopped
            except Exception as error:
                last = failure(error)
            if last is not None:
                self._end(job, last)

    def _do(self, job: Job) -> Event | None:
        """Returns the last event; None if the engine goes on with it."""
        if job.is_load:
            job.has_begun, job.n_ahead = True, 0
        if isinstance(job.message, ModelSpec):
            return self._slot.load(job, job.message)
        if isinstance(job.message, Unload):
            return self._slot.unload(job)
        if isinstance(job.message, ChatRequest):
            return self._start(job, job.message)
        return answer_to(self._engine(), job.message)

    def _end(self, job: Job, last: Event) -> None:
        """End a request. Whoever hears of it finds it gone."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            job.emit(last)
            self._changed.notify_all()
        self._on_change()

    @contextmanager
    def _alone(self, load: Job) -> Iterator[None]:
        """Wait until nobody else uses the engine; nobody does inside. Raises GivenUp.

        New replies must not wait for the longest that runs, nor may they keep the load waiting for
        ever. So they are held in every second one of HOLD_SECONDS.
        """
        start = time.monotonic()
        try:
            with self._changed:
                while any(job.is_taken and job is not load for job in self._jobs):
                    if load.is_cancelled:
                        break
                    n_passed, passed = divmod(time.monotonic() - start, HOLD_SECONDS)
                    self._is_replacing = n_passed % 2 == 1
                    self._tell_held()
                    load.waits(self._n_replies())
                    self._changed.notify_all()
                    self._changed.wait(HOLD_SECONDS - passed)
                self._is_replacing = True
            if load.is_cancelled:
                raise GivenUp
            yield
        finally:
            with self._changed:
                self._is_replacing = False

    def _engine(self) -> Engine:
        """The engine, for a reply or question that was taken. Raises ModelError."""
        with self._changed:
            engine, is_loading = self._slot.engine, self._n_loads() > 0
            if engine is not None and not (self._is_replacing and not self._n_replies()):
                if not is_loading:
                    self._slot.forget_error()
                return engine
        if is_loading:
            raise ModelError("the model is being loaded; try again soon")
        why = self._slot.status.error or ""
        raise ModelError(f"no model is loaded; choose one and load it. {why}".strip())

    def _start(self, job: Job, request: ChatRequest) -> Event | None:
        """Prepare a reply and give it to the engine; returns the last event if that is over."""
        engine, job.n_ahead = self._engine(), 0

        def progress(done: int, total: int) -> None:
            if not job.has_begun:
                job.has_begun = True  # it has a slot
                self._on_change()
            job.emit(Prefill(done, total))

        asked = prepared(engine, request, job.emit, progress, job.waits)
        prompt = shown_prompt(engine, request, asked.prompt) if request.show_prompt else ""
        if job.has_ended:  # its client has left meanwhile
            return job.stopped
        job.text = text = engine.start(asked)
        if job.is_cancelled:
            text.cancel()
        released, n_steps = iter(text.logprobs), 0

        def take(item: list[Token] | Exception | None) -> None:
            nonlocal n_steps
            if len(text.steps) > n_steps:
                job.emit(_steps(engine.model, text.steps[n_steps:]))
                n_steps = len(text.steps)
            if isinstance(item, list):
                job.emit(_tokens(engine.model, item, islice(released, len(item))))
            elif isinstance(item, Exception):
                self._end(job, failure(item))
            else:
                drafting = _drafting(engine, text, self.status.model)
                if job.has_begun:
                    self._totals = replace(_added(self._totals, text), drafting=drafting)
                decode_ms = drafting.decode_ms if request.record else ()
                self._end(job, _done(text, self.status.model, prompt, decode_ms))

        text.forward(take)
        return None


def _lane(body: bytes) -> str:
    """Which threads prepare a request with this written form."""
    if len(body) > LARGE:
        return "large"
    is_hard = HARD.search(body) or (len(body) > MANY and PROPERTIES.search(body))
    return "grammar" if is_hard else "prepare"


def _tokens(model: Model, tokens: list[Token], found: Iterator[TokenLogprobs]) -> Tokens:
    return Tokens(
        tuple((token.text, token.drafted) for token in tokens),
        tuple(token.id for token in tokens),
        tuple(chances(model, token.id, one) for token, one in zip(tokens, found, strict=False)),
    )


def _steps(model: Model, steps: Sequence[RecordedStep]) -> Steps:
    def piece(token: int) -> str:
        return model.piece(token).decode("utf-8", "replace")

    return Steps(
        tuple(
            StepRecord(
                round(1e3 * step.draft_seconds, 3),
                round(1e3 * step.decode_seconds, 3),
                round(1e3 * step.accept_seconds, 3),
                step.n_rows,
                step.n_texts,
                tuple(Node(one.parent, piece(one.token), one.source) for one in step.drafts),
                tuple(step.path),
                "" if step.bonus is None or step.bonus in model.ends else piece(step.bonus),
            )
            for step in steps
        )
    )


def _drafting(engine: Engine, text: Reply, model: LoadedModel | None) -> Drafting:
    """What is known of drafts at the end of a text."""
    cost = engine.resources.kept.cost
    if cost is None or model is None:
        return Drafting()
    prices = cost.prices(len(text.prompt) + len(text.token_ids), engine.n_running)
    plain = prices.plain
    least = bisect_left(range(101), True, key=lambda percent: prices.pay(percent / 100))
    sources = tuple(
        Asking(name, asks.tokens, 1e3 * asks.seconds, 1e3 * asks.gain(plain), asks.tells)
        for name, asks in known_asks(engine.resources).items()
    )
    decode_ms = tuple(round(1e3 * prices.curve.at(n), 3) for n in range(1, SIZES[-1] + 1))
    return Drafting(model.load, decode_ms, least, sources)


_SUMS = "n_read n_reused n_tokens n_steps n_drafted n_accepted".split()
_COUNTS = [*_SUMS, "n_prompt", "n_first", "prefill_seconds", "first_seconds", "decode_seconds"]


def _added(totals: Report, text: Reply) -> Report:
    """The totals with those of a text that has ended."""
    stats, accepted = text.stats, Counter(dict(enumerate(totals.accepted)))
    for n_tokens, n_steps in stats.tokens_histogram.items():
        accepted.update(dict.fromkeys(range(n_tokens - 1), n_steps))
    return replace(
        totals,
        n_later=totals.n_later + max(0, stats.n_tokens - 1),
        prefill_seconds=totals.prefill_seconds + stats.prefill_seconds - stats.first_seconds,
        decode_seconds=totals.decode_seconds + stats.decode_seconds + stats.first_seconds,
        n_drafts=totals.n_drafts + stats.n_steps - stats.rows_histogram.get(1, 0),
        n_longest=max(totals.n_longest, stats.n_prompt + stats.n_tokens),
        accepted=tuple(accepted[position] for position in range(len(accepted))),
        **{name: getattr(totals, name) + getattr(stats, name) for name in _SUMS},
    )


def _done(text: Reply, model: LoadedModel | None, prompt: str, ms: tuple[float, ...]) -> Done:
    counts = {name: getattr(text.stats, name) for name in _COUNTS}
    return Done(
        text.finish_reason or "stop",
        str(text.method),
        model,
        stop_string=text.stop_string,
        prompt=prompt,
        decode_ms=ms,
        **counts,
    )
