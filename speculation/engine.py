"""Engine: a model in memory that continues texts by any method. What bench, app and users call."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from batching.cache import Cancelled, SequenceCache
from batching.context import Context, ContextParams
from batching.errors import CannotRewind, InvalidParameter
from batching.model import Model
from batching.sampler import SamplerChain
from batching.vocabulary import check_same_vocabulary
from speculation.cost import CostModel
from speculation.cost_measured import load_cost, save_cost
from speculation.decode import Emitted, decode
from speculation.drafter import Drafter, reader_of
from speculation.heads.eagle import HeadInContext
from speculation.heads.load import load_heads
from speculation.methods import Method, parse_method
from speculation.prompt import Message, chat_tokens
from speculation.registry import DEFAULT_MODEL as DEFAULT_MODEL
from speculation.registry import PAIRED, heads_for, paired_draft, resolve
from speculation.resources import Resources
from speculation.sampling import DraftDistribution, SamplingParams, make_sampler
from speculation.stats import Stats
from speculation.successors import load_successors

DEFAULT_METHOD = "auto"


class Token(NamedTuple):
    """A generated token.

    text     the characters that it completed: whole ones, so possibly none yet
    drafted  whether it came from a draft (else from the target itself)
    """

    id: int
    text: str
    drafted: bool


class Engine:
    """One model, one context, one text at a time. Close it or use it as a context manager."""

    def __init__(
        self,
        model: Model,
        context: Context,
        draft: Context | None = None,
        heads: Mapping[str, Any] | None = None,
    ) -> None:
        """``draft`` is the context of a draft model, whose vocabulary must be the model's.

        ``heads`` are drafting heads for the model, by method, as ``load_heads`` gives them.

        Raises VocabularyMismatch where it is not.
        """
        if draft is not None:
            check_same_vocabulary(model, draft.model)
            _require_rewind_of_draft(draft)
        self.model = model
        self.context = context
        self.draft = draft
        self.cache = SequenceCache(context)
        self.resources = Resources(
            self._measure_cost,
            can_rewind=context.can_rewind,
            draft=draft,
            heads=heads,
            successors=lambda: load_successors(model),
            draft_sampler=self._draft_sampler,
        )
        for head in self.resources.heads.values():
            if isinstance(head, HeadInContext):
                head.start(_head_params(context))
        self._running: Generation | None = None

    @classmethod
    def load(
        cls,
        model: str | Path = DEFAULT_MODEL,
        params: ContextParams | None = None,
        *,
        draft_model: str | Path | None = None,
        heads: str | Path | Sequence[str | Path] = (),
        n_gpu_layers: int | None = None,
        trace_batches: str | Path | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Load a GGUF by path, or by its name in models.txt.

        ``draft_model`` is a smaller model of the same vocabulary, for the methods draft and auto;
        ``"paired"`` takes the one that models.txt names for the model.
        ``heads`` are files of heads trained on this very model, one a method (docs/heads.md), or
        ``"paired"`` again.
        ``n_gpu_layers`` None offloads every layer where the library has a GPU; ``trace_batches``
        names a file that gets one JSON line for each decode; ``progress`` sees the share loaded.
        """
        loaded = Model(resolve(model), n_gpu_layers=n_gpu_layers, progress=progress)
        opened: list[Model | Context | HeadInContext] = [loaded]
        try:
            context = Context(loaded, params, trace=trace_batches)
            opened.append(context)
            given = [heads] if isinstance(heads, str | Path) else heads
            files = [resolve(name) for name in heads_for(model, given)]
            found = load_heads(files, loaded)
            opened += [head for head in found.values() if isinstance(head, HeadInContext)]
            if draft_model is None:
                return cls(loaded, context, heads=found)
            name = paired_draft(model) if draft_model == PAIRED else draft_model
            small = Model(resolve(name), n_gpu_layers=n_gpu_layers)
            opened.append(small)
            check_same_vocabulary(loaded, small)
            draft = Context(small, _draft_params(context))
            opened.append(draft)
            return cls(loaded, context, draft, found)
        except BaseException:
            for item in reversed(opened):
                item.close()
            raise

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method = DEFAULT_METHOD,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Generation:
        """Continue a prompt, given as text or as token ids; iterate over the result for tokens.

        ``max_tokens`` None goes on to the end of the context. ``stop`` strings end the text and do
        not appear in it. ``progress(done, total)`` and ``cancelled()`` concern prompt and steps.
        Starting a text ends the one before, should it still be running.
        """
        tokens = self.model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidParameter(f"max_tokens is {max_tokens}; give at least 1, or None")
        if isinstance(method, str):
            method = parse_method(method)
        self.stop_running()
        self._running = Generation(
            self,
            tokens,
            method,
            sampling or SamplingParams(),
            max_tokens,
            stop,
            progress,
            cancelled,
        )
        return self._running

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        method: str | Method = DEFAULT_METHOD,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Generation:
        """Reply to a conversation in the GGUF's chat format; a text is one user message.

        Messages are ``{"role": "system" | "user" | "assistant", "content": "..."}``. Only what the
        cache does not hold of it is decoded anew.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.generate(
            chat_tokens(self.model, messages),
            method=method,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            progress=progress,
            cancelled=cancelled,
        )

    def reserve(self, n_seq: int) -> None:
        """Have ``n_seq`` sequences in use; where the context has fewer, a new one takes its place.

        Raises InvalidParameter above 256, llama.cpp's limit.
        """
        context = self.context
        if n_seq > context.n_seq_max:
            wider = replace(
                context.params,
                n_ctx=context.n_ctx,
                n_seq_max=n_seq,
                flash_attn="on" if context.flash_attn else "off",
            )
            context.close()
            self.context = Context(self.model, wider, trace=context.trace_path)
            self.cache = SequenceCache(self.context)
        self.cache.reserve(n_seq)

    def prepare(self) -> None:
        """Measure now what a decode costs here, in a second or two, rather than in the first reply.

        It empties the cache. Later calls do nothing, nor does it for a model that cannot drop
        drafts: whatever a batch costs there, none will be tried.
        """
        if self.context.can_rewind:
            _ = self.resources.cost

    def _measure_cost(self) -> CostModel:
        self.cache.truncate(0)
        return load_cost(self.context)

    def method_drafters(self, method: Method) -> list[Drafter]:
        """The drafters of a method, for one text."""
        return method.drafters(self.resources)

    def _draft_sampler(self) -> DraftDistribution:
        sampling = self.resources.sampling
        return DraftDistribution(make_sampler(sampling, self.model), sampling.seed)

    def stop_running(self) -> None:
        """End the text that is being generated, if any; the cache stays clean and usable."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """Free context and model. Idempotent."""
        self.stop_running()
        if self.resources.known_cost is not None:
            save_cost(self.context, self.resources.known_cost)
        for head in self.resources.heads.values():
            if isinstance(head, HeadInContext):
                head.close()
        self.context.close()
        self.model.close()
        if self.draft is not None:
            self.draft.close()
            self.draft.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Generation:
    """A text in the making: iterate for tokens; read ``text``, ``stats`` and ``finish_reason``.

    finish_reason  None while it runs; then ``stop`` (end of generation or a stop string),
                   ``length`` (max_tokens), ``context`` (full) or ``cancelled``
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        method: Method,
        sampling: SamplingParams,
        max_tokens: int | None,
        stop: Sequence[str],
        progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self.prompt = list(prompt)
        self.method = method
        self.stats = Stats(n_prompt=len(prompt))
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._progress = progress
        self._cancelled = cancelled
        self._text = _Text(stop)
        self._tokens = self._run()

    @property
    def text(self) -> str:
        """The text so far, without a stop string and without control tokens at its end."""
        return self._text.shown

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def run(self) -> Generation:
        """Generate to the end, and return itself."""
        for _ in self._tokens:
            pass
        return self

    def close(self) -> None:
        """Stop here. The cache keeps what was generated and stays usable."""
        self._tokens.close()
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def _run(self) -> Generator[Token, None, None]:
        engine, stats = self._engine, self.stats
        engine.resources.sampling = self._sampling
        drafters = engine.method_drafters(self.method)
        _require_rewind(engine, self.method, drafters)
        sampler = make_sampler(self._sampling, engine.model)
        try:
            start = perf_counter()
            engine.reserve(1 + sum(drafter.n_branches for drafter in drafters))
            cache = engine.cache
            try:
                stats.n_reused = cache.prefill(
                    self.prompt[:-1],
                    progress=self._progress,
                    cancelled=self._cancelled,
                    reader=reader_of(drafters),
                )
            except Cancelled:
                self.finish_reason = "cancelled"
                return
            if isinstance(sampler, SamplerChain):
                sampler.accept_prompt(self.prompt)
            stats.prefill_seconds = perf_counter() - start
            verifier = self.method.verifier(engine.resources)
            for emitted in decode(
                cache,
                self.prompt,
                drafters,
                verifier,
                sampler,
                self._finish,
                stats,
                self._max_tokens,
            ):
                yield from self._tokens_of(emitted)
                if self._cancelled is not None and self._cancelled():
                    break
            if self.finish_reason is None:
                self.finish_reason = "cancelled"
            yield from self._text.rest()
        finally:
            if isinstance(sampler, SamplerChain):
                sampler.close()

    def _finish(self, token: int) -> str | None:
        """Why the text ends with ``token``, if it does. Asked once for each token, in order."""
        self.token_ids.append(token)
        model = self._engine.model
        if model.is_end_of_generation(token):
            self._text.add(token, b"")
            return "stop"
        self._text.add(token, model.piece(token))
        if self._text.stopped:
            return "stop"
        if self._max_tokens is not None and len(self.token_ids) >= self._max_tokens:
            return "length"
        return None

    def _tokens_of(self, emitted: Sequence[Emitted]) -> Iterator[Token]:
        for item in emitted:
            if item.finish_reason is not None:
                self.finish_reason = item.finish_reason
            yield from self._text.release(item.drafted)


class _Text:
    """Turns token pieces into whole characters, and keeps back what may become a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise InvalidParameter("a stop string is empty; leave it out")
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._full = ""
        self._held: list[tuple[int, str, bool]] = []  # id, text, drafted: not released yet
        self._n_released = 0
        self._next = 0

    @property
    def shown(self) -> str:
        return self._full

    def add(self, token: int, piece: bytes) -> None:
        """Take a token's bytes in; sets ``stopped`` when they complete a stop string."""
        text = self._decoder.decode(piece)
        before = len(self._full)
        self._full += text
        for stop in self._stop:
            at = self._full.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.stopped = True
                self._full = self._full[:at]
        self._ids.append(token)
        self._pieces.append(text)

    def release(self, drafted: bool) -> Iterable[Token]:
        """The tokens that can be shown once the next added one is known to be ``drafted``."""
        i = self._next
        self._next += 1
        if not self._stop:  # nothing is ever kept back
            text = self._pieces[i]
            self._n_released += len(text)
            return (Token(self._ids[i], text, drafted),)
        self._held.append((self._ids[i], self._pieces[i], drafted))
        if self.stopped:
            return self._cut()
        keep = max(_overlap(self._full, stop) for stop in self._stop)
        n_free = len(self._full) - keep
        shown = []
        while self._held and self._n_released + len(self._held[0][1]) <= n_free:
            shown.append(self._pop(self._held[0][1]))
        return shown

    def rest(self) -> Iterator[Token]:
        """What was kept back, once the text has ended; an unfinished character shows as U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        if tail and not self.stopped:
            self._full += tail
            if self._held:
                token, text, drafted = self._held[-1]
                self._held[-1] = (token, text + tail, drafted)
            elif self._ids:
                self._held.append((self._ids[-1], tail, False))
        yield from self._cut()

    def _cut(self) -> Iterator[Token]:
        while self._held:
            room = len(self._full) - self._n_released
            yield self._pop(self._held[0][1][: max(0, room)])

    def _pop(self, text: str) -> Token:
        token, _, drafted = self._held.pop(0)
        self._n_released += len(text)
        return Token(token, text, drafted)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def _draft_params(context: Context) -> ContextParams:
    """A draft context holds the same text as the target's, and a few leaves of a tree."""
    n_batch = min(context.n_batch, context.n_ctx)
    return replace(context.params, n_ctx=context.n_ctx, n_batch=n_batch, n_seq_max=16)


def _head_params(context: Context) -> ContextParams:
    """Heads with a context of their own hold the text as well, and compute as the target does."""
    flash_attn = "on" if context.flash_attn else "off"
    return replace(_draft_params(context), flash_attn=flash_attn)


def _require_rewind_of_draft(draft: Context) -> None:
    if not draft.can_rewind:
        raise CannotRewind(
            f"{draft.model.path} ({draft.model.description}) is recurrent or hybrid: it cannot "
            f"take its drafts back, so it cannot draft; take another draft model"
        )


def _require_rewind(engine: Engine, method: Method, drafters: Sequence[Drafter]) -> None:
    if drafters and not engine.context.can_rewind:
        raise CannotRewind(
            f"{engine.model.path} ({engine.model.description}) is recurrent or hybrid: its memory "
            f"cannot drop rejected drafts, so method {method.name} cannot run; use method ar"
        )
