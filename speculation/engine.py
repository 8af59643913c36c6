"""Engine: a model in memory that continues texts by any method. What bench, app and users call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any

from batching.cache import SequenceCache
from batching.errors import (
    CannotRewind,
    ContextError,
    InvalidParameter,
    UnsupportedModel,
    VocabularyMismatch,
)
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.sampler import SamplerChain
from batching.llama.vocabulary import check_same_vocabulary, check_vocabulary
from batching.target import Cancelled
from batching.tree import NO_LIMIT
from speculation.auto.calibration import load_cost, save_cost
from speculation.auto.cost_curve import CostModel
from speculation.bigrams import load_successors
from speculation.chat.detokenizer import ReplyText
from speculation.chat.detokenizer import Token as Token
from speculation.chat.reasoning import answer_of
from speculation.chat.template import ASSISTANT, Message, asks_for_thinking, chat_prompt
from speculation.decode import Emitted, decode
from speculation.drafter import Drafter, reader_of, reads_states
from speculation.exclusive import Exclusive, in_use
from speculation.heads.eagle import HeadInContext
from speculation.heads.load import load_heads, require_no_heads
from speculation.methods import Method, parse_method
from speculation.registry import DEFAULT_MODEL as DEFAULT_MODEL
from speculation.registry import PAIRED, heads_for, paired_draft, resolve
from speculation.resources import Resources
from speculation.sampling import DraftDistribution, SamplingParams, make_sampler
from speculation.stats import Stats

DEFAULT_METHOD = "auto"


class Engine:
    """One model, one context, one text at a time. Close it or use it as a context manager.

    A text that is being iterated in another thread is not ended from here: ``generate``, ``chat``,
    ``reserve``, ``prepare``, ``stop_running`` and ``close`` then raise EngineInUse.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        draft: Context | None = None,
        heads: Mapping[str, Any] | None = None,
    ) -> None:
        """``draft`` is the context of a draft model, whose vocabulary must be the model's.

        ``heads`` are drafting heads for the model, by method, as ``load_heads`` gives them.

        Raises VocabularyMismatch where it is not, UnsupportedModel where the model has none.
        """
        check_vocabulary(model)
        if draft is not None:
            check_same_vocabulary(model, draft.model)
        self.model = model
        self.context = context
        self.draft = draft
        self.cache = SequenceCache(context)
        self.resources = Resources(
            self._measure_cost,
            n_rewind=context.n_rewind,
            draft=draft,
            heads=heads,
            successors=lambda: load_successors(model),
            draft_sampler=self._draft_sampler,
        )
        for head in self._heads_in_context():
            head.start(_head_params(context), context)
        self.exclusive = Exclusive()
        self._running: Generation | None = None
        self._preparing: Callable[[], None] | None = None

    @classmethod
    def load(
        cls,
        model: str | Path = DEFAULT_MODEL,
        params: ContextParams | None = None,
        *,
        draft_model: str | Path | None = None,
        heads: str | Path | Sequence[str | Path] = (),
        mtp: bool = True,
        n_gpu_layers: int | None = None,
        trace_batches: str | Path | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Load a GGUF by path, or by its name in models.txt.

        ``draft_model`` is a smaller model of the same vocabulary, for the methods draft and auto;
        ``"paired"`` takes the one that models.txt names for the model.
        ``heads`` are files of heads trained on this very model, one a method (docs/heads.md), or
        ``"paired"`` again. ``mtp`` loads what a model has of layers for multi-token prediction.
        ``n_gpu_layers`` None offloads every layer where the library has a GPU; ``trace_batches``
        names a file that gets one JSON line for each decode; ``progress`` sees the share of the
        model that is loaded, then that of the draft model, and what it raises ends the load.
        """
        loading = resolve(model)
        opened: list[Model | Context | HeadInContext] = []
        try:
            loaded = Model(loading, n_gpu_layers=n_gpu_layers, mtp=mtp, progress=progress)
            opened.append(loaded)
            context = Context(loaded, params, trace=trace_batches)
            opened.append(context)
            given = [heads] if isinstance(heads, str | Path) else heads
            files = [resolve(name) for name in heads_for(model, given)]
            found = load_heads(files, loaded)
            opened += [head for head in found.values() if isinstance(head, HeadInContext)]
            if draft_model is None:
                return cls(loaded, context, heads=found)
            name = paired_draft(model) if draft_model == PAIRED else draft_model
            loading = resolve(name)
            small = Model(loading, n_gpu_layers=n_gpu_layers, progress=progress)
            opened.append(small)
            check_same_vocabulary(loaded, small)
            draft = Context(small, _draft_params(context))
            opened.append(draft)
            draft.use_fewest_threads()
            return cls(loaded, context, draft, found)
        except BaseException as error:
            for item in reversed(opened):
                item.close()
            if isinstance(error, UnsupportedModel | VocabularyMismatch | ContextError):
                require_no_heads(loading)
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
        Raises EngineInUse where another thread iterates over that.
        """
        self._require_open()
        tokens = self._tokens(prompt)
        if not tokens:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if max_tokens is not None and max_tokens < 1:
            raise InvalidParameter(
                f"max_tokens is {max_tokens}; give at least 1, or None (0 in the chat) for no limit"
            )
        if isinstance(method, str):
            method = parse_method(method)
        with self.exclusive:
            self._end_running()
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

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.model.tokenize(prompt)
        tokens, most = list(prompt), self.model.n_vocab - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= most:
            wrong = next(token for token in tokens if not 0 <= token <= most)
            raise InvalidParameter(f"the prompt has token {wrong}; this model has 0 to {most}")
        return tokens

    def _require_open(self) -> None:
        _ = self.model.handle  # which raises where it is closed

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        method: str | Method = DEFAULT_METHOD,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Generation:
        """Reply to a conversation in the GGUF's chat format; a text is one user message, and a last
        message of the assistant is gone on with.

        Messages are ``{"role": "system" | "user" | "assistant", "content": "..."}``. Only what the
        cache does not hold of it is decoded anew. ``thinking`` tells a model that can be told
        (``can_be_told_to_think``) whether to think before it answers; None leaves that to it.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = chat_prompt(self.model, messages, thinking=thinking)
        if messages[-1]["role"] == ASSISTANT and sampling and sampling.has_grammar:
            raise InvalidParameter(
                "a grammar or JSON schema is for a whole reply, and this one has begun: leave it "
                "out to go on with the reply, or begin the reply anew"
            )
        generation = self.generate(
            prompt.tokens,
            method=method,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            progress=progress,
            cancelled=cancelled,
        )
        generation.opening = prompt.opening
        return generation

    def count_tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> int:
        """How many tokens ``chat`` would read of a conversation, as ``turns_to_leave_out`` asks."""
        return len(chat_prompt(self.model, messages, thinking=thinking).tokens)

    @property
    def can_be_told_to_think(self) -> bool:
        """Whether the model's chat template asks if it is to think before it answers."""
        return asks_for_thinking(self.model.chat_template)

    def reserve(self, n_seq: int) -> None:
        """Have room for ``n_seq`` sequences, of which one is in use until a tree needs more.

        Where the context has fewer, a new one takes its place. It ends a text that is running.
        Raises InvalidParameter above 256, llama.cpp's limit.
        """
        with self.exclusive:
            self._end_running()
            self._reserve(n_seq)

    def _reserve(self, n_seq: int) -> None:
        context = self.context
        if n_seq > context.n_seq_max:
            wider = replace(
                context.params,
                n_ctx=context.n_ctx,
                n_seq_max=n_seq,
                flash_attn="on" if context.flash_attn else "off",
            )
            attached = [head for head in self._heads_in_context() if head.attends_to_target]
            for head in attached:
                head.stop()
            context.close()
            try:
                self.context = Context(self.model, wider, trace=context.trace_path)
            except BaseException:
                self.context = Context(self.model, context.params, trace=context.trace_path)
                raise
            finally:
                self.cache = SequenceCache(self.context)
                for head in attached:
                    head.start(_head_params(self.context), self.context)
        self.cache.reserve(1)

    def prepare(self, progress: Callable[[], None] | None = None) -> None:
        """Measure now what a decode costs here, in a second or two, rather than in the first reply.

        ``progress`` is called while that goes on, and what it raises ends it.
        It empties the cache. Later calls do nothing, nor does it for a model that cannot drop
        drafts: whatever a batch costs there, none will be tried.
        """
        self._require_open()
        if not self.context.n_rewind or self.resources.known_cost is not None:
            return
        with self.exclusive:
            self._end_running()
            self._preparing = progress
            try:
                _ = self.resources.cost
            finally:
                self._preparing = None

    def _measure_cost(self) -> CostModel:
        self.cache.truncate(0)
        tell = self._preparing
        return load_cost(self.context, progress=None if tell is None else lambda _: tell())

    def method_drafters(self, method: Method) -> list[Drafter]:
        """The drafters of a method, for one text."""
        return method.drafters(self.resources)

    def _draft_sampler(self) -> DraftDistribution:
        sampling = self.resources.sampling
        sampler = make_sampler(sampling, self.model, self.context.n_ctx)
        return DraftDistribution(sampler, sampling.seed)

    def _heads_in_context(self) -> list[HeadInContext]:
        heads = self.resources.heads.values()
        return [head for head in heads if isinstance(head, HeadInContext)]

    def stop_running(self) -> None:
        """End the text that is being generated, if any; the cache stays clean and usable."""
        with self.exclusive:
            self._end_running()

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def close(self) -> None:
        """Free context and model. Idempotent.

        Raises EngineInUse, and frees nothing, while another thread generates.
        """
        with self.exclusive:
            if self.model.is_closed:
                return
            self._end_running()
            if self.resources.known_cost is not None:
                save_cost(self.context, self.resources.known_cost)
            for head in self._heads_in_context():
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

    finish_reason  None while it runs, or where an error ended it; then ``stop`` (end of generation
                   or a stop string), ``length`` (max_tokens), ``context`` (full) or ``cancelled``
    opening        the mark before thoughts, where the chat's prompt ends with it, so that the text
                   begins with them
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
        self.finish_reason: str | None = None
        self.opening = ""
        self._engine = engine
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._progress = progress
        self._cancelled = cancelled
        self._text = ReplyText(engine.model, stop, max_tokens)
        self.token_ids = self._text.ids
        self._tokens = self._run()
        self._thread = get_ident()  # which made the last step
        self._n_iterators = 0  # that began and were not dropped
        self._was_taken = False  # whether a text of another thread took its place

    @property
    def text(self) -> str:
        """The text so far, without a stop string and without control tokens at its end."""
        return self._text.shown

    @property
    def answer(self) -> str:
        """The text without what the model thought first; all of it while it thinks."""
        return answer_of(self.text, self.opening)

    def __iter__(self) -> Iterator[Token]:
        """Each iterator goes on where the last one stopped.

        Raises EngineInUse where another thread iterates, or has begun a text in its place.
        """
        self._n_iterators += 1
        try:
            for token in self._tokens:  # noqa: UP028 (a dropped iterator ends no text)
                yield token
        except ValueError as error:
            raise (in_use() if _is_executing(error) else error) from None
        finally:
            self._n_iterators -= 1
        if self._was_taken:
            raise in_use()

    def run(self) -> Generation:
        """Generate to the end, and return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here. The cache keeps what was generated and stays usable.

        Raises EngineInUse in the middle of another thread's step.
        """
        try:
            self._tokens.close()
        except ValueError as error:
            raise (in_use() if _is_executing(error) else error) from None
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def end(self) -> None:
        """Make room for another text. Raises EngineInUse while another thread iterates."""
        is_other = self._thread != get_ident()
        if is_other and self._n_iterators and self.finish_reason is None:
            raise in_use()
        self._was_taken = is_other and self.finish_reason is None
        self.close()

    def _run(self) -> Generator[Token, None, None]:
        exclusive, steps = self._engine.exclusive, self._steps()
        try:
            while True:
                with exclusive:  # a step, or a run of plain ones
                    self._thread = get_ident()
                    emitted = next(steps, None)
                if emitted is None:
                    break
                yield from self._text.release(len(emitted.tokens), emitted.n_drafted)
                self.finish_reason = emitted.finish_reason
                if self._cancelled is not None and self._cancelled():
                    break
            if self.finish_reason is None:
                self.finish_reason = "cancelled"
            yield from self._text.rest()
        except Cancelled:
            self.finish_reason = "cancelled"
        finally:
            with exclusive:
                steps.close()

    def _steps(self) -> Generator[Emitted, None, None]:
        engine, stats = self._engine, self.stats
        engine.resources.sampling = self._sampling
        drafters = engine.method_drafters(self.method)
        _require_rewind(engine, self.method, drafters)
        sampler = make_sampler(self._sampling, engine.model, engine.context.n_ctx)
        try:
            start = perf_counter()
            _require_rows(engine, self.method, drafters)
            if engine.context.n_rewind == NO_LIMIT:  # others have one sequence
                engine._reserve(1 + sum(drafter.n_branches for drafter in drafters))
            cache = engine.cache
            stats.n_reused = cache.prefill(
                self.prompt[:-1],
                progress=self._progress,
                cancelled=self._cancelled,
                reader=reader_of(drafters),
                # Where states are read, every row has output, which a prompt's are not to have.
                hold=not reads_states(drafters),
            )
            if isinstance(sampler, SamplerChain):
                sampler.accept_prompt(self.prompt)
            stats.prefill_seconds = perf_counter() - start
            verifier = self.method.verifier(engine.resources)
            yield from decode(
                cache,
                self.prompt,
                drafters,
                verifier,
                sampler,
                self._text,
                stats,
                self._max_tokens,
                self._cancelled,
            )
        finally:
            if isinstance(sampler, SamplerChain):
                sampler.close()


def _is_executing(error: ValueError) -> bool:
    """Whether a generator was asked to go on, or to end, in the middle of a step."""
    return str(error) == "generator already executing"


def _draft_params(context: Context) -> ContextParams:
    """A draft context holds the same text as the target's, and a few leaves of a tree."""
    n_batch = min(context.n_batch, context.n_ctx)
    return replace(context.params, n_ctx=context.n_ctx, n_batch=n_batch, n_seq_max=16)


def _head_params(context: Context) -> ContextParams:
    """Heads with a context of their own hold the text as well, and compute as the target does."""
    flash_attn = "on" if context.flash_attn else "off"
    return replace(_draft_params(context), flash_attn=flash_attn)


def _require_rewind(engine: Engine, method: Method, drafters: Sequence[Drafter]) -> None:
    n_rewind = engine.context.n_rewind
    what = f"{engine.model.path} ({engine.model.description}) is recurrent or hybrid: its memory"
    if drafters and not n_rewind:
        raise CannotRewind(
            f"{what} cannot drop rejected drafts, so method {method.name} cannot run; use method ar"
        )
    if n_rewind < NO_LIMIT and any(hasattr(drafter, "n_rows") for drafter in drafters):
        raise CannotRewind(
            f"{what} holds one path of {n_rewind} drafts at most, and method {method.name} needs "
            f"branches beside each other; use auto or another method"
        )


def _require_rows(engine: Engine, method: Method, drafters: Sequence[Drafter]) -> None:
    n_batch = engine.context.n_batch
    is_short = n_batch < engine.context.params.n_batch  # as many as the context, which has fewer
    for drafter in drafters:
        n_rows = getattr(drafter, "n_rows", 0)
        if n_rows > n_batch:
            raise InvalidParameter(
                f"method {method.name} with these parameters decodes {n_rows} rows at a time, and "
                f"a batch holds {n_batch} here; lower window, ngram or guesses, or raise "
                f"{'--ctx' if is_short else 'n_batch of ContextParams'}"
            )
