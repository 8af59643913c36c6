"""Continuation: the state of one text while it is decoded, and the two halves of a step.

``draft`` and ``rows`` propose a tree, ``accept`` verifies the target's output for it. Between the
two comes one decode, whose batch may have the trees of several texts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from batching.cache import SequenceCache
from batching.rows import Rows, n_sequences, tree_rows
from batching.target import Output, Sampler
from batching.together import Coroutine, own_time
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.selection import keep_leaves
from speculation.drafter import DraftBudget, Drafter, PlainSteps, Requirements, Step
from speculation.stats import Stats
from speculation.verify import Match, Verifier

_ALONE = TokenTree(0)  # stands for the tree of a plain step, which has none


class TextSink(Protocol):
    """Takes the tokens and decides where the text ends. Implemented by ``ReplyText``.

    ends  tokens that may end the text for a reason other than its length
    """

    ends: Container[int]

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Add tokens in order. Returns how many of them belong to the text, and why the text ends
        after those, or None.

        A text may end in the middle of an accepted path; the tokens after its end are discarded.
        """
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


@dataclass
class Continuation:
    """The state of a text while it is decoded.

    cache       has the prompt except its last token, the root of the first step. The first step
                also decodes the deferred end of the prompt, so its time counts as prefill: the time
                to the first token
    tokens      the text so far, including the prompt
    max_length  maximum number of tokens, including the prompt
    chooser     the drafter among whose drafts the loop chooses, or None
    tree        the present step's tree …
    budget      … and its limits
    started     time when the step began
    steps_plain  whether the present step is plain: it has no tree
    plain       plain steps that the drafters have not seen yet
    draft_seconds  time of drafting and choosing in it
    """

    cache: SequenceCache
    tokens: list[int]
    drafters: Sequence[Drafter]
    verifier: Verifier
    sampler: Sampler
    text: TextSink
    stats: Stats
    max_length: int = NO_LIMIT
    chooser: Drafter | None = field(init=False)
    tree: TokenTree = field(init=False, repr=False)
    budget: DraftBudget = field(init=False, repr=False)
    started: float = field(default=0.0, repr=False)
    steps_plain: bool = field(default=False, repr=False)
    plain: PlainSteps = field(default_factory=lambda: PlainSteps([], []), repr=False)
    _rows: Rows = field(init=False, repr=False)
    draft_seconds: float = field(default=0.0, repr=False)
    _build_seconds: float = field(default=0.0, repr=False)  # time of building its rows

    def __post_init__(self) -> None:
        choosers = [drafter for drafter in self.drafters if drafter.cost is not None]
        self.chooser = choosers[0] if choosers else None
        self.sample = self._sampling()

    def _sampling(self) -> Callable[[Output, int], int]:
        """The function that chooses the next token after a single row."""
        verifier, sampler = self.verifier, self.sampler
        if type(verifier) is Match:
            return sampler.sample  # the same as ``Match.verify`` here, but faster
        tree = TokenTree(self.tokens[-1])
        return lambda output, row: verifier.verify(tree, output, sampler)[1]

    def begin(self) -> Coroutine[None]:
        """Give the prompt to the drafters, and request the states they need from the target."""
        start = perf_counter()
        for drafter in self.drafters:
            reading = drafter.begin(self.tokens)
            if reading is not None:
                yield from reading
        self.stats.prefill_seconds += perf_counter() - start
        needed = Requirements.of_all(drafter.requires for drafter in self.drafters)
        self.cache.target.want_hidden(needed.hidden)
        self.cache.target.want_layers(needed.layers)
        is_match = type(self.verifier) is Match
        self.cache.target.want_logits(needed.logits or self.sampler.reads_logits or not is_match)

    def end(self) -> None:
        """Leave the text in the cache, except its last token, and give it to the drafters."""
        self.end_plain()
        self.cache.target.want_hidden(False)
        self.cache.target.want_layers(())
        self.cache.target.want_logits(False)
        self.cache.truncate(min(len(self.tokens) - 1, self.cache.n_past))
        for drafter in self.drafters:
            drafter.end(self.tokens)

    def is_plain(self) -> bool:
        """Whether the next step would draft nothing."""
        self.started = perf_counter()
        if not self.stats.n_steps:
            return False  # the first step also decodes the end of the prompt
        return not any(drafter.strength(self.tokens) for drafter in self.drafters)

    def propose(self) -> Coroutine[None] | None:
        """Draft the next step's tree if a drafter would; else the step is plain."""
        self.steps_plain = self.is_plain()
        if self.steps_plain:
            self.tree = _ALONE
            return None
        return self.draft()

    def end_plain(self) -> None:
        """Show the drafters the plain steps that they have not seen yet."""
        if self.plain.tokens:
            for drafter in self.drafters:
                drafter.observe_plain(self.plain)
            self.plain = PlainSteps([], [])

    def draft(self) -> Coroutine[None]:
        """Draft the next step's tree."""
        start = own_time.now()
        self.end_plain()
        cache, tokens = self.cache, self.tokens
        target, n_past, n_rewind = cache.target, cache.n_past, cache.target.n_rewind
        budget = DraftBudget(
            max_nodes=min(target.n_ctx - n_past, target.n_batch - cache.n_deferred) - 1,
            max_depth=min(self.max_length - len(tokens) - 1, n_rewind),
            max_leaves=max(1, target.n_seq_max - 1),
            chain_only=n_rewind < NO_LIMIT or target.n_seq_max == 1,
        )
        # The root is the last token; this step computes its KV entry.
        self.tree = tree = TokenTree(tokens[-1])
        for drafter in self.drafters:
            drafting = drafter.draft(tokens, tree, budget)
            if drafting is not None:
                yield from drafting
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

    def rows(self) -> Rows:
        """The rows of the tree, preceded by the end of the prompt if that is not decoded yet; the
        last token alone if the step is plain."""
        cache = self.cache
        if self.steps_plain:
            return Rows(self.tokens[-1:], (len(cache.tokens),), (range(cache.n_seq),), (True,))
        start, tree = perf_counter(), self.tree
        if len(tree) > 1 and (n_seq := n_sequences(tree)) > cache.n_seq:
            cache.reserve(n_seq)
        self._rows = tree_rows(tree, cache.n_past, cache.n_seq)
        rows = cache.with_deferred(self._rows)
        self._build_seconds = perf_counter() - start
        return rows

    def accept(self, output: Output, decode_seconds: float) -> Emitted:
        """Verify the decoded tree, commit the accepted path, and let the drafters learn."""
        if self.steps_plain:
            return self._accept_plain(output, decode_seconds)
        cache, stats, tree, rows, start = (
            self.cache,
            self.stats,
            self.tree,
            self._rows,
            perf_counter(),
        )
        n_past = cache.n_past
        path, bonus = self.verifier.verify(tree, output, self.sampler)
        step = Step(tree, output, path, bonus, decode_seconds)
        n, reason = self.text.take(step.tokens)
        if reason is None and n_past + len(path) >= cache.target.n_ctx:
            reason = "context"
        verified = perf_counter()
        cache.commit(rows, path if n == len(path) else path[:n])
        committed = perf_counter()
        proposing = self.draft_seconds + self._build_seconds
        step.own_seconds = proposing + committed - start
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
            phases["draft"] += self.draft_seconds + end - committed
            phases["build"] += self._build_seconds
            phases["decode"] += decode_seconds
            phases["verify"] += verified - start
            phases["commit"] += committed - verified
        stats.add_step(tree, path, n, emitted.n_drafted)
        return emitted

    def _accept_plain(self, output: Output, decode_seconds: float) -> Emitted:
        cache, stats, phases, start = (
            self.cache,
            self.stats,
            self.stats.phase_seconds,
            perf_counter(),
        )
        cache.tokens.append(self.tokens[-1])
        token = self.sample(output, 0)
        self.tokens.append(token)
        self.plain.tokens.append(token)
        self.plain.seconds.append(decode_seconds)
        _, reason = self.text.take((token,))
        if reason is None and cache.n_past >= cache.target.n_ctx:
            reason = "context"
        stats.add_plain(1)
        end = perf_counter()
        stats.decode_seconds += end - self.started
        phases["decode"] += decode_seconds
        phases["verify"] += end - start
        return Emitted([token], 0, reason)
