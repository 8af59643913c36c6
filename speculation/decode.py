"""The one decode loop. Every method is a set of drafters and a verifier in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from batching.cache import SequenceCache
from batching.rows import n_sequences, tree_rows
from batching.sampler import Sampler
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafter import Drafter, Step, needs_hidden, needs_layers
from speculation.stats import Stats
from speculation.verify import Verifier


class Emitted(NamedTuple):
    """What a step added to the text.

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
    finish: Callable[[Sequence[int]], tuple[int, str | None]],
    stats: Stats,
    max_tokens: int | None = None,
) -> Iterator[Emitted]:
    """Continue ``prompt``, yielding the tokens of each step.

    ``cache`` holds the prompt but for its last token, which is the first step's root; its context
    has a sequence for every branch the drafters may ask for. What it held back of the prompt is
    decoded with the first step, which counts as the end of the prefill: the time to the first
    token.
    ``finish`` gets the tokens of every step, each once and in order, and says how many of them
    belong to the text and why it ends with the last of these, or None; it may end in the middle of
    an accepted path, and what lies beyond is neither shown nor kept. When the context is full the
    reason is ``context``. ``max_tokens`` tells the drafters how many the text will have at most; to
    end it there is ``finish``'s affair.

    The cache ends up with the text but for its last token, also when the generator is closed early.
    """
    target = cache.target
    tokens = list(prompt)
    most = NO_LIMIT if max_tokens is None else len(prompt) + max_tokens
    phases = stats.phase_seconds
    start = perf_counter()
    for drafter in drafters:
        drafter.begin(prompt)
    stats.prefill_seconds += perf_counter() - start
    try:
        target.want_hidden(any(needs_hidden(drafter) for drafter in drafters))
        target.want_layers(needs_layers(drafters))
        while True:
            start = perf_counter()
            # 1. Draft: the root is the last token, whose KV entry this step makes.
            n_past = cache.n_past
            room = min(target.n_ctx - n_past, target.n_batch - cache.n_held)
            tree = TokenTree(tokens[-1], room, most - len(tokens) - 1)
            for drafter in drafters:
                drafter.draft(tokens, tree)
            drafted = perf_counter()

            # 2. Build the rows and decode them.
            if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
                cache.reserve(n_seq)
            rows = tree_rows(tree, n_past, cache.n_seq)
            built = perf_counter()
            output = target.decode(cache.with_held(rows) if cache.n_held else rows)
            decoded = perf_counter()

            # 3. Verify: an accepted path and one token more.
            path, bonus = verifier.verify(tree, output, sampler)
            verified = perf_counter()

            # 4. Commit the path's KV; let the drafters learn from the step.
            cache.commit(rows, path)
            committed = perf_counter()
            step = Step(tree, output, path, bonus, decoded - built)
            for drafter in drafters:
                drafter.observe(step)

            n, reason = finish(step.tokens)
            if reason is None and n_past + len(path) >= target.n_ctx:
                reason = "context"
            emitted = Emitted(step.tokens[:n], min(n, len(path) - 1), reason)
            tokens += emitted.tokens
            end = perf_counter()
            if not stats.n_steps:
                stats.n_first = n
                stats.prefill_seconds += end - start
            else:
                stats.decode_seconds += end - start
                phases["draft"] += drafted - start + end - committed
                phases["build"] += built - drafted
                phases["decode"] += decoded - built
                phases["verify"] += verified - decoded
                phases["commit"] += committed - verified
            stats.add_step(tree, path, n, emitted.n_drafted)
            yield emitted
            if reason is not None:
                return
    finally:
        target.want_hidden(False)
        target.want_layers(())
        cache.truncate(min(len(tokens) - 1, cache.n_past))
