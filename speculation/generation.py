"""Generation: one text from its request to its last token."""

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
from batching.target import Cancelled, Sampler
from batching.tree import NO_LIMIT
from speculation.chat.detokenizer import ReplyText, Token
from speculation.chat.reasoning import answer_of
from speculation.continuation import Continuation, Emitted
from speculation.decode import decode
from speculation.drafter import Drafter, Requirements
from speculation.exclusive import Exclusive, in_use
from speculation.logprobs import RecordingSampler, TokenLogprobs
from speculation.methods import Method, parse_method
from speculation.resources import Resources
from speculation.sampling import SamplingParams, make_sampler
from speculation.stats import Stats
from speculation.verify import Match

DEFAULT_METHOD = "auto"


class Host(Protocol):
    """What a generation needs from its engine."""

    model: Model
    context: Context
    cache: SequenceCache
    resources: Resources
    exclusive: Exclusive

    def method_drafters(self, method: Method) -> list[Drafter]:
        """The drafters of a method for one text."""
        ...

    def fit(self, needed: Requirements) -> None:
        """Make the context fit ``needed``, with one sequence in use."""
        ...


class Settings(TypedDict, total=False):
    """Settings of a generation: the keyword arguments of ``Engine.generate`` and ``Engine.chat``.

    method      a name, ``name:parameter=value,…`` or a Method; default ``auto``
    sampling    how tokens are chosen; default greedy
    max_tokens  limit on generated tokens; None = up to the end of the context
    stop        strings that end the text; they are not part of it
    progress    called with the number of prompt tokens decoded so far, and their total
    cancelled   polled during the prefill and between steps; True ends the text
    logprobs    record each token's log probability and those of this many most likely tokens
    post_sampling  of the distribution that the sampler draws from, instead of the model's
    prediction  text or token ids that the reply is expected to equal for the most part, such as
                the file to edit: methods ``auto`` and ``prediction`` draft from it
    """

    method: str | Method
    sampling: SamplingParams | None
    max_tokens: int | None
    stop: Sequence[str]
    progress: Callable[[int, int], None] | None
    cancelled: Callable[[], bool] | None
    logprobs: int | None
    post_sampling: bool
    prediction: str | Sequence[int]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and the fields of ``Settings``.

    prompt   token ids, at least one
    opening  the opening mark of the reasoning if the prompt ends with it; else empty
    """

    prompt: tuple[int, ...]
    method: str | Method = DEFAULT_METHOD
    sampling: SamplingParams | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    progress: Callable[[int, int], None] | None = None
    cancelled: Callable[[], bool] | None = None
    logprobs: int | None = None
    post_sampling: bool = False
    prediction: str | Sequence[int] = ()
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
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidParameter(f"logprobs is {self.logprobs}; give 0 or more")


class Generation:
    """A running generation: iterate for tokens; read ``text``, ``stats`` and ``finish_reason``.

    finish_reason  ``stop`` (end-of-generation token or stop string), ``length`` (max_tokens),
                   ``context`` (full) or ``cancelled``; None while it runs or after an error
    logprobs       of ``token_ids``, in order, if the request asks for them; perhaps of a few more
    """

    def __init__(self, engine: Host, request: GenerationRequest) -> None:
        assert isinstance(request.method, Method) and request.sampling is not None
        self.request = request
        self.prompt = list(request.prompt)
        self.method: Method = request.method
        self.stats = Stats(n_prompt=len(self.prompt))
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._engine = engine
        self._sampling: SamplingParams = request.sampling
        self.prediction = _tokens_of(request.prediction, engine.model)
        self._text = ReplyText(engine.model, request.stop, request.max_tokens)
        self.token_ids = self._text.ids
        self._tokens = self._run()
        self._thread = get_ident()  # the thread of the last step
        self._n_iterators = 0  # iterators that are alive
        self._was_replaced = False  # whether another thread started a generation in its place

    @property
    def opening(self) -> str:
        """The opening mark of the reasoning if the prompt ends with it; else empty."""
        return self.request.opening

    @property
    def text(self) -> str:
        """The text so far, without a stop string or control tokens at its end."""
        return self._text.shown

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none did."""
        return self._text.stopped_by

    @property
    def answer(self) -> str:
        """The text without the reasoning; the whole text while the model is still reasoning."""
        return answer_of(self.text, self.opening)

    def __iter__(self) -> Iterator[Token]:
        """Iterate over the tokens; a new iterator continues where the last one stopped.

        Raises EngineInUse if another thread is iterating, or has started another generation.
        """
        self._n_iterators += 1
        try:
            for token in self._tokens:  # noqa: UP028 (dropping an iterator must not end the text)
                yield token
        except ValueError as error:
            raise (in_use() if _is_executing(error) else error) from None
        finally:
            self._n_iterators -= 1
        if self._was_replaced:
            raise in_use()

    def run(self) -> Generation:
        """Generate to the end; return self."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here. The KV cache keeps the text so far and stays usable.

        Raises EngineInUse while another thread is in a step.
        """
        try:
            self._tokens.close()
        except ValueError as error:
            raise (in_use() if _is_executing(error) else error) from None
        if self.finish_reason is None:
            self.finish_reason = "cancelled"

    def end(self) -> None:
        """Stop, to make room for another generation.

        Raises EngineInUse while another thread is iterating.
        """
        is_other = self._thread != get_ident()
        if is_other and self._n_iterators and self.finish_reason is None:
            raise in_use()
        self._was_replaced = is_other and self.finish_reason is None
        self.close()

    def _run(self) -> Generator[Token, None, None]:
        exclusive, steps, cancelled = self._engine.exclusive, self.steps(), self.request.cancelled
        try:
            while True:
                with exclusive:  # for one step, or one run of plain steps
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

    def continuation(
        self,
        cache: SequenceCache,
        drafters: Sequence[Drafter],
        sampler: Sampler,
        resources: Resources,
    ) -> Continuation:
        """The text as it starts, with its prompt in ``cache`` and given to ``sampler``."""
        if isinstance(sampler, SamplerChain):
            sampler.accept_prompt(self.prompt)
        verifier = self.method.verifier(resources)
        if self.request.logprobs is not None:
            if not isinstance(verifier, Match):
                raise InvalidParameter(
                    "logprobs are recorded as tokens are sampled, and with verify=rejection or "
                    "verify=typical-lossy not every token is; use verify=match"
                )
            sampler = RecordingSampler(
                sampler, self.request.logprobs, self.logprobs, after=self.request.post_sampling
            )
        return Continuation(
            cache=cache,
            tokens=list(self.prompt),
            drafters=drafters,
            verifier=verifier,
            sampler=sampler,
            text=self._text,
            stats=self.stats,
            max_length=len(self.prompt) + (self.request.max_tokens or NO_LIMIT),
        )

    def steps(self) -> Generator[Emitted, None, None]:
        """The text's steps, each when it is asked for. Closing it leaves the text in the cache."""
        engine, stats, cancelled = self._engine, self.stats, self.request.cancelled
        engine.resources.sampling = self._sampling
        engine.resources.prediction = self.prediction
        drafters = engine.method_drafters(self.method)
        needed = Requirements.of_all(drafter.requires for drafter in drafters)
        if drafters:
            check_rewind(engine.context, self.method, needed)
        sampler = make_sampler(self._sampling, engine.model, engine.context.n_ctx)
        try:
            start = perf_counter()
            _check_rows(engine.context, self.method, needed)
            if engine.context.n_rewind == NO_LIMIT:  # recurrent models have no branches
                engine.fit(needed)
            cache: SequenceCache = engine.cache
            stats.n_reused = cache.prefill(
                self.prompt[:-1],
                progress=self.request.progress,
                cancelled=cancelled,
                reader=needed.prompt_reader,
                # If states are read, every row of a step has output; a prompt's rows must not.
                defer=not needed.reads_states,
            )
            text = self.continuation(cache, drafters, sampler, engine.resources)
            stats.prefill_seconds = perf_counter() - start
            yield from decode(text, cancelled)
        finally:
            if isinstance(sampler, SamplerChain):
                sampler.close()


def _tokens_of(prediction: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """The tokens of a prediction. Raises InvalidParameter."""
    if isinstance(prediction, str):
        return tuple(model.tokenize(prediction, add_special=False))
    tokens = tuple(prediction)
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.n_vocab:
        raise InvalidParameter(
            f"the prediction has tokens from {min(tokens)} to {max(tokens)}; this model has 0 to "
            f"{model.n_vocab - 1}"
        )
    return tokens


def _is_executing(error: ValueError) -> bool:
    """Whether a generator was resumed or closed while another thread was inside it."""
    return str(error) == "generator already executing"


def check_rewind(context: Context, method: Method, needed: Requirements) -> None:
    """Raise CannotRewind if the method needs what a recurrent or hybrid model cannot do."""
    n_rewind, model = context.n_rewind, context.model
    what = f"{model.path} ({model.description}) is recurrent or hybrid: its memory"
    if not n_rewind:
        raise CannotRewind(
            f"{what} cannot drop rejected drafts, so method {method.name} cannot run; use method ar"
        )
    if n_rewind < NO_LIMIT and needed.rows > 1:
        raise CannotRewind(
            f"{what} allows only one path of at most {n_rewind} drafts, but method {method.name} "
            f"needs several branches; use auto or another method"
        )


def _check_rows(context: Context, method: Method, needed: Requirements) -> None:
    """Raise InvalidParameter if a step of the method does not fit in a batch."""
    if needed.rows > context.n_batch:
        # A batch is never larger than the context.
        setting = "n_ctx" if context.n_batch < context.params.n_batch else "n_batch"
        raise InvalidParameter(
            f"method {method.name} with these parameters decodes {needed.rows} rows at a time, but "
            f"a batch has at most {context.n_batch} here; lower window, ngram or guesses, or raise "
            f"{{{setting}}}",
            settings=(setting,),
            requested=needed.rows,
            available=context.n_batch,
        )
