"""Generation: one text that an engine makes, from its request to its last token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Protocol, TypedDict

from batching.cache import SequenceCache
from batching.errors import CannotRewind, InvalidParameter
from batching.llama.context import Context
from batching.llama.model import Model
from batching.llama.sampler import SamplerChain
from batching.target import Cancelled
from batching.tree import NO_LIMIT
from speculation.chat.detokenizer import ReplyText, Token
from speculation.chat.reasoning import answer_of
from speculation.continuation import Continuation, Emitted
from speculation.decode import decode
from speculation.drafter import Drafter, Requirements
from speculation.exclusive import Exclusive, in_use
from speculation.methods import Method, parse_method
from speculation.resources import Resources
from speculation.sampling import SamplingParams, make_sampler
from speculation.stats import Stats

DEFAULT_METHOD = "auto"


class Host(Protocol):
    """What a text needs of the engine that makes it."""

    model: Model
    context: Context
    cache: SequenceCache
    resources: Resources
    exclusive: Exclusive

    def method_drafters(self, method: Method) -> list[Drafter]:
        """The drafters of a method, for one text."""
        ...

    def widen(self, n_seq: int) -> None:
        """Have room for ``n_seq`` sequences, of which one is in use."""
        ...


class Settings(TypedDict, total=False):
    """How a text is made: the keyword arguments of ``Engine.generate`` and ``Engine.chat``.

    method      a name, ``name:parameter=value,…`` or a Method; ``auto`` by default
    sampling    how tokens are chosen; greedily by default
    max_tokens  most tokens; None goes on to the end of the context
    stop        strings that end the text and do not appear in it
    progress    called with the prompt tokens that were read, and all of them
    cancelled   asked while the prompt is read and between steps; True ends the text
    """

    method: str | Method
    sampling: SamplingParams | None
    max_tokens: int | None
    stop: Sequence[str]
    progress: Callable[[int, int], None] | None
    cancelled: Callable[[], bool] | None


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate: a prompt, and the fields of ``Settings``.

    prompt   token ids, at least one
    opening  the mark that begins the model's reasoning, where the prompt ends with it
    """

    prompt: tuple[int, ...]
    method: str | Method = DEFAULT_METHOD
    sampling: SamplingParams | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    progress: Callable[[int, int], None] | None = None
    cancelled: Callable[[], bool] | None = None
    opening: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidParameter("the prompt is empty; give at least one token")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidParameter(
                f"max_tokens is {self.max_tokens}; give at least 1, or None for no limit"
            )
        if isinstance(self.method, str):
            object.__setattr__(self, "method", parse_method(self.method))
        if self.sampling is None:
            object.__setattr__(self, "sampling", SamplingParams())


class Generation:
    """A text in the making: iterate for tokens; read ``text``, ``stats`` and ``finish_reason``.

    finish_reason  None while it runs, or where an error ended it; then ``stop`` (end of generation
                   or a stop string), ``length`` (max_tokens), ``context`` (full) or ``cancelled``
    """

    def __init__(self, engine: Host, request: GenerationRequest) -> None:
        assert isinstance(request.method, Method) and request.sampling is not None
        self.request = request
        self.prompt = list(request.prompt)
        self.method: Method = request.method
        self.stats = Stats(n_prompt=len(self.prompt))
        self.finish_reason: str | None = None
        self._engine = engine
        self._sampling: SamplingParams = request.sampling
        self._text = ReplyText(engine.model, request.stop, request.max_tokens)
        self.token_ids = self._text.ids
        self._tokens = self._run()
        self._thread = get_ident()  # which made the last step
        self._n_iterators = 0  # that began and were not dropped
        self._was_taken = False  # whether a text of another thread took its place

    @property
    def opening(self) -> str:
        """The mark that begins the reasoning, where the prompt ends with it."""
        return self.request.opening

    @property
    def text(self) -> str:
        """The text so far, without a stop string and without control tokens at its end."""
        return self._text.shown

    @property
    def answer(self) -> str:
        """The text without the reasoning before it; all of it while the model still reasons."""
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
        exclusive, steps, cancelled = self._engine.exclusive, self._steps(), self.request.cancelled
        try:
            while True:
                with exclusive:  # a step, or a run of plain ones
                    self._thread = get_ident()
                    emitted = next(steps, None)
                if emitted is None:
                    break
                yield from self._text.release(len(emitted.tokens), emitted.n_drafted)
                self.finish_reason = emitted.finish_reason
                if cancelled is not None and cancelled():
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
        engine, stats, cancelled = self._engine, self.stats, self.request.cancelled
        engine.resources.sampling = self._sampling
        drafters = engine.method_drafters(self.method)
        needed = Requirements.of_all(drafter.requires for drafter in drafters)
        if drafters:
            _check_rewind(engine.context, self.method, needed)
        sampler = make_sampler(self._sampling, engine.model, engine.context.n_ctx)
        try:
            start = perf_counter()
            _check_rows(engine.context, self.method, needed)
            if engine.context.n_rewind == NO_LIMIT:  # others have one sequence
                engine.widen(1 + needed.branches)
            cache: SequenceCache = engine.cache
            stats.n_reused = cache.prefill(
                self.prompt[:-1],
                progress=self.request.progress,
                cancelled=cancelled,
                reader=needed.prompt_reader,
                # Where states are read, every row has output, which a prompt's must not have.
                defer=not needed.reads_states,
            )
            if isinstance(sampler, SamplerChain):
                sampler.accept_prompt(self.prompt)
            stats.prefill_seconds = perf_counter() - start
            text = Continuation(
                cache=cache,
                tokens=list(self.prompt),
                drafters=drafters,
                verifier=self.method.verifier(engine.resources),
                sampler=sampler,
                text=self._text,
                stats=stats,
                max_length=len(self.prompt) + (self.request.max_tokens or NO_LIMIT),
            )
            yield from decode(text, cancelled)
        finally:
            if isinstance(sampler, SamplerChain):
                sampler.close()


def _is_executing(error: ValueError) -> bool:
    """Whether a generator was asked to go on, or to end, in the middle of a step."""
    return str(error) == "generator already executing"


def _check_rewind(context: Context, method: Method, needed: Requirements) -> None:
    """Refuse what a recurrent or hybrid model cannot do. Raises CannotRewind."""
    n_rewind, model = context.n_rewind, context.model
    what = f"{model.path} ({model.description}) is recurrent or hybrid: its memory"
    if not n_rewind:
        raise CannotRewind(
            f"{what} cannot drop rejected drafts, so method {method.name} cannot run; use method ar"
        )
    if n_rewind < NO_LIMIT and needed.rows > 1:
        raise CannotRewind(
            f"{what} holds one path of {n_rewind} drafts at most, and method {method.name} needs "
            f"branches beside each other; use auto or another method"
        )


def _check_rows(context: Context, method: Method, needed: Requirements) -> None:
    """Refuse a method whose step no batch can hold. Raises InvalidParameter."""
    if needed.rows > context.n_batch:
        # A batch holds no more than the context.
        setting = "n_ctx" if context.n_batch < context.params.n_batch else "n_batch"
        raise InvalidParameter(
            f"method {method.name} with these parameters decodes {needed.rows} rows at a time, and "
            f"a batch holds {context.n_batch} here; lower window, ngram or guesses, or raise "
            f"{{{setting}}}",
            settings=(setting,),
            requested=needed.rows,
            available=context.n_batch,
        )
