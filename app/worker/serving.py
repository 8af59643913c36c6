"""The engine and the requests to it. The engine's queue is the only one in which a reply waits.

A few threads prepare requests and answer questions; one loads models; the engine has its own.
A load waits until no reply runs, and only then do new replies wait for it, until it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from app.worker.loading import ModelSlot, Stopped, Task
from app.worker.messages import (
    Chance,
    ChatRequest,
    Done,
    Event,
    Failed,
    LoadedModel,
    ModelSpec,
    Prefill,
    Question,
    Report,
    Status,
    Tokens,
    Waiting,
)
from app.worker.preparation import answer_to, prepared, shown_prompt
from app.worker.wording import QueueFull
from batching.errors import ModelError
from batching.llama.model import Model
from speculation.chat.detokenizer import Token
from speculation.engine import Engine
from speculation.sampling import TokenLogprobs
from speculation.text import Text

CLOSE_SECONDS = 5.0  # how long ``close`` waits for what runs
MOST_WAITING = 256  # requests without a slot; more are refused
PREPARING = 2  # threads

PassOn = Callable[[Event], object]
T = TypeVar("T", bound=Task)


class Load(Task):
    """A load of a model."""

    def __init__(self, spec: ModelSpec, pass_on: PassOn) -> None:
        super().__init__(pass_on, Failed(f"loading {spec.model} was stopped"))
        self.spec = spec


class Query(Task):
    """A question that needs the model."""

    def __init__(self, question: Question, pass_on: PassOn) -> None:
        super().__init__(pass_on, Failed("the question was withdrawn"))
        self.question = question


class Reply(Task):
    """A reply from its request to its last token.

    text     in the engine; None before
    n_ahead  how many others must end before it starts, as last told
    prompt   as the model reads it, if the request asks for it
    """

    def __init__(self, request: ChatRequest, pass_on: PassOn) -> None:
        super().__init__(pass_on, Done("cancelled", request.method))
        self.request = request
        self.text: Text | None = None
        self.n_ahead = 0
        self.prompt = ""

    def waits(self, n_ahead: int, *, loading: bool = False) -> None:
        """Tell how many are ahead, if that has changed."""
        if n_ahead and n_ahead != self.n_ahead:
            self.emit(Waiting(n_ahead, loading))
        self.n_ahead = n_ahead

    def cancel(self) -> None:
        super().cancel()
        if self.text is not None:
            self.text.cancel()


class Serving:
    """An engine, its model, and the requests to it. Any thread may call any method."""

    def __init__(
        self,
        *,
        trace_batches: str | Path | None = None,
        memory: str | Path | None = None,
        on_status: Callable[[Status], object] = lambda _: None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """``trace_batches`` names a file that gets one JSON line per decode, ``memory`` one that
        keeps what the first model reads and writes. ``on_status`` is told of every new status,
        ``on_change`` that the report changed."""
        self._slot = ModelSlot(trace_batches, memory, on_status, self._alone)
        self._on_change = on_change
        self._changed = threading.Condition()  # holds for all below
        self._arrived: list[Task] = []  # that no thread has taken yet
        self._taken: list[Task] = []  # by a thread, or by the engine
        self._is_replacing = False  # whether a load waits for replies or has the engine
        self._is_closed = False
        self._totals = Report()
        for name, loads in (("load", True), *[("prepare", False)] * PREPARING):
            threading.Thread(target=self._work, args=(loads,), name=name, daemon=True).start()

    @property
    def status(self) -> Status:
        return self._slot.status

    def report(self) -> Report:
        with self._changed:
            replies = [one for one in self._all(Reply) if not one.has_ended]
            running = tuple(one.request.id for one in replies if one.has_begun)
            return replace(self._totals, running=running, n_waiting=len(replies) - len(running))

    def load(self, spec: ModelSpec, pass_on: PassOn) -> Task:
        """Replace the model. Emits Waiting, Loading, then Loaded or Failed."""
        return self._take_in(Load(spec, pass_on))

    def reply(self, request: ChatRequest, pass_on: PassOn) -> Task:
        """Reply to a conversation. Emits Waiting, LeftOut, Opening, Prefill, Tokens, then Done or
        Failed."""
        return self._take_in(Reply(request, pass_on))

    def ask(self, question: Question, pass_on: PassOn) -> Task:
        """Answer a question. Emits Answer or Failed."""
        return self._take_in(Query(question, pass_on))

    def cancel(self, task: Task) -> None:
        """Stop a request. Its last event comes at once if the engine does not work on it."""
        task.cancel()  # without the lock, which the engine's thread may wait for
        with self._changed:
            if task in self._arrived:
                self._arrived.remove(task)
            self._changed.notify_all()
        self._on_change()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Stop everything and free the model, unless a request that does not end still uses it.

        Returns whether all has ended within ``seconds``. Idempotent.
        """
        with self._changed:
            self._is_closed = True
            left = [*self._arrived, *self._taken]
        for task in left:
            self.cancel(task)
        deadline = time.monotonic() + seconds
        while self._taken and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._taken:
            self._slot.close()
        return not self._taken

    def _take_in(self, task: Task) -> Task:
        with self._changed:
            if self._is_closed:
                task.fail(QueueFull("the engine is closed"))
            elif len([one for one in self._all(Task) if not one.has_begun]) >= MOST_WAITING:
                task.fail(QueueFull(f"{MOST_WAITING} requests wait already; try again later"))
            else:
                if isinstance(task, Load) and (n_ahead := len(self._all(Load))):
                    task.emit(Waiting(n_ahead, loading=True))
                self._arrived.append(task)
                self._tell_held()
                self._changed.notify_all()
        self._on_change()
        return task

    def _all(self, kind: type[T]) -> list[T]:
        return [one for one in (*self._taken, *self._arrived) if isinstance(one, kind)]

    def _n_replies(self) -> int:
        """How many replies use the engine, or are prepared for it."""
        return sum(isinstance(one, Reply) for one in self._taken)

    def _must_wait(self) -> bool:
        """Whether replies wait for a load."""
        return self._is_replacing or (self._slot.engine is None and bool(self._all(Load)))

    def _tell_held(self) -> None:
        if self._must_wait():
            replies = [one for one in self._arrived if isinstance(one, Reply)]
            for place, reply in enumerate(replies, 1):
                reply.waits(place, loading=True)

    def _next(self, loads: bool) -> Task | None:
        """What a thread can take, one for loads or one for all else."""
        for task in self._arrived:
            is_held = isinstance(task, Reply) and self._must_wait()
            if isinstance(task, Load) == loads and not is_held:
                return task
        return None

    def _work(self, loads: bool) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next(loads) is not None)
                task = self._next(loads)
                if self._is_closed or task is None:
                    return
                self._arrived.remove(task)
                self._taken.append(task)
            try:
                self._do(task)
            except Exception as error:
                task.fail(error)
            if not isinstance(task, Reply) or task.text is None:
                self._forget(task)

    def _do(self, task: Task) -> None:
        if isinstance(task, Query):
            task.emit(answer_to(self._engine(), task.question))
        elif isinstance(task, Reply):
            self._start(task)
        elif isinstance(task, Load):
            task.has_begun = True
            last = self._slot.load(task, task.spec)
            self._forget(task)
            task.emit(last)

    def _forget(self, task: Task) -> None:
        """A request has ended."""
        with self._changed:
            if task in self._taken:
                self._taken.remove(task)
            self._changed.notify_all()
        self._on_change()

    @contextmanager
    def _alone(self, task: Task) -> Iterator[None]:
        """Wait until no reply runs; nobody else uses the engine inside. Raises Stopped."""
        with self._changed:
            self._is_replacing = True
            try:
                self._tell_held()
                while (n_running := self._n_replies()) and not task.is_cancelled:
                    task.emit(Waiting(n_running))
                    self._changed.wait()
                if task.is_cancelled:
                    raise Stopped
                self._changed.wait_for(lambda: self._taken == [task])  # no question, either
            except BaseException:
                self._is_replacing = False
                raise
        try:
            yield
        finally:
            with self._changed:
                self._is_replacing = False

    def _engine(self) -> Engine:
        """The engine, for a reply or question that was taken. Raises ModelError."""
        with self._changed:
            engine, is_loading = self._slot.engine, bool(self._all(Load))
            if engine is not None and not (self._is_replacing and not self._n_replies()):
                if not is_loading:
                    self._slot.forget_error()
                return engine
        if is_loading:
            raise ModelError("the model is being loaded; try again soon")
        why = self._slot.status.error or ""
        raise ModelError(f"no model is loaded; choose one and load it. {why}".strip())

    def _start(self, reply: Reply) -> None:
        """Prepare a reply and give it to the engine."""
        engine, request, reply.n_ahead = self._engine(), reply.request, 0

        def progress(done: int, total: int) -> None:
            self._begin(reply)
            reply.emit(Prefill(done, total))

        asked = prepared(engine, request, reply.emit, progress, reply.waits)
        if request.show_prompt:
            reply.prompt = shown_prompt(engine, request, asked.prompt)
        if reply.has_ended:  # its client has left meanwhile
            return
        reply.text = text = engine.start(asked)
        if reply.is_cancelled:
            text.cancel()
        released = iter(text.logprobs)

        def take(item: list[Token] | Exception | None) -> None:
            if isinstance(item, list):
                if item:
                    if not reply.has_begun:
                        self._begin(reply)
                    reply.emit(_tokens(engine.model, item, islice(released, len(item))))
                return
            if isinstance(item, Exception):
                reply.fail(item)
            else:
                if reply.has_begun:
                    self._totals = _added(self._totals, text)
                reply.emit(_done(text, self.status.model, reply.prompt))
            self._forget(reply)

        text.forward(take)

    def _begin(self, reply: Reply) -> None:
        """A reply has a slot."""
        with self._changed:
            reply.has_begun = True
        self._on_change()


def _tokens(model: Model, tokens: list[Token], found: Iterator[TokenLogprobs]) -> Tokens:
    def chance(token: int, logprob: float) -> Chance:
        return Chance(token, model.piece(token), logprob)

    return Tokens(
        tuple((token.text, token.drafted) for token in tokens),
        tuple(token.id for token in tokens),
        tuple(
            (chance(token.id, one.logprob), tuple(chance(*other) for other in one.top))
            for token, one in zip(tokens, found, strict=False)
        ),
    )


def _added(totals: Report, text: Text) -> Report:
    """The totals with those of a text that has ended."""
    stats = text.stats
    n_positions = max((n - 1 for n in stats.tokens_histogram), default=0)
    counts = [*totals.accepted, *[0] * (n_positions - len(totals.accepted))]
    for n_tokens, n_steps in stats.tokens_histogram.items():
        for position in range(n_tokens - 1):
            counts[position] += n_steps
    return Report(
        n_requests=totals.n_requests + 1,
        n_read=totals.n_read + stats.n_prompt - stats.n_reused,
        n_reused=totals.n_reused + stats.n_reused,
        n_tokens=totals.n_tokens + stats.n_tokens,
        n_steps=totals.n_steps + stats.n_steps,
        n_drafts=totals.n_drafts + stats.n_steps - stats.rows_histogram.get(1, 0),
        n_drafted=totals.n_drafted + stats.n_drafted,
        n_accepted=totals.n_accepted + stats.n_accepted,
        prefill_seconds=totals.prefill_seconds + stats.prefill_seconds,
        decode_seconds=totals.decode_seconds + stats.decode_seconds,
        n_longest=max(totals.n_longest, stats.n_prompt + stats.n_tokens),
        accepted=tuple(counts),
    )


def _done(text: Text, model: LoadedModel | None, prompt: str) -> Done:
    stats = text.stats
    return Done(
        finish_reason=text.finish_reason or "stop",
        method=str(text.method),
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
        stop_string=text.stop_string,
        prompt=prompt,
    )
