"""TokenSequence: a request being served. It reads its prompt, drafts, accepts and ends.

``draft`` and ``rows`` are the first half of a step, ``accept`` is the second; between the two comes
one decode, whose batch may have the rows of several sequences (``step``). All of it happens in the
engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median
from typing import NamedTuple

from batching.cache import Reading, SequenceCache, common_prefix
from batching.clock import now
from batching.errors import InvalidParameter, SpeculationError
from batching.llama.sampler import SamplerChain
from batching.rows import Rows, n_sequences, tree_rows
from batching.target import Output, Sampler
from batching.together import Coroutine, own_time
from batching.tree import NO_LIMIT, TokenTree, keep_leaves
from speculation.chat.detokenizer import ReplyText, Token
from speculation.drafter import (
    Chooser,
    DraftBudget,
    Drafter,
    PlainSteps,
    Requirements,
    Step,
    drafted,
)
from speculation.drafting.cost import Prices
from speculation.meter import Draft, Meter, drafts_of
from speculation.reply import Reply
from speculation.request import Request
from speculation.sampling import RecordingSampler, token_logprobs
from speculation.structure import Structure
from speculation.verify import Match, Verifier

log = logging.getLogger(__name__)

FRAME_SECONDS = 0.016  # about that of a display, so that a text appears smoothly
_MAX_FRAMES = 4  # that tokens wait for others of their text, if many are written
ROOM = 64  # rows of a step, and cells beyond the last token, that any sequence may use


class Emitted(NamedTuple):
    """The tokens that a step, or a run of plain steps, added to the text.

    tokens         in order
    n_drafted      how many of them, from the first, were drafted: all, or all but the last
    finish_reason  why the text ends after the last token, or None
    """

    tokens: list[int]
    n_drafted: int
    finish_reason: str | None = None


class TokenSequence:
    """A request being served. An error in ``with sequence:`` ends it, and nothing else.

    reply       what its client holds
    written     the generated text, which decides where it ends
    cache       its part of the context. Has the prompt except its last token, the root of the
                first step. That step also decodes the deferred end of the prompt, so its time
                counts as prefill: the time to the first token
    tokens      so far, including the prompt
    chooser     the drafter among whose drafts the loop chooses, or None
    needed      what its drafters need of the target
    structure   what its schema or grammar allows next, or None
    reading     its prompt on the way into the cache; None before and after
    tree        the present step's tree; a lone root if the step is plain
    is_plain    whether the present step drafts nothing
    n_ahead     requests that are known to come first
    awaited     who reads what its prompt begins with, and up to which token it waits for that
    """

    def __init__(
        self,
        request: Request,
        written: ReplyText,
        structure: Structure | None = None,
        wake: Callable[[], None] = lambda: None,
        check_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` and ``check_thread`` as in ``Reply``."""
        self.request, self.written, self.structure = request, written, structure
        self.reply = Reply(request, written, wake, check_thread)
        self.meter = Meter(self.reply.stats, self.reply.steps if request.record else None)
        self.tokens = list(request.prompt)
        self.max_length = len(request.prompt) + (request.max_tokens or NO_LIMIT)
        self.reading: Reading | None = None
        self.drafters: Sequence[Drafter] = ()
        self.needed = Requirements()
        self.has_ended = False
        self.n_ahead = 0
        self.awaited: tuple[TokenSequence, int] | None = None
        self._sampler: Sampler | None = None  # None before ``start``
        self._has_begun = False
        self._emitted: Emitted | None = None  # by the last step, and not handed out yet
        self._frame: list[Token] = []  # tokens not passed on yet
        self._passed_on = -inf  # when others were, last

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if error is not None:
            self.fail(error)
        return error is not None

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
        request = self.request
        self.cache, self.drafters = cache, drafters
        self.verifier, self._sampler, self.sampler = verifier, sampler, sampler
        self.needed = needed = Requirements.of_all(drafter.requires for drafter in drafters)
        self.chooser = next((one for one in drafters if isinstance(one, Chooser)), None)
        self.tree, self.is_plain = TokenTree(self.tokens[-1]), False
        self._unseen = PlainSteps([], [])  # that the drafters have not seen yet
        self._rows = Rows([], [], [], [])
        if isinstance(sampler, SamplerChain):
            sampler.accept_prompt(request.prompt)
        if request.logprobs is not None:
            if not isinstance(verifier, Match):
                raise InvalidParameter(
                    "logprobs are recorded as tokens are sampled, and with verify=rejection not "
                    "every token is; use verify=match"
                )
            found, after = self.reply.logprobs, request.post_sampling
            self.sampler = RecordingSampler(sampler, request.logprobs, found, after=after)
        # After a single row ``Match.verify`` is the same as sampling, but slower.
        lone = TokenTree(self.tokens[-1])
        self._sample: Callable[[Output, int], int] = self.sampler.sample
        if type(verifier) is not Match:
            self._sample = lambda output, _: verifier.verify(lone, output, self.sampler)[1]
        if request.scored is not None:
            cache.target.want_logits(True)
        # If states are read, every row of a step has output; a prompt's rows must not.
        reads_states = needed.hidden or bool(needed.layers)
        reads_end = reads_states or request.reads_all or request.max_tokens == 0
        self.reading = Reading(
            cache,
            request.prompt[:-1],
            needed.prompt_reader,
            defer=not reads_end,
            turn_ends=self.written.ends,
            reuse=not request.reads_all,
            score=None if request.scored is None else self._score,
        )
        self.meter.start(self.reading.n_reused)
        self.tell_progress()

    def _score(self, first: int, n: int, output: Output) -> None:
        """Hand out the log probabilities of the tokens after ``first`` to ``first + n``."""
        request = self.request
        assert request.scored is not None
        following, n_top = request.prompt[first + 1 : first + n + 1], request.logprobs or 0
        rows = enumerate(following)
        request.scored([token_logprobs(output.logits(row), token, n_top) for row, token in rows])

    @property
    def room(self) -> int:
        """Rows that its step may need in a batch, and cells beyond its last token."""
        return max(ROOM, self.needed.rows)

    def next_piece(self, max_rows: int) -> Rows | None:
        """The next rows of its prompt, at most ``max_rows``; None if writing can begin."""
        assert self.reading is not None
        rows = self.reading.next_rows(max_rows)
        if rows is None:
            reading, self.reading = self.reading, None
            reading.close()
            if self.request.max_tokens == 0:
                self.end("length")
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

    def end(self, reason: str) -> None:
        """It ends, for ``reason``, or with the error of something that ends with it."""
        if self.has_ended:
            return
        reply = self.reply
        self.has_ended = reply.has_ended = True
        if self._sampler is not None and not reply.stats.n_steps:  # it has read, at most
            self.meter.stop(max(0, self.n_read - reply.stats.n_reused))
        works: list[Callable[[], object]] = [self._pass_rest]
        if self._sampler is not None:
            works.append(self._leave_cache)
        if self._has_begun:
            ends = [partial(drafter.end, self.tokens) for drafter in self.drafters]
            works += [self._show_plain, *ends]
        if isinstance(self._sampler, SamplerChain):
            works.append(self._sampler.close)
        for work in works:
            self._try(work)
        if reply.error is None:
            reply.finish_reason = reason
        self._try(lambda: reply.pass_on(reply.error))
        reply.ended.set()

    def fail(self, error: BaseException) -> None:
        """It ends with an error. Raises nothing: other sequences go on."""
        if not self.has_ended:
            self._keep_error(error)
            self.end("")

    def _try(self, work: Callable[[], object]) -> None:
        """Do some work of the end. An error is the sequence's, and keeps nobody from the rest."""
        try:
            work()
        except BaseException as error:
            if not isinstance(error, SpeculationError):
                log.warning("at the end of a text: %r", error)
            self._keep_error(error)

    def _keep_error(self, error: BaseException) -> None:
        """The first one is what ended it."""
        if self.reply.error is None:
            self.reply.error = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _leave_cache(self) -> None:
        """Leave the text in the cache, less its last token, and ask the target for no more."""
        target = self.cache.target
        if self.reading is not None:
            self.reading.close()
        elif self._has_begun:
            self.cache.truncate(min(len(self.tokens) - 1, self.cache.n_past))
        target.want_hidden(False)
        target.want_layers(())
        target.want_logits(False)

    # A step

    def look(self, prices: Prices | None = None) -> None:
        """Ask the drafters, once a step, whether the coming one would draft nothing."""
        self.is_plain = False  # as the first step, which also decodes the end of the prompt
        if self.meter.stats.n_steps and not self._would_draft(prices):
            self.is_plain, self.tree = True, TokenTree(self.tokens[-1])

    def _would_draft(self, prices: Prices | None) -> bool:
        tokens, chooser = self.tokens, self.chooser
        for drafter in self.drafters:
            if drafter is not chooser and drafter.promise(tokens) != 0.0:
                return True
        return chooser is not None and chooser.promise(tokens, prices) != 0.0

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
        target.want_logits(needed.logits or self.sampler.reads_logits or not is_match)

    def draft(self, prices: Prices | None = None) -> Coroutine[None]:
        """Draft the next step's tree, which has to save its ``prices``."""
        if not self._has_begun:
            self._begin()
        start = own_time.now()
        self._show_plain()
        cache, tokens = self.cache, self.tokens
        target, n_past, n_rewind = cache.target, cache.n_past, cache.target.n_rewind
        budget = DraftBudget(
            max_nodes=min(target.n_ctx - n_past, target.n_batch - cache.n_deferred) - 1,
            max_depth=min(self.max_length - len(tokens) - 1, n_rewind),
            max_leaves=max(1, target.n_seq_max - 1),
            chain_only=n_rewind < NO_LIMIT or target.n_seq_max == 1,
            n_vocab=target.n_vocab,
            prices=prices,
        )
        # The root is the last token; this step computes its KV entry.
        self.tree = tree = TokenTree(tokens[-1])
        for drafter in self.drafters:
            yield from drafted(self.request.method.name, drafter, tokens, tree, budget)
        if self.structure is not None and len(tree) > 1 and self.needed.rows == 1:
            self.keep(self.structure.prune(tree))
        if self.chooser is None:
            _fit(tree, budget)
        self.meter.draft_seconds = own_time.now() - start

    def keep(self, nodes: list[int]) -> None:
        """Drop all drafts of the tree but ``nodes``, ascending."""
        keep = self.tree.keep if self.chooser is None else partial(self.chooser.keep, self.tree)
        keep(nodes)

    def _show_plain(self) -> None:
        """Show the drafters the plain steps that they have not seen yet."""
        if self._unseen.tokens:
            for drafter in self.drafters:
                drafter.observe_plain(self._unseen)
            self._unseen = PlainSteps([], [])

    def rows(self) -> Rows:
        """The rows of the tree, preceded by the end of the prompt if that is not decoded yet; the
        last token alone if the step is plain."""
        cache = self.cache
        if self.is_plain:
            return Rows(self.tokens[-1:], (len(cache.tokens),), (range(cache.n_seq),), (True,))
        self.meter.lap()
        tree = self.tree
        if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
            cache.reserve(n_seq)
        self._rows = tree_rows(tree, cache.n_past, cache.n_seq)
        rows = cache.with_deferred(self._rows)
        self.meter.build_seconds = self.meter.lap()
        return rows

    def accept(self, output: Output, decode_seconds: float, n_texts: int = 1) -> Emitted:
        """Verify the decoded tree, commit the accepted path, and let the drafters learn.

        The decode had rows of ``n_texts``.
        """
        if self.is_plain:
            self.meter.lap()
            self.cache.tokens.append(self.tokens[-1])
            token = self._sample(output, 0)
            self.tokens.append(token)
            self._unseen.tokens.append(token)
            self._unseen.seconds.append(decode_seconds)
            step = PlainSteps([token], [decode_seconds])
            return self._add_plain(step, 0.0, self.meter.lap(), n_texts)
        cache, meter, tree = self.cache, self.meter, self.tree
        n_deferred = cache.n_deferred
        drafts: Sequence[Draft] = ()
        if self.request.record:  # before the structure goes on
            forced = self.structure.forced(len(tree)) if self.structure is not None else ()
            drafts = drafts_of(tree, self.request.method.name, forced)
        meter.lap()
        path, bonus = self.verifier.verify(tree, output, self.sampler)
        seen = Step(tree, output, path, bonus, decode_seconds)
        n, reason = self._take(seen.tokens, len(path))
        verifying = meter.lap()
        cache.commit(self._rows, path if n == len(path) else path[:n])
        committing = meter.lap()
        seen.own_seconds = meter.draft_seconds + meter.build_seconds + verifying + committing
        for drafter in self.drafters:
            drafter.observe(seen)
        self._emitted = emitted = Emitted(seen.tokens[:n], min(n, len(path) - 1), reason)
        self.tokens += emitted.tokens
        seconds = decode_seconds, verifying, committing, meter.lap()
        meter.add_step(tree, drafts, path, emitted.tokens, n_deferred, n_texts, seconds)
        if self.chooser is not None and len(tree) > 1:
            meter.stats.n_expected += sum(tree.path_probs()) - 1.0
        return emitted

    def _take(self, tokens: Sequence[int], n_rows: int = 0) -> tuple[int, str | None]:
        """How many of a step's tokens belong to the text, and why it ends after them, or None;
        ``n_rows`` will be added to the cache."""
        n, reason = self.written.take(tokens)
        if reason is None and self.cache.n_past + n_rows >= self.cache.target.n_ctx:
            reason = "context"
        return n, reason

    # Plain steps

    def run_plain(
        self, prices: Prices | None = None, is_wanted: Callable[[], bool] = lambda: False
    ) -> None:
        """Decode plain steps while no drafter would draft, and hand out their tokens.

        Without a tree, the Python overhead of a step is 9 to 18 µs instead of 50. That matters for
        small models, whose decode takes a millisecond. Ends after FRAME_SECONDS, or when
        ``is_wanted``, polled after each step, says that something else is to be done. If a later
        step fails, the tokens before it are handed out first.
        """
        meter, steps = self.meter, PlainSteps([], [])
        failure: Exception | None = None
        meter.lap()
        try:
            self._decode_plain(steps, prices, is_wanted)
        except Exception as error:
            if not steps.tokens:
                raise
            failure = error
        verifying = meter.lap() - sum(steps.seconds)
        if self.chooser is not None and prices is not None:
            n, seconds = len(steps.seconds), median(steps.seconds)
            prices.cost.follow(1, prices.n_past, seconds, n)
        self._show_plain()
        for drafter in self.drafters:
            drafter.observe_plain(steps)
        self._add_plain(steps, meter.lap(), verifying)
        self.hand_out()
        if failure is not None:
            raise failure

    def _decode_plain(
        self, steps: PlainSteps, prices: Prices | None, is_wanted: Callable[[], bool]
    ) -> None:
        """Decode plain steps as far as a run goes; add their tokens to ``steps`` and to the text.

        Stops early when a drafter would draft, and after a token that may end the text.
        """
        target, committed, tokens = self.cache.target, self.cache.tokens, self.tokens
        n_steps = min(self.max_length - len(tokens), target.n_ctx - len(committed))
        sample, seq_ids, ends = self._sample, range(self.cache.n_seq), self.written.ends
        token = tokens[-1]
        start = now()
        for position in range(len(committed), len(committed) + n_steps):
            before = now()
            output = target.decode_row(token, position, seq_ids)
            decoded = now()
            committed.append(token)
            token = sample(output, 0)
            steps.tokens.append(token)
            steps.seconds.append(decoded - before)
            tokens.append(token)
            is_over = token in ends or decoded - start > FRAME_SECONDS or is_wanted()
            if is_over or self._would_draft(prices):
                return

    def _add_plain(
        self, steps: PlainSteps, drafting: float, verifying: float, n_texts: int = 1
    ) -> Emitted:
        """Plain steps were decoded: their tokens are in the cache and in the text."""
        _, reason = self._take(steps.tokens)
        self.meter.add_plain(steps, drafting, verifying, n_texts)
        self._emitted = Emitted(steps.tokens, 0, reason)
        return self._emitted

    # Handing out tokens

    @property
    def is_complete(self) -> bool:
        """Whether the last step emitted its last token."""
        return self._emitted is not None and self._emitted.finish_reason is not None

    def hand_out(self, n_texts: int = 1) -> None:
        """Hand out what the last step emitted, one of ``n_texts`` in the batch, unless that is
        done; end with the last token.

        Tokens that come faster than a display shows them go together, and more of them the more
        texts are written: passing on each by itself can cost more than its decode.
        """
        emitted, self._emitted = self._emitted, None
        if emitted is None:
            return
        self._frame += self.written.release(len(emitted.tokens), emitted.n_drafted)
        if emitted.finish_reason is not None:
            self.end(emitted.finish_reason)
        elif now() - self._passed_on >= FRAME_SECONDS * min(_MAX_FRAMES, -(-n_texts // 2)):
            self.flush()

    def flush(self) -> None:
        """Pass on what waits for more: the next step may take long."""
        self.hand_out()
        if self._frame:
            self.reply.pass_on(self._frame)
            self._frame, self._passed_on = [], now()

    def _pass_rest(self) -> None:
        self.hand_out()
        self._frame += self.written.rest()
        self.flush()


def _fit(tree: TokenTree, budget: DraftBudget) -> None:
    """Cut a tree to the path or the number of branches that can be decoded."""
    if budget.chain_only:
        tree.keep(tree.likeliest_path()[: budget.max_depth])
    elif len(tree) - 1 > budget.max_leaves and not tree.branches:
        nodes = list(range(1, len(tree)))
        if not tree.draft_probs:  # samples must not be chosen by their values
            nodes.sort(key=tree.path_probs().__getitem__, reverse=True)
        keep_leaves(tree, nodes, budget.max_leaves)
        tree.keep(sorted(nodes))
