"""Engine: loads a model and writes texts with any method. The API for users, bench and app."""

from __future__ import annotations

import atexit
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from batching.cache import SequenceCache
from batching.errors import InvalidParameter, SpeculationError
from batching.llama.context import Context
from batching.llama.model import Model
from batching.watched import checkpoint, until
from speculation.chat.detokenizer import ReplyText
from speculation.chat.template import ASSISTANT, Message, asks_for_thinking, chat_prompt
from speculation.drafter import Method
from speculation.drafting.resources import Resources
from speculation.driver import Driver
from speculation.embedding import Embeddings, normalised, split
from speculation.idle.files import TextFiles, identity_of, texts_folder
from speculation.methods import METHODS, SAVED
from speculation.registry import default_model
from speculation.reply import Reply
from speculation.request import Request
from speculation.runtime import LoadParams, Runtime
from speculation.sampling import SamplingParams, TokenLogprobs, prepare_sampler
from speculation.scheduler import Scheduler
from speculation.sequence import TokenSequence
from speculation.settings import Settings, as_method, request_for, tokens_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger(__name__)


def _takes(
    declared: Callable[P, object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Says of a method that it takes the arguments of ``declared``, to type checkers and help()."""

    def taking(method: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
        own = inspect.signature(declared)
        method.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[first, *own.parameters.values()], return_annotation="Engine"
        )
        method.__doc__ = f"{method.__doc__}\n\n{inspect.getdoc(declared)}"
        return method

    return taking


class Engine:
    """A model that writes texts, up to ``parallel`` at a time, with one decode for all of them.

    Everything is computed in a thread of the engine's own, so it may be used from any thread.
    ``generate``, ``chat`` and ``submit`` return at once with a ``Reply``, which is written whether
    or not anybody waits for its tokens. Close the engine, or use it as a context manager.
    """

    def __init__(
        self, driver: Driver, runtime: Runtime, scheduler: Scheduler, parallel: int
    ) -> None:
        """For ``load``."""
        self.parallel = parallel
        self._driver, self._runtime, self._scheduler = driver, runtime, scheduler
        self._embedding = threading.Lock()  # held while texts get vectors
        atexit.register(self.close)  # the thread must not compute while Python ends

    @classmethod
    @_takes(LoadParams)
    def load(cls, *arguments: Any, **keywords: Any) -> Engine:
        """Load a model."""
        source = LoadParams(*arguments, **keywords)
        source = replace(source, kinds=METHODS.heads_kinds(), saved=SAVED)
        name = str(default_model() if source.model is None else source.model)
        driver = Driver(name)
        opened: list[Engine] = []

        def open_engine() -> Engine:
            with until(lambda: driver.is_closed):
                opened.append(cls._opened(source, driver))
            return opened[0]

        def free() -> None:
            for engine in opened:
                engine._free()

        try:
            return driver.call(open_engine)
        except BaseException:  # perhaps Ctrl-C, when the engine was there
            driver.close(free)
            raise

    @classmethod
    def _opened(cls, source: LoadParams, driver: Driver) -> Engine:
        def progress(share: float) -> None:
            checkpoint()
            if source.progress is not None:
                source.progress(share)

        n = source.parallel
        runtime = Runtime.open(source, progress)
        try:
            scheduler = Scheduler(runtime, n, _text_files(runtime, source.keep_texts))
            driver.step, driver.idle = scheduler.step, runtime.rest
            return cls(driver, runtime, scheduler, n)
        except BaseException:
            runtime.close()
            raise

    # Texts

    def generate(self, prompt: str | Sequence[int], **settings: Unpack[Settings]) -> Reply:
        """Continue a prompt, given as text or as token ids; iterate over the result for tokens.

        Keyword arguments are the fields of ``Settings`` and ``SamplingParams``. Raises
        InvalidParameter, PromptTooLong; what the method finds wrong is raised when the result is
        iterated.
        """
        self._driver.check_open()
        return self.start(request_for(self.model, prompt, **settings))

    submit = generate

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        thinking: bool | None = None,
        **settings: Unpack[Settings],
    ) -> Reply:
        """Reply to a conversation in the GGUF's chat format. A string is one user message.

        Messages are ``{"role": "system" | "user" | "assistant", "content": "..."}``. If the last
        one is from the assistant, generation continues it. A prefix that is still in the KV cache
        is reused. ``thinking`` turns reasoning on or off, for models with ``has_thinking_switch``;
        None = the model's default. The rest as for ``generate``.
        """
        self._driver.check_open()
        messages = _messages(messages)
        prompt = chat_prompt(self.model, messages, thinking=thinking)
        request = request_for(self.model, prompt.tokens, prompt.opening, **settings)
        if prompt.stop:
            log.warning(
                "%s has no chat template: the conversation is written as a transcript, and the "
                "reply ends before the next turn",
                self.model.path,
            )
            request = replace(request, stop=(*request.stop, *prompt.stop))
        check_grammar(messages, request.sampling)
        return self.start(request)

    def generate_batch(
        self, prompts: Iterable[str | Sequence[int]], **settings: Unpack[Settings]
    ) -> list[Reply]:
        """Continue all ``prompts``; return when all texts have ended. An error, or Ctrl-C, ends all
        of them."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise InvalidParameter(f"prompts is {prompts!r:.60}; give a list, such as [text]")
        texts: list[Reply] = []
        try:
            texts.extend(self.generate(prompt, **settings) for prompt in prompts)
            for text in texts:
                text.run()
        except BaseException:
            for text in texts:
                text.cancel()
            raise
        return texts

    def start(self, request: Request) -> Reply:
        """Queue a request. As ``generate``. Raises GrammarError."""
        self._driver.check_open()
        prepare_sampler(request.sampling, self.model, self.context.n_ctx)
        structure = self._runtime.structures.start(request.sampling)
        written = ReplyText(self.model, request.stop, request.max_tokens, request.opening)
        wake, check_thread = self._driver.wake, self._driver.check_may_wait
        sequence = TokenSequence(request, written, structure, wake, check_thread)
        if not self._scheduler.submit(sequence):
            self._driver.check_open()  # it was closed meanwhile
        wake()
        return sequence.reply

    def score(self, prompt: str | Sequence[int], n_top: int = 0) -> list[TokenLogprobs]:
        """The log probabilities of a prompt's tokens from the second on, and of the ``n_top``
        likeliest at each place. Reads the prompt, and generates nothing.

        Raises as ``generate`` does.
        """
        found: list[TokenLogprobs] = []
        request = Request(
            tokens_of(self.model, prompt, "the prompt"),
            as_method("ar"),
            max_tokens=0,
            logprobs=n_top,
            scored=found.extend,
        )
        self.start(request).run()
        return found

    def count_tokens(
        self, messages: str | Sequence[Message], *, thinking: bool | None = None
    ) -> int:
        """The number of prompt tokens of a conversation; a string is one user message."""
        return len(chat_prompt(self.model, _messages(messages), thinking=thinking).tokens)

    def embed(
        self, texts: Sequence[str | Sequence[int]], *, check: Callable[[], object] = lambda: None
    ) -> Embeddings:
        """A vector of length 1 for each text, given as text or as token ids.

        They come from the embedding model, if one is loaded; else they are the means of the
        model's states after its last layer. Texts that are written go on between the pieces of a
        long one. ``check`` is called after each piece; an exception it raises ends the work.
        Raises InvalidParameter, PromptTooLong, UnsupportedModel.
        """
        self._driver.check_open()
        self._driver.check_thread()
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise InvalidParameter(f"texts is {texts!r:.60}; give a list of texts or of token ids")
        with self._embedding:
            embedder = self._runtime.embedder
            model = embedder.model
            tokens = split(model, texts, embedder.n_most)
            vectors = np.zeros((len(tokens), model.n_embd_out), np.float32)
            work = embedder.embed(tokens, vectors, self._scheduler.seconds_beside)
            while self._driver.call(lambda: next(work, False)):
                check()
        return Embeddings(normalised(vectors), tuple(map(len, tokens)))

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the chat template can turn the model's reasoning on or off."""
        return asks_for_thinking(self.model.chat_template)

    @property
    def embedding_model(self) -> str:
        """The path of the embedding model; empty if none was loaded."""
        return self._runtime.embedding_model

    @property
    def n_running(self) -> int:
        """How many texts have a slot."""
        return self._scheduler.n_running

    @property
    def n_waiting(self) -> int:
        """How many texts wait for one."""
        return self._scheduler.n_waiting

    # The rest

    def prepare(self, progress: Callable[[], None] | None = None) -> None:
        """Measure the cost of a decode now instead of when the engine is idle, in some seconds.

        ``progress`` is called meanwhile; an exception it raises ends the measurement. Does nothing
        if the cost is known, or if the model cannot drop rejected drafts and so never drafts.
        """
        self._driver.call(lambda: self._runtime.measure(progress))

    def unavailable(self) -> dict[str, SpeculationError]:
        """The methods that cannot run here with their usual parameters, by name, and why."""
        methods = [Method(spec, spec.params()) for spec in METHODS.values()]
        return self._driver.call(lambda: self._scheduler.unavailable(methods))

    def call(self, function: Callable[[], T]) -> T:
        """End all texts, and run ``function`` in the engine's thread, which alone may use
        ``context`` and ``cache``."""

        def run() -> T:
            self._scheduler.end_all()
            return function()

        return self._driver.call(run)

    def close(self) -> None:
        """End all texts, save what is to be kept, and free the context and the model. Idempotent.

        From any thread, but not from a callback: raises SpeculationError.
        """

        self._driver.check_thread()
        self._scheduler.cancel_all()  # a long decode ends sooner
        self._driver.close(self._free)

    def _free(self) -> None:
        atexit.unregister(self.close)
        self._scheduler.close()
        self._runtime.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Model:
        return self._runtime.model

    @property
    def context(self) -> Context:
        """The model's context. It may be replaced while no text runs."""
        return self._runtime.context

    @property
    def draft(self) -> Context | None:
        """The draft model's context."""
        return self._runtime.draft

    @property
    def resources(self) -> Resources:
        """What the methods share."""
        return self._runtime.resources

    @property
    def cache(self) -> SequenceCache:
        """The cache of the first slot."""
        return self._scheduler.places.places[0].cache


def check_grammar(messages: Sequence[Message], sampling: SamplingParams | None) -> None:
    """Raise InvalidParameter if a grammar would apply to the end of a reply."""
    last = messages[-1]
    is_begun = last["role"] == ASSISTANT and not last.get("tool_calls")
    if is_begun and sampling and sampling.has_structure:
        raise InvalidParameter(
            "a grammar or JSON schema applies to a whole reply and cannot continue one; leave "
            "it out, or remove the last message to start a new reply"
        )


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    if not isinstance(messages, Sequence):
        raise InvalidParameter(
            f"messages is {messages!r:.60}; give a text, or a list of messages with role and "
            f"content"
        )
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _text_files(runtime: Runtime, n_megabytes: int) -> TextFiles | None:
    """Where texts are kept on disk, if they are and can be."""
    if not n_megabytes:
        return None
    context, folder = runtime.context, texts_folder()
    identity = identity_of(
        runtime.model.path,
        context.params.kv_type,
        flash_attn=context.flash_attn,
        exact=context.params.exact,
    )
    try:
        return TextFiles(folder, identity, n_megabytes * 10**6)
    except OSError as error:
        log.warning("cannot keep texts in %s: %s", folder, error.strerror or error)
        return None
