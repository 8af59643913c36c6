"""The one decode loop. Every method is a set of drafters and a verifier in it.

Steps in which nobody has anything to propose are done in runs: without a tree a plain step takes
Python 9 to 18 µs instead of 50, measured beside a model whose step takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from batching.cache import SequenceCache
from batching.llama.sampler import Sampler
from batching.rows import n_sequences, tree_rows
from batching.target import Output
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.selection import likeliest_path
from speculation.drafter import (
    Drafter,
    Run,
    Silence,
    Step,
    listener_of,
    needs_hidden,
    needs_layers,
)
from speculation.stats import Stats
from speculation.verify import Match, Verifier

RUN_SECONDS = 0.016  # after so long a run ends and is handed over: a frame of a display
_FOR_GOOD = Silence(None, NO_LIMIT)  # where there are no drafters


class Text(Protocol):
    """What the tokens become, and where that ends: ``ReplyText``.

    ends  tokens that it may end with for another reason than its length
    """

    ends: Container[int]

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Take in tokens, each once and in order: how many of them belong to the text, and why it
        ends with the last of these, or None.

        It may end in the middle of an accepted path; what lies beyond is neither shown nor kept.
        """
        ...


class Emitted(NamedTuple):
    """What a step, or a run of plain ones, added to the text.

    tokens         in order
    n_drafted      so many of them came from a draft: all, or all but the last
    finish_reason  why the text ends with the last, if it does
    """

    tokens: list[int]
    n_drafted: int
    finish_reason: str | None = None


def decode(
    cache: SequenceCache,
    prompt: Sequence[int],
    drafters: Sequence[Drafter],
    verifier: Verifier,
    sampler: Sampler,
    text: Text,
    stats: Stats,
    max_tokens: int | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Emitted]:
    """Continue ``prompt``, yielding the tokens of each step, or those of a run of plain steps.

    ``cache`` holds the prompt but for its last token, which is the first step's root; its context
    has a sequence for every branch the drafters may ask for. What it held back of the prompt is
    decoded with the first step, which counts as the end of the prefill: the time to the first
    token.
    ``text`` takes in the tokens and says where it ends; when the context is full the reason is
    ``context``. ``max_tokens`` is how many it will take at most. ``cancelled`` is asked after each
    step of a run, which ends there if so; to stop is the caller's affair.

    The cache ends up with the text but for its last token, also when the generator is closed early.
    """
    most = NO_LIMIT if max_tokens is None else len(prompt) + max_tokens
    loop = _Loop(cache, list(prompt), drafters, verifier, sampler, text, stats, most, cancelled)
    start = perf_counter()
    for drafter in drafters:
        drafter.begin(prompt)
    stats.prefill_seconds += perf_counter() - start
    target = cache.target
    try:
        target.want_hidden(any(needs_hidden(drafter) for drafter in drafters))
        target.want_layers(needs_layers(drafters))
        while True:
            start = perf_counter()
            silence = loop.silence()
            emitted = loop.step(start) if silence is None else loop.run(start, silence)
            yield emitted
            if loop.failure is not None:
                raise loop.failure
            if emitted.finish_reason is not None:
                return
    finally:
        target.want_hidden(False)
        target.want_layers(())
        cache.truncate(min(len(loop.tokens) - 1, cache.n_past))


class _Loop:
    """What goes on from step to step.

    tokens   the text, prompt included
    failure  what ended a run after steps whose tokens are still to be handed over
    """

    def __init__(
        self,
        cache: SequenceCache,
        tokens: list[int],
        drafters: Sequence[Drafter],
        verifier: Verifier,
        sampler: Sampler,
        text: Text,
        stats: Stats,
        most: int,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self.tokens = tokens
        self.failure: Exception | None = None
        self._cache = cache
        self._drafters = drafters
        self._listener = listener_of(drafters)
        self._verifier = verifier
        self._sampler = sampler
        self._text = text
        self._stats = stats
        self._most = most  # tokens that the text has at the end, at most
        self._cancelled = cancelled

    def silence(self) -> Silence | None:
        """Steps that nobody would draft in, from here on; the first has the prompt's end in it."""
        if not self._stats.n_steps:
            return None
        if not self._drafters:
            return _FOR_GOOD
        return None if self._listener is None else self._listener.silence(self.tokens)

    def step(self, start: float) -> Emitted:
        """Draft, decode, verify, commit; ``start`` is when the step began."""
        cache, tokens, stats = self._cache, self.tokens, self._stats
        # 1. Draft: the root is the last token, whose KV entry this step makes.
        target, n_past = cache.target, cache.n_past
        room = min(target.n_ctx - n_past, target.n_batch - cache.n_held)
        n_rewind = target.n_rewind
        tree = TokenTree(tokens[-1], room, min(self._most - len(tokens) - 1, n_rewind))
        tree.one_path = n_rewind < NO_LIMIT
        for drafter in self._drafters:
            drafter.draft(tokens, tree)
        if tree.one_path:
            tree.keep(likeliest_path(tree)[:n_rewind])
        drafted = perf_counter()

        # 2. Build the rows and decode them.
        if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
            cache.reserve(n_seq)
        rows = tree_rows(tree, n_past, cache.n_seq)
        built = perf_counter()
        if cache.n_held:
            output = target.decode(cache.with_held(rows), cache.watch)
        else:
            output = target.decode(rows)
        decoded = perf_counter()

        # 3. Verify: an accepted path and one token more, or what of it the text has room for.
        path, bonus = self._verifier.verify(tree, output, self._sampler)
        step = Step(tree, output, path, bonus, decoded - built)
        n, reason = self._text.take(step.tokens)
        if reason is None and n_past + len(path) >= target.n_ctx:
            reason = "context"
        verified = perf_counter()

        # 4. Commit the path's KV, but for the last token's; let the drafters learn from the step.
        cache.commit(rows, path if n == len(path) else path[:n])
        committed = perf_counter()
        for drafter in self._drafters:
            drafter.observe(step)

        emitted = Emitted(step.tokens[:n], min(n, len(path) - 1), reason)
        tokens += emitted.tokens
        end = perf_counter()
        if not stats.n_steps:
            stats.n_first = n
            stats.prefill_seconds += end - start
        else:
            phases = stats.phase_seconds
            stats.decode_seconds += end - start
            phases["draft"] += drafted - start + end - committed
            phases["build"] += built - drafted
            phases["decode"] += decoded - built
            phases["verify"] += verified - decoded
            phases["commit"] += committed - verified
        stats.add_step(tree, path, n, emitted.n_drafted)
        return emitted

    def run(self, start: float, silence: Silence) -> Emitted:
        """Plain steps for as long as ``silence`` holds; ``start`` is when it was asked for.

        What was made before an error is not lost: the error becomes ``failure``.
        """
        cache, stats, phases = self._cache, self._stats, self._stats.phase_seconds
        n_ctx = cache.target.n_ctx
        n_steps = min(silence.n_steps, self._most - len(self.tokens), n_ctx - cache.n_past)
        run = Run([], [])
        began = perf_counter()
        try:
            self._plain_steps(run, n_steps, silence.until)
        except Exception as error:
            if not run.tokens:
                raise
            self.failure = error
        ran = perf_counter()
        if self._listener is not None:
            self._listener.observe_run(run)
        observed = perf_counter()
        _, reason = self._text.take(run.tokens)
        if reason is None and cache.n_past >= n_ctx:
            reason = "context"
        decoding = sum(run.seconds)
        phases["draft"] += began - start + observed - ran
        phases["decode"] += decoding
        phases["verify"] += ran - began - decoding
        stats.add_plain(len(run.tokens))
        stats.decode_seconds += perf_counter() - start
        return Emitted(run.tokens, 0, reason)

    def _plain_steps(self, run: Run, n_steps: int, until: Container[int] | None) -> None:
        """``n_steps`` plain steps, or fewer: until one makes a token after which a drafter wants to
        be asked, or that may end the text. They are added to ``run``."""
        target, committed, n_seq = self._cache.target, self._cache.tokens, self._cache.n_seq
        sample, tokens, cancelled = self._follow(), self.tokens, self._cancelled
        (found, seconds), ends = run, self._text.ends
        token = first = tokens[-1]
        start = perf_counter()
        for position in range(len(committed), len(committed) + n_steps):
            before = perf_counter()
            output = target.decode_row(token, position, n_seq)
            decoded = perf_counter()
            committed.append(token)
            token = sample(output, 0)
            is_awaited = until is not None and (token in until or token == first or token in found)
            found.append(token)
            seconds.append(decoded - before)
            tokens.append(token)
            if (
                is_awaited
                or token in ends
                or decoded - start > RUN_SECONDS
                or (cancelled is not None and cancelled())
            ):
                break

    def _follow(self) -> Callable[[Output, int], int]:
        """What chooses the token after a row below which nothing was drafted."""
        verifier, sampler = self._verifier, self._sampler
        if type(verifier) is Match:
            return sampler.sample  # which is all that it would ask, for less
        tree = TokenTree(self.tokens[-1])
        return lambda output, row: verifier.verify(tree, output, sampler)[1]
