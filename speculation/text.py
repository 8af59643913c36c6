"""Text: a request being served. It reads its prompt, drafts, accepts, ends, and hands out tokens.

A text waits for a place, reads its prompt piece by piece, and is then written. ``propose`` and
``rows`` are the first half of a step, ``accept`` is the second; between the two comes one decode,
whose batch may have the rows of several texts (``decode``). One thread does all that, the engine's.
Whoever asked for the text takes its tokens in any other thread, or in an event loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

from batching.cache import Reading, SequenceCache, common_prefix
from batching.clock import now
from batching.errors import InvalidParameter, SpeculationError
from batching.llama.sampler import SamplerChain
from batching.rows import Rows, n_sequences, tree_rows
from batching.target import Output, Sampler
from batching.together import Coroutine, own_time
from batching.tree import NO_LIMIT, TokenTree, keep_leaves
from speculation.chat.detokenizer import Token
from speculation.chat.reasoning import answer_of
from speculation.drafter import (
    DraftBudget,
    Drafter,
    Method,
    PlainSteps,
    Requirements,
    Step,
    drafted,
)
from speculation.drafting.cost import Cost
from speculation.request import Request
from speculation.sampling import RecordingSampler, TokenLogprobs
from speculation.stats import Stats
from speculation.steps import Draft, RecordedStep, drafts_of
from speculation.structure import Structure
from speculation.system.channel import Channel
from speculation.verify import Match, Verifier

log = logging.getLogger(__name__)

FRAME_SECONDS = 0.016  # about that of a display, so that a text appears smoothly
_MAX_FRAMES = 4  # that tokens wait for others of their text, if many texts are written
ROOM = 64  # rows of a step, and cells beyond the last token, that any text may use


class TextSink(Protocol):
    """Takes a text's tokens, and decides where it ends. Implemented by ``ReplyText``.

    ids    the tokens so far
    shown  the characters so far
    stopped_by  the stop string that ended the text; empty if none did
    ends   tokens that may end the text for a reason other than its length
    """

    ids: list[int]
    stopped_by: str
    ends: Container[int]

    @property
    def shown(self) -> str: ...

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Add tokens in order. Returns how many of them belong to the text, and why the text ends
        after those, or None.

        A text may end in the middle of an accepted path; the tokens after its end are discarded.
        """
        ...

    def release(self, n: int, n_drafted: int) -> Iterable[Token]:
        """The next ``n`` tokens, the first ``n_drafted`` of them drafted, as far as they can be
        shown."""
        ...

    def rest(self) -> Iterable[Token]:
        """What is still held back when the text has ended."""
        ...


class Emitted(NamedTuple):
    """The tokens that a step, or a run of plain steps, added to the text.

    tokens         in order
    n_drafted      how many of them, from the first, were drafted: all, or all but the last
    finish_reason  why the text ends after the last token, or None
    """

    tokens: list[int]
    n_drafted: int
    finish_reason: str | None = None


class Text:
    """A request being served; iterate over it for its tokens, with ``for`` or ``async for``.

    It runs whether or not anybody iterates. Leaving a loop early cancels it; ``next`` takes one
    token and cancels nothing. An error ends it and is raised where it is iterated.

    For whoever asked:

    request        what was asked
    stats          counters and times
    finish_reason  ``stop`` (end-of-generation token or stop string), ``length`` (max_tokens),
                   ``context`` (full) or ``cancelled``; None while it runs or after an error
    error          what ended it instead
    logprobs       of ``token_ids``, in order, if the request asks for them; perhaps of a few more
    steps          in order, if the request asks for them

    For the engine's thread:

    cache       its part of the context. Has the prompt except its last token, the root of the
                first step. That step also decodes the deferred end of the prompt, so its time
                counts as prefill: the time to the first token
    tokens      the text so far, including the prompt
    chooser     the drafter among whose drafts the loop chooses, or None
    needed      what its drafters need of the target
    structure   what its schema or grammar allows next, or None
    reading     its prompt on the way into the cache; None before and after
    tree        the present step's tree; a lone root if the step is plain
    budget      the limits on that tree
    unseen      plain steps that the drafters have not seen yet
    written_since  when the first step had ended
    """

    def __init__(
        self,
        request: Request,
        reply: TextSink,
        wake: Callable[[], None] = lambda: None,
        check_thread: Callable[[], None] = lambda: None,
        structure: Structure | None = None,
    ) -> None:
        """``wake`` tells the engine's thread that something changed; ``check_thread`` raises
        SpeculationError in that thread, which must not wait for tokens that it has to write, and in
        a forked child, where nobody writes them."""
        self.request = request
        self.structure = structure
        self.stats = Stats(n_prompt=len(request.prompt))
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.steps: list[RecordedStep] = []
        self.submitted = now()
        self.is_cancelled = False
        self.has_ended = False
        self.reply = reply
        self.tokens = list(request.prompt)
        self.max_length = len(request.prompt) + (request.max_tokens or NO_LIMIT)
        self.reading: Reading | None = None
        self.drafters: Sequence[Drafter] = ()
        self.needed = Requirements()
        self._wake, self._check_thread = wake, check_thread
        self._chain: Sampler | None = None  # as it was given; None before ``start``
        self._has_begun = False
        self._ended = threading.Event()
        self._channel: Channel[list[Token]] = Channel()
        self._emitted: Emitted | None = None  # by the last step, and not handed out yet
        self._frame: list[Token] = []  # tokens not passed on yet
        self._passed_on = -inf  # when others were, last
        self._taken: deque[Token] = deque()  # from the channel, for ``next``
        self.n_ahead = 0  # requests that are known to come first

    # For whoever asked

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return list(self.request.prompt)

    @property
    def method(self) -> Method:
        return self.request.method

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, including one that ended the text."""
        return self.reply.ids

    @property
    def text(self) -> str:
        """The text so far, without a stop string or control tokens at its end."""
        return self.reply.shown

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; empty if none did."""
        return self.reply.stopped_by

    @property
    def opening(self) -> str:
        """The opening mark of the reasoning if the prompt ends with it; else empty."""
        return self.request.opening

    @property
    def answer(self) -> str:
        """The text without the reasoning; the whole text while the model is still reasoning."""
        return answer_of(self.text, self.opening)

    def __next__(self) -> Token:
        self._check_may_wait()
        while True:
            with suppress(IndexError):
                return self._taken.popleft()
            if (tokens := self._channel.get()) is None:
                raise StopIteration
            self._taken += tokens

    def __iter__(self) -> Iterator[Token]:
        self._check_may_wait()
        try:
            while (token := next(self, None)) is not None:
                yield token
        finally:
            if not self.has_ended:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[Token]:
        self._check_may_wait()
        groups = aiter(self._channel)
        try:
            while self._taken:
                yield self._taken.popleft()
            async for tokens in groups:
                for token in tokens:
                    yield token
        finally:
            if not self.has_ended:
                self.cancel()

    def run(self) -> Text:
        """Wait for the end; return self. Raises the error that ended the text.

        The caller sleeps until then: to wake it for each group of tokens takes a core from a small
        model's decode.
        """
        self._check_may_wait()
        try:
            while not self._ended.wait(1.0):  # on Windows, Ctrl-C does not interrupt an endless one
                pass
        finally:
            if not self.has_ended:
                self.cancel()
        if self.error is not None:
            raise self.error
        return self

    def _check_may_wait(self) -> None:
        if not self.has_ended:
            self._check_thread()

    def forward(self, listener: Callable[[list[Token] | Exception | None], object]) -> None:
        """Call ``listener`` with each group of tokens, in the engine's thread, then with None, or
        with the error that ended the text."""
        self._channel.forward(listener)

    def cancel(self) -> None:
        """End the text within a step. What was generated stays readable. From any thread."""
        self.is_cancelled = True
        self._wake()

    # Its beginning and its end

    def tell_waiting(self, n_ahead: int) -> None:
        """``n_ahead`` requests are ahead of this one."""
        if n_ahead != self.n_ahead:
            self.n_ahead = n_ahead
            if self.request.waiting is not None:
                self.request.waiting(n_ahead)

    def start(
        self,
        cache: SequenceCache,
        drafters: Sequence[Drafter],
        verifier: Verifier,
        sampler: Sampler,
    ) -> None:
        """Begin to read the prompt into ``cache``."""
        self.cache, self.drafters = cache, drafters
        self.verifier, self._sampler, self._chain = verifier, sampler, sampler
        self.needed = Requirements.of_all(drafter.requires for drafter in drafters)
        choosers = [drafter for drafter in drafters if isinstance(drafter.cost, Cost)]
        self.chooser = choosers[0] if choosers else None
        self.tree, self.budget = TokenTree(self.tokens[-1]), DraftBudget()
        self.is_plain_step = self._is_plain = False
        self._looked_at = 0  # the tokens after which the drafters were asked for their promise
        self.unseen = PlainSteps([], [])
        self.started = self.written_since = now()  # the step; at first the text
        self.draft_seconds = self._build_seconds = 0.0
        self._rows = Rows([], [], [], [])
        if isinstance(sampler, SamplerChain):
            sampler.accept_prompt(self.request.prompt)
        if self.request.logprobs is not None:
            if not isinstance(verifier, Match):
                raise InvalidParameter(
                    "logprobs are recorded as tokens are sampled, and with verify=rejection not "
                    "every token is; use verify=match"
                )
            self._sampler = RecordingSampler(
                sampler, self.request.logprobs, self.logprobs, after=self.request.post_sampling
            )
        self.sample = self._plain_sampling()
        self.reading = self._read(cache)
        self.stats.n_reused = self.reading.n_reused
        self.tell_progress()

    def _read(self, cache: SequenceCache) -> Reading:
        """The prompt on its way into ``cache``."""
        # If states are read, every row of a step has output; a prompt's rows must not.
        defer = not self.needed.reads_states
        reader = self.needed.prompt_reader
        ends = self.reply.ends
        return Reading(cache, self.request.prompt[:-1], reader, defer=defer, turn_ends=ends)

    def _plain_sampling(self) -> Callable[[Output, int], int]:
        """The function that chooses the next token after a single row."""
        verifier, sampler = self.verifier, self._sampler
        if type(verifier) is Match:
            return sampler.sample  # the same as ``Match.verify`` here, but faster
        tree = TokenTree(self.tokens[-1])
        return lambda output, row: verifier.verify(tree, output, sampler)[1]

    @property
    def is_writing(self) -> bool:
        """Whether its prompt is read, but for what the first step decodes."""
        return self.reading is None

    @property
    def room(self) -> int:
        """Rows that its step may need in a batch, and cells beyond its last token."""
        return max(ROOM, self.needed.rows)

    def next_piece(self, max_rows: int) -> Rows | None:
        """The next rows of its prompt, at most ``max_rows``; None if writing can begin."""
        assert self.reading is not None
        rows = self.reading.next_rows(max_rows)
        if rows is None:
            self._end_reading()
        return rows

    def take_piece(self, output: Output | None) -> None:
        """A piece of the prompt was decoded; see ``Reading.take``."""
        assert self.reading is not None
        self.reading.take(output)
        self.tell_progress()

    def tell_progress(self, n_more: int = 0) -> None:
        """How much of the prompt is read, ``n_more`` tokens beyond what is decoded."""
        if self.request.progress is not None:
            self.request.progress(self.n_read + n_more, len(self.request.prompt) - 1)

    @property
    def n_read(self) -> int:
        """Its tokens that are decoded."""
        return len(self.cache.tokens) - self.cache.n_deferred

    def n_shared(self, prompt: Sequence[int]) -> int:
        """How much of ``prompt`` can be taken over once its own is read."""
        assert self.reading is not None
        return self.reading.n_shared(common_prefix(self.request.prompt[:-1], prompt))

    def _end_reading(self) -> None:
        reading, self.reading = self.reading, None
        assert reading is not None
        reading.close()

    def end(self, reason: str) -> None:
        """The text ends, for ``reason``, or with the error of something that ends with it."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._chain is not None and not self.stats.n_steps:  # it has read, at most
            self.stats.n_read = max(
                0, self.cache.n_past - self.cache.n_deferred - self.stats.n_reused
            )
            self.stats.prefill_seconds = now() - self.started
        self._try(self._flush_rest)
        for work in self._leaving():
            self._try(work)
        if self.error is None:
            self.finish_reason = reason
        self._try(lambda: self._channel.put(self.error))
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """The text ends with an error. Raises nothing: other texts go on."""
        if not self.has_ended:
            self.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self.end("")

    def _try(self, work: Callable[[], object]) -> None:
        """Do some work of the end. An error is the text's, and keeps nobody from the rest."""
        try:
            work()
        except BaseException as error:
            if not isinstance(error, SpeculationError):
                log.warning("at the end of a text: %r", error)
            if self.error is None:
                self.error = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _flush_rest(self) -> None:
        self.hand_out()
        self._frame += self.reply.rest()
        self.flush()

    def _leaving(self) -> list[Callable[[], object]]:
        """What leaves the text in the cache, less its last token, and gives it to the drafters."""
        work: list[Callable[[], object]] = []
        if self.reading is not None:
            work.append(self.reading.close)
        elif self._has_begun:
            target = self.cache.target
            work += [
                self.show_plain,
                lambda: target.want_hidden(False),
                lambda: target.want_layers(()),
                lambda: target.want_logits(False),
                lambda: self.cache.truncate(min(len(self.tokens) - 1, self.cache.n_past)),
                *[lambda drafter=drafter: drafter.end(self.tokens) for drafter in self.drafters],
            ]
        if isinstance(self._chain, SamplerChain):
            work.append(self._chain.close)
        return work

    # A step

    def is_plain(self) -> bool:
        """Whether the next step would draft nothing."""
        if not self.stats.n_steps:
            return False  # the first step also decodes the end of the prompt
        n = len(self.tokens)
        if self._looked_at != n:
            self._looked_at, self.started = n, now()
            self._is_plain = all(drafter.promise(self.tokens) == 0.0 for drafter in self.drafters)
        return self._is_plain

    def propose(self) -> Coroutine[None] | None:
        """Draft the next step's tree if a drafter would; else the step is plain."""
        self.is_plain_step = self.is_plain()
        if not self.is_plain_step:
            return self._draft()
        if len(self.tree) > 1:
            self.tree = TokenTree(self.tokens[-1])
        return None

    @property
    def n_unread(self) -> int:
        """Tokens that drafters would read in contexts of their own before they draft."""
        return max([drafter.n_unread(self.tokens) for drafter in self.drafters], default=0)

    def _begin(self) -> None:
        """Give the prompt to the drafters, and request the states they need from the target."""
        self._has_begun = True
        needed, target = self.needed, self.cache.target
        for drafter in self.drafters:
            drafter.begin(self.tokens)
        target.want_hidden(needed.hidden)
        target.want_layers(needed.layers)
        is_match = type(self.verifier) is Match
        target.want_logits(needed.logits or self._sampler.reads_logits or not is_match)

    def _draft(self) -> Coroutine[None]:
        if not self._has_begun:
            self._begin()
        start = own_time.now()
        self.show_plain()
        cache, tokens = self.cache, self.tokens
        target, n_past, n_rewind = cache.target, cache.n_past, cache.target.n_rewind
        budget = DraftBudget(
            max_nodes=min(target.n_ctx - n_past, target.n_batch - cache.n_deferred) - 1,
            max_depth=min(self.max_length - len(tokens) - 1, n_rewind),
            max_leaves=max(1, target.n_seq_max - 1),
            chain_only=n_rewind < NO_LIMIT or target.n_seq_max == 1,
            n_vocab=target.n_vocab,
        )
        # The root is the last token; this step computes its KV entry.
        self.tree = tree = TokenTree(tokens[-1])
        for drafter in self.drafters:
            yield from drafted(self.method.name, drafter, tokens, tree, budget)
        if self.structure is not None and len(tree) > 1 and self.needed.rows == 1:
            keep = tree.keep if self.chooser is None else partial(self.chooser.keep, tree)
            keep(self.structure.prune(tree))
        if self.chooser is not None:
            budget = self.chooser.budget
        elif budget.chain_only:
            tree.keep(tree.likeliest_path()[: budget.max_depth])
        elif len(tree) - 1 > budget.max_leaves and not tree.branches:
            self._keep_leaves(budget.max_leaves)
        self.budget = budget
        self.draft_seconds = own_time.now() - start

    def _keep_leaves(self, max_leaves: int) -> None:
        """Drop the least likely drafts until the text has a sequence for each branch."""
        tree = self.tree
        nodes = list(range(1, len(tree)))
        if not tree.draft_probs:  # samples must not be chosen by their values
            nodes.sort(key=tree.path_probs().__getitem__, reverse=True)
        keep_leaves(tree, nodes, max_leaves)
        tree.keep(sorted(nodes))

    def show_plain(self) -> None:
        """Show the drafters the plain steps that they have not seen yet."""
        if self.unseen.tokens:
            for drafter in self.drafters:
                drafter.observe_plain(self.unseen)
            self.unseen = PlainSteps([], [])

    def rows(self) -> Rows:
        """The rows of the tree, preceded by the end of the prompt if that is not decoded yet; the
        last token alone if the step is plain."""
        cache = self.cache
        if self.is_plain_step:
            return Rows(self.tokens[-1:], (len(cache.tokens),), (range(cache.n_seq),), (True,))
        start, tree = now(), self.tree
        if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
            cache.reserve(n_seq)
        self._rows = tree_rows(tree, cache.n_past, cache.n_seq)
        rows = cache.with_deferred(self._rows)
        self._build_seconds = now() - start
        return rows

    def accept(self, output: Output, decode_seconds: float, n_texts: int = 1) -> Emitted:
        """Verify the decoded tree, commit the accepted path, and let the drafters learn.

        The decode had rows of ``n_texts``.
        """
        if self.is_plain_step:
            self._emitted = self._accept_plain(output, decode_seconds, n_texts)
            return self._emitted
        cache, stats, tree, rows = self.cache, self.stats, self.tree, self._rows
        n_deferred = cache.n_deferred
        drafts = self._drafts() if self.request.record else ()  # before the structure goes on
        start, n_past = now(), self.cache.n_past
        path, bonus = self.verifier.verify(tree, output, self._sampler)
        step = Step(tree, output, path, bonus, decode_seconds)
        n, reason = self.reply.take(step.tokens)
        if reason is None and n_past + len(path) >= cache.target.n_ctx:
            reason = "context"
        verified = now()
        cache.commit(rows, path if n == len(path) else path[:n])
        committed = now()
        proposing = self.draft_seconds + self._build_seconds
        step.own_seconds = proposing + committed - start
        for drafter in self.drafters:
            drafter.observe(step)
        self._emitted = emitted = Emitted(step.tokens[:n], min(n, len(path) - 1), reason)
        self.tokens += emitted.tokens
        end = now()
        if not stats.n_steps:
            self.written_since = end
            stats.n_first, stats.n_read = n, stats.n_prompt - stats.n_reused
            stats.prefill_seconds = end - self.started
            share = (len(tree) - 1) / (n_deferred + len(tree))
            stats.first_seconds = share * (proposing + decode_seconds + end - start)
        else:
            phases = stats.phase_seconds
            stats.decode_seconds = end - self.written_since
            phases["draft"] += self.draft_seconds + end - committed
            phases["build"] += self._build_seconds
            phases["decode"] += decode_seconds
            phases["verify"] += verified - start
            phases["commit"] += committed - verified
        stats.add_step(tree, path, n, emitted.n_drafted)
        if self.chooser is not None and len(tree) > 1:
            stats.n_expected += sum(tree.path_probs()) - 1.0
        if self.request.record:
            accepted = [node - 1 for node in path[1 : n + 1]]
            last = bonus if n == len(path) else None
            spent = (proposing, decode_seconds, end - start)
            self.steps.append(RecordedStep(*spent, len(rows), n_texts, drafts, accepted, last))
        return emitted

    def _drafts(self) -> Sequence[Draft]:
        forced = self.structure.forced(len(self.tree)) if self.structure is not None else ()
        return drafts_of(self.tree, self.method.name, forced)

    def _accept_plain(self, output: Output, decode_seconds: float, n_texts: int) -> Emitted:
        cache, stats, start = self.cache, self.stats, now()
        cache.tokens.append(self.tokens[-1])
        token = self.sample(output, 0)
        self.tokens.append(token)
        self.unseen.tokens.append(token)
        self.unseen.seconds.append(decode_seconds)
        _, reason = self.reply.take((token,))
        if reason is None and cache.n_past >= cache.target.n_ctx:
            reason = "context"
        stats.add_plain(1)
        end = now()
        stats.decode_seconds = end - self.written_since
        stats.phase_seconds["decode"] += decode_seconds
        stats.phase_seconds["verify"] += end - start
        if self.request.record:
            spent = (0.0, decode_seconds, end - start)
            self.steps.append(RecordedStep(*spent, 1, n_texts, bonus=token))
        return Emitted([token], 0, reason)

    # Handing out tokens

    def hand_out(self, n_texts: int = 1) -> None:
        """Hand out what the last step emitted, unless that is done."""
        emitted, self._emitted = self._emitted, None
        if emitted is not None:
            self.deliver(emitted, n_texts)

    def deliver(self, emitted: Emitted, n_texts: int = 1) -> None:
        """Hand out the tokens of a step, one of ``n_texts`` in the batch; end with the last.

        Tokens that come faster than a display shows them go together, and more of them the more
        texts are written: passing on each by itself can cost more than its decode.
        """
        self._frame += self.reply.release(len(emitted.tokens), emitted.n_drafted)
        if emitted.finish_reason is not None:
            self.end(emitted.finish_reason)
        elif now() - self._passed_on >= FRAME_SECONDS * min(_MAX_FRAMES, -(-n_texts // 2)):
            self.flush()

    def flush(self) -> None:
        """Pass on what waits for more: the next step may take long."""
        self.hand_out()
        if self._frame:
            self._channel.put(self._frame)
            self._frame, self._passed_on = [], now()


class failing:  # noqa: N801 (read as ``with failing(text):``)
    """An error inside of it ends one text alone. A class, since a generator takes 1.5 µs more."""

    __slots__ = ("_text",)

    def __init__(self, text: Text) -> None:
        self._text = text

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is None:
            return False
        self._text.fail(error)
        return True
