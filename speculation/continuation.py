"""Continuation: one text while it is decoded, and the two halves of its steps.

``propose`` drafts a tree, ``accept`` verifies what the target made of it. Between the two stands
one decode, which may hold the trees of several texts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from batching.cache import SequenceCache
from batching.rows import Rows, n_sequences, tree_rows
from batching.target import Output, Sampler
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafter import DraftBudget, Drafter, IdleHint, Requirements, Step
from speculation.stats import Stats
from speculation.verify import Verifier

_NO_DRAFTERS = IdleHint(None, NO_LIMIT)


class TextSink(Protocol):
    """Where the tokens go, and what says where the text ends: ``ReplyText``.

    ends  tokens that may end the text for another reason than its length
    """

    ends: Container[int]

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Take in tokens, each once and in order: how many of them belong to the text, and why it
        ends with the last of these, or None.

        A text may end in the middle of an accepted path. What lies beyond is neither shown nor
        kept.
        """
        ...


class Emitted(NamedTuple):
    """What a step, or several plain ones, added to the text.

    tokens         in order
    n_drafted      the first so many were drafted: all, or all but the last
    finish_reason  why the text ends with the last token, if it does
    """

    tokens: list[int]
    n_drafted: int
    finish_reason: str | None = None


@dataclass
class Continuation:
    """A text in the making.

    cache       holds the prompt but for its last token, the root of the first step. What was
                deferred of the prompt is decoded with the first step, which counts as the end of
                the prefill: the time to the first token
    tokens      the text so far, prompt included
    max_length  tokens that the text has at the end, prompt included, at most
    """

    cache: SequenceCache
    tokens: list[int]
    drafters: Sequence[Drafter]
    verifier: Verifier
    sampler: Sampler
    text: TextSink
    stats: Stats
    max_length: int = NO_LIMIT
    started: float = field(default=0.0, repr=False)  # when the step began …
    _drafted: float = field(default=0.0, repr=False)  # … when its tree was drafted …
    _built: float = field(default=0.0, repr=False)  # … and when its rows were ready

    def begin(self) -> None:
        """Show the prompt to the drafters and ask the target for the states they need."""
        start = perf_counter()
        for drafter in self.drafters:
            drafter.begin(self.tokens)
        self.stats.prefill_seconds += perf_counter() - start
        needed = Requirements.of_all(drafter.requires for drafter in self.drafters)
        self.cache.target.want_hidden(needed.hidden)
        self.cache.target.want_layers(needed.layers)

    def end(self) -> None:
        """Leave the cache with the text but for its last token."""
        self.cache.target.want_hidden(False)
        self.cache.target.want_layers(())
        self.cache.truncate(min(len(self.tokens) - 1, self.cache.n_past))

    def idle_hint(self) -> IdleHint | None:
        """Steps from here on in which nothing would be drafted; None = the next step drafts."""
        self.started = perf_counter()
        if not self.stats.n_steps:
            return None  # the end of the prompt is decoded with the first step
        if not self.drafters:
            return _NO_DRAFTERS
        return self.drafters[0].idle(self.tokens) if len(self.drafters) == 1 else None

    def propose(self) -> tuple[TokenTree, Rows]:
        """Draft the next step's tree, and lay it out as rows."""
        cache, tokens = self.cache, self.tokens
        target, n_past, n_rewind = cache.target, cache.n_past, cache.target.n_rewind
        budget = DraftBudget(
            max_nodes=min(target.n_ctx - n_past, target.n_batch - cache.n_deferred) - 1,
            max_depth=min(self.max_length - len(tokens) - 1, n_rewind),
            max_leaves=target.n_seq_max,
            chain_only=n_rewind < NO_LIMIT,
        )
        # The root is the last token, whose KV entry this step makes.
        tree = TokenTree(tokens[-1])
        for drafter in self.drafters:
            drafter.draft(tokens, tree, budget)
        if budget.chain_only:
            tree.keep(tree.likeliest_path()[: budget.max_depth])
        self._drafted = perf_counter()
        if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
            cache.reserve(n_seq)
        rows = tree_rows(tree, n_past, cache.n_seq)
        self._built = perf_counter()
        return tree, rows

    def accept(self, tree: TokenTree, rows: Rows, output: Output) -> Emitted:
        """Verify the decoded tree, commit the accepted path, and let the drafters learn."""
        cache, stats, decoded = self.cache, self.stats, perf_counter()
        n_past = cache.n_past
        # An accepted path and the bonus token, or as much of them as belongs to the text.
        path, bonus = self.verifier.verify(tree, output, self.sampler)
        step = Step(tree, output, path, bonus, decoded - self._built)
        n, reason = self.text.take(step.tokens)
        if reason is None and n_past + len(path) >= cache.target.n_ctx:
            reason = "context"
        verified = perf_counter()
        cache.commit(rows, path if n == len(path) else path[:n])
        committed = perf_counter()
        for drafter in self.drafters:
            drafter.observe(step)
        emitted = Emitted(step.tokens[:n], min(n, len(path) - 1), reason)
        self.tokens += emitted.tokens
        end = perf_counter()
        if not stats.n_steps:
            stats.n_first = n
            stats.prefill_seconds += end - self.started
        else:
            phases = stats.phase_seconds
            stats.decode_seconds += end - self.started
            phases["draft"] += self._drafted - self.started + end - committed
            phases["build"] += self._built - self._drafted
            phases["decode"] += decoded - self._built
            phases["verify"] += verified - decoded
            phases["commit"] += committed - verified
        stats.add_step(tree, path, n, emitted.n_drafted)
        return emitted
