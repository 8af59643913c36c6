"""Lookahead decoding: a 2-D window of Jacobi iterations feeds a pool of n-grams.

Matches llama.cpp's ``examples/lookahead`` exactly: the same rows in the same order, the same window
initialisation and roll, the same pool. Fu et al. 2024, "Break the Sequential Dependency of LLM
Inference Using Lookahead Decoding", arXiv 2402.02057. ``docs/batches.md`` draws the batch.

    level        0          1      …   N-2         levels are Jacobi iterations, oldest first
    column 0     root       L1[0]      L[N-2][0]
    column 1     L0[1]      L1[1]      L[N-2][1]   column i looks i + level tokens ahead
    …
    column W-1

The window is a tree: level 0 is a chain below the root, and level j of a column is the child of its
level j-1. The argmax of the last level is the next iteration; each column then forms an n-gram.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.system.params import Params, param

_FIRST_GUESS = 100  # llama.cpp starts column i of every level with token 100 + i


@dataclass(frozen=True)
class LookaheadParams(Params):
    """The defaults are llama.cpp's."""

    window: int = param(15, "W: columns of the window", (1, 128))
    ngram: int = param(5, "N: length of the n-grams, including the key token", (3, 32))
    guesses: int = param(15, "G: n-grams verified per step and kept per key", (1, 128))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window + self.guesses + 1 > 256:
            raise InvalidParameter(
                f"window {self.window} and guesses {self.guesses} need "
                f"{self.window + self.guesses + 1} sequences, the limit is 256; lower one of them"
            )

    @property
    def window_rows(self) -> int:
        """Rows of the window; column 0 of level 0 is the root and does not count."""
        return (self.window - 1) + self.window * (self.ngram - 2)


class NgramPool:
    """For each first token, a ring buffer of up to ``size`` distinct continuations."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rings: dict[int, tuple[list[tuple[int, ...]], int]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Add the n-gram ``(first, *rest)``, replacing the oldest if the ring is full."""
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
    """The window and pool of one text."""

    def __init__(self, params: LookaheadParams) -> None:
        self.params = params
        n_rows = 1 + params.window_rows + params.guesses * (params.ngram - 1)
        self.requires = Requirements(rows=n_rows, branches=params.window + params.guesses)
        self._levels: list[list[int]] = []  # (N-1) lists of W tokens
        self._last_level: list[int] = []  # nodes of this step's last level; empty = no window
        self._pool = NgramPool(params.guesses)

    def begin(self, prompt: Sequence[int]) -> None:
        self._levels = []
        self._pool = NgramPool(self.params.guesses)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._last_level = []
        if not self._levels:  # as in llama.cpp, the prompt's last token is decoded alone
            return
        ngrams = self._pool.starting_with(tokens[-1])
        n_rows = len(ngrams) * (self.params.ngram - 1) + self.params.window_rows
        if budget.room(tree) < n_rows:
            return

        # llama.cpp's sequence ids: first one per column, then one per guess, used or not.
        ends = self._add_ngrams(tree, ngrams)
        self._last_level = self._add_window(tree)
        tree.n_seq = 1 + self.requires.branches
        tree.branches += [*self._last_level, *ends]

    def _add_ngrams(self, tree: TokenTree, ngrams: list[tuple[int, ...]]) -> Sequence[int]:
        """Add the n-grams below the root, level by level; return their last nodes."""
        g, levels = len(ngrams), self.params.ngram - 1
        if not g:
            return []
        tokens = [token for level in zip(*ngrams, strict=True) for token in level]
        first = len(tree)
        parents = [0] * g + list(range(first, first + g * (levels - 1)))
        tree.add_nodes(parents, tokens, [True] * len(tokens))
        return range(len(tree) - g, len(tree))

    def _add_window(self, tree: TokenTree) -> list[int]:
        """Add the window below the root, level by level; return the last level's nodes."""
        w, n = self.params.window, self.params.ngram
        parents, outputs = _window_shape(w, n, len(tree))
        tokens = [*chain.from_iterable(self._levels)]
        tree.add_nodes(parents, tokens[1:], outputs, draft=False)  # tokens[0] is the root
        return list(range(len(tree) - w, len(tree)))

    def observe(self, step: Step) -> None:
        if not self._levels:
            self._start_window(step.output.n_vocab)
            return
        if not self._last_level:
            return
        newest = step.output.argmaxes(self._last_level[0], len(self._last_level))
        self._last_level = []
        oldest = self._levels[0]
        self._roll(newest)
        for first, rest in zip(oldest, zip(*self._levels, strict=True), strict=True):
            self._pool.add(first, rest)
        # Each accepted draft moves the text on by one more token. The last level is unknown there;
        # llama.cpp repeats the first one.
        for _ in step.path[1:]:
            self._roll(self._levels[1])

    def _roll(self, newest: Iterable[int]) -> None:
        self._levels = [*self._levels[1:], list(newest)]

    def _start_window(self, n_vocab: int) -> None:
        start = [(_FIRST_GUESS + i) % n_vocab for i in range(self.params.window)]
        self._levels = [list(start) for _ in range(self.params.ngram - 1)]


@lru_cache(maxsize=256)  # varies only with the number of n-grams before the window
def _window_shape(w: int, n: int, first: int) -> tuple[list[int], list[bool]]:
    """Parents and outputs of the window's nodes, numbered from ``first``."""
    columns = [0, *range(first, first + w - 1)]  # the root and level 0
    level_1 = first + w - 1
    parents = columns[:-1] + columns + list(range(level_1, level_1 + (n - 3) * w))
    return parents, [False] * (len(parents) - w) + [True] * w


spec = MethodSpec(
    name="lookahead",
    title="Lookahead",
    params=LookaheadParams,
    make=lambda params, resources: Lookahead(params),
)
