"""Lookahead decoding: a 2-D window of Jacobi iterations feeds a pool of n-grams.

Exactly llama.cpp's ``examples/lookahead``: the same rows in the same order, the same window
initialisation and roll, the same pool. After Fu et al. 2024, "Break the Sequential Dependency of
LLM Inference Using Lookahead Decoding", arXiv 2402.02057. ``docs/batches.md`` draws the batch.

    level        0          1      …   N-2         levels are Jacobi iterations, oldest first
    column 0     root       L1[0]      L[N-2][0]
    column 1     L0[1]      L1[1]      L[N-2][1]   column i looks i + level tokens ahead
    …
    column W-1

The window is a tree: level 0 is a chain below the root, and column i's level j hangs below its
level j-1. Its last level's argmax is the next iteration; each column then holds an n-gram.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from batching.errors import InvalidParameter
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.estimates import Estimates
from speculation.ranges import check_ranges
from speculation.resources import Resources

# How often the n-th token of a pooled n-gram holds when those before it did; set by judgement.
PRIORS = (0.2, 0.45, 0.6, 0.7)
_FIRST_GUESS = 100  # llama.cpp starts column i of every level with token 100 + i


@dataclass(frozen=True)
class LookaheadParams:
    """Defaults are those of llama.cpp's example; the options below the line are not in it.

    window            W: columns of the window
    ngram             N: length of the n-grams, the key token included
    guesses           G: n-grams verified in a step, and kept for a key
    ---
    pool_from_prompt  fill the pool with the prompt's own n-grams
    window_from_prompt  start the window with tokens of the prompt instead of 100 + i
    merge             verify common prefixes of n-grams once
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    pool_from_prompt: bool = False
    window_from_prompt: bool = False
    merge: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, (("window", 1, 128), ("ngram", 3, 32), ("guesses", 1, 128)))
        if self.window + self.guesses + 1 > 256:
            raise InvalidParameter(
                f"window {self.window} and guesses {self.guesses} need "
                f"{self.window + self.guesses + 1} sequences of 256; lower one of them"
            )

    @property
    def window_rows(self) -> int:
        """Rows of the window: level 0 lacks column 0, which is the root."""
        return (self.window - 1) + self.window * (self.ngram - 2)


class NgramPool:
    """For each first token a ring of the latest ``size`` continuations, without duplicates."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rings: dict[int, tuple[list[tuple[int, ...]], int]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Pool ``(first, *rest)``; when the ring is full it takes the oldest one's place."""
        ring, head = self._rings.get(first, ([], 0))
        if rest in ring:
            return
        if head < len(ring):
            ring[head] = rest
        else:
            ring.append(rest)
        self._rings[first] = (ring, (head + 1) % self.size)

    def starting_with(self, first: int) -> list[tuple[int, ...]]:
        """The continuations of ``first`` in ring order."""
        return self._rings.get(first, ([], 0))[0]


class Lookahead(Drafter):
    """Window and pool of one text.

    Where somebody selects among the drafts (the budget has a least path probability), only n-grams
    that are likely enough are drafted, and the window follows by ``explore``.
    """

    def __init__(self, params: LookaheadParams, estimates: Estimates | None = None) -> None:
        self.params = params
        self._estimates = estimates or Estimates(PRIORS)
        self._proposed: list[tuple[int, ...]] = []
        n_rows = 1 + params.window_rows + params.guesses * (params.ngram - 1)
        self.requires = Requirements(rows=n_rows, branches=params.window + params.guesses)
        self._levels: list[list[int]] = []  # (N-1) lists of W tokens
        self._last_level: list[int] = []  # nodes of this step's last level; empty = no window
        self._pool = NgramPool(params.guesses)
        self._prompt: Sequence[int] = ()

    @property
    def explored_rows(self) -> int:
        return self.params.window_rows

    @property
    def explored_branches(self) -> int:
        """One for each column of the window."""
        return self.params.window

    def begin(self, prompt: Sequence[int]) -> None:
        self._estimates.new_text()
        n, size = self.params.ngram, self.params.guesses
        self._prompt = prompt
        self._levels = []
        self._pool = NgramPool(size)
        if self.params.pool_from_prompt:
            for i in range(len(prompt) - n + 1):
                self._pool.add(prompt[i], tuple(prompt[i + 1 : i + n]))

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._last_level = []
        self._proposed = []
        if budget.min_path_prob:
            self._propose(tokens[-1], tree, budget)
            return
        if not self._levels:  # as in the example, the prompt's last token is decoded alone
            return
        ngrams = self._pool.starting_with(tokens[-1])
        n_rows = len(ngrams) * (self.params.ngram - 1) + self.params.window_rows
        if budget.room(tree) < n_rows:
            return

        # Every column's sequence first, then one a guess, used or not: the ids are the example's.
        ends = self._add_ngrams(tree, ngrams)
        self._last_level = self._add_window(tree)
        tree.n_seq = 1 + self.requires.branches
        tree.branches += self._last_level
        tree.branches += dict.fromkeys(ends)  # merged n-grams may be equal: one branch each

    def explore(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Add the window to a tree whose drafts are selected."""
        if self._levels and budget.room(tree) >= self.params.window_rows:
            self._last_level = self._add_window(tree)
            tree.branches += self._last_level

    def _propose(self, token: int, tree: TokenTree, budget: DraftBudget) -> None:
        """Add the n-grams that are likely enough, the latest first."""
        left = 1.0  # probability that the n-grams so far are all wrong
        for ngram in reversed(self._pool.starting_with(token)):
            most = min(len(ngram), budget.room(tree))
            probs = self._estimates.chain_probs(range(most), left, budget.min_path_prob)
            if not probs:
                return
            p = probs[0]
            probs[0] = left * p
            tree.add_chain(0, ngram[: len(probs)], probs)
            self._proposed.append(ngram)
            left *= 1.0 - p

    def _learn(self, step: Step) -> None:
        if not self._proposed:
            return
        became = step.tokens
        for ngram in self._proposed:
            for depth, (token, actual) in enumerate(zip(ngram, became, strict=False)):
                self._estimates.learn(depth, accepted=token == actual)
                if token != actual:
                    break
        self._proposed = []

    def _add_ngrams(self, tree: TokenTree, ngrams: list[tuple[int, ...]]) -> Sequence[int]:
        """Hang the n-grams below the root, level by level; return their last nodes."""
        g, levels = len(ngrams), self.params.ngram - 1
        if not g:
            return []
        if self.params.merge:
            ends = [0] * g
            for level in range(levels):
                for i, ngram in enumerate(ngrams):
                    ends[i] = tree.add(ends[i], ngram[level])
            return ends
        tokens = [token for level in zip(*ngrams, strict=True) for token in level]
        parents, depths = _ngrams_shape(g, levels, len(tree))
        tree.add_nodes(parents, depths, tokens, [True] * len(tokens))
        return range(len(tree) - g, len(tree))

    def _add_window(self, tree: TokenTree) -> list[int]:
        """Hang the window below the root, level by level; return the last level's nodes."""
        w, n = self.params.window, self.params.ngram
        parents, depths, outputs = _window_shape(w, n, len(tree))
        tokens = [*chain.from_iterable(self._levels)]
        tree.add_nodes(parents, depths, tokens[1:], outputs, draft=False)  # the first is the root
        return list(range(len(tree) - w, len(tree)))

    def observe(self, step: Step) -> None:
        self._learn(step)
        if not self._levels:
            self._start_window(len(step.output.logits(0)))
            return
        if not self._last_level:
            return
        fresh = step.output.argmaxes(self._last_level[0], len(self._last_level))
        self._last_level = []
        oldest = self._levels[0]
        self._roll(fresh)
        for first, rest in zip(oldest, zip(*self._levels, strict=True), strict=True):
            self._pool.add(first, rest)
        # The text moved on by one token for each further one accepted. What the last level would
        # have become is unknown there; the example repeats the first.
        for _ in step.path[1:]:
            self._roll(self._levels[1])

    def _roll(self, newest: Iterable[int]) -> None:
        self._levels = [*self._levels[1:], list(newest)]

    def _start_window(self, n_vocab: int) -> None:
        w, n = self.params.window, self.params.ngram
        if self.params.window_from_prompt:
            rng = random.Random(0)
            self._levels = [rng.choices(self._prompt, k=w) for _ in range(n - 1)]
        else:
            start = [(_FIRST_GUESS + i) % n_vocab for i in range(w)]
            self._levels = [list(start) for _ in range(n - 1)]


@lru_cache(maxsize=256)
def _ngrams_shape(g: int, levels: int, first: int) -> tuple[list[int], list[int]]:
    """Parents and depths of ``g`` n-grams' nodes, which are numbered from ``first`` on."""
    parents = [0] * g + list(range(first, first + g * (levels - 1)))
    return parents, [level for level in range(1, levels + 1) for _ in range(g)]


@lru_cache(maxsize=256)  # it changes with the number of n-grams before it alone
def _window_shape(w: int, n: int, first: int) -> tuple[list[int], list[int], list[bool]]:
    """Parents, depths and outputs of a window's nodes, which are numbered from ``first`` on."""
    columns = [0, *range(first, first + w - 1)]  # the root and level 0
    level_1 = first + w - 1
    parents = columns[:-1] + columns + list(range(level_1, level_1 + (n - 3) * w))
    depths = [column + level for level in range(n - 1) for column in range(w)][1:]
    return parents, depths, [False] * (len(parents) - w) + [True] * w


def _source_params(resources: Resources) -> LookaheadParams | None:
    """The largest window whose rows cost at most a quarter of a plain step, if any."""
    if resources.n_rewind < NO_LIMIT:
        return None
    curve = resources.cost.curve(0)
    for window in (15, 10, 7, 5):
        params = LookaheadParams(window=window, ngram=5, guesses=window)
        if curve.at(1 + params.window_rows) <= 1.25 * curve.at(1):
            return params
    return None


spec = MethodSpec(
    name="lookahead",
    title="Lookahead",
    params=LookaheadParams,
    make=lambda params, resources: Lookahead(params),
    as_source=AsSource(_source_params),
)
