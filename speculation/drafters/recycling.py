"""Token recycling: what the model thought likely after a token, last time it was there.

A table holds for every token the k most likely successors of the row where it was decoded last.
They cost nothing: the target computed them anyway. From the last token of the text a tree is grown
through the table, best path first, and the table is refreshed from the rows of every step. After
Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", arXiv 2408.08696. There the tree's shape is fixed by rank; here the successors'
own probabilities shape it, corrected by how often such drafts have held.
"""

from __future__ import annotations

import heapq
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.errors import InvalidParameter
from batching.tree import Floats, TokenTree
from speculation.drafter import Step
from speculation.drafting.estimates import Estimates
from speculation.ranges import check_ranges

ROWS = ("path", "all")
N_SUCCESSORS = 8
# What NumPy raises for a file that is cut, damaged, or an array and no archive of some.
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
_FURTHEST = 8.0  # logits below the highest: e^8 is 3,000
# How often a successor is accepted, by its probability when it was stored, in tenths; set by
# judgement, and soon overruled by what is counted.
PRIORS = (0.04, 0.12, 0.20, 0.27, 0.34, 0.41, 0.48, 0.55, 0.63, 0.75)


@dataclass(frozen=True)
class RecyclingParams:
    """How the tree is grown and the table refreshed.

    nodes   draft tokens of a tree; where the tree has a floor of its own, that counts
    depth   longest path
    rows    whose successors are kept: those of accepted tokens (path), or of rejected ones too
            (all), as in the paper; each costs a partial sort of the vocabulary
    warm    start with the table that comes with the model, if there is one
    """

    nodes: int = 39
    depth: int = 6
    rows: str = "path"
    warm: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, (("nodes", 1, 63), ("depth", 1, 32)))
        if self.rows not in ROWS:
            raise InvalidParameter(f"rows is {self.rows!r}; give one of {', '.join(ROWS)}")


class SuccessorTable:
    """For every token its likeliest successors: ids and probabilities, the likeliest first.

    Kept in memory only. What a text adds replaces what stood there for the token.
    """

    def __init__(
        self, tokens: npt.NDArray[np.integer] | None = None, probs: Floats | None = None
    ) -> None:
        """Start empty, or from ``tokens`` and ``probs``, both (n_vocab, k); 0 = nothing known."""
        self._start = (tokens, probs)
        self._rows: dict[int, list[tuple[int, float]]] = {}

    @classmethod
    def of_sums(
        cls, sums: Mapping[int, Mapping[int, float]], counts: Mapping[int, int], n_vocab: int
    ) -> SuccessorTable:
        """From the probabilities that rows of each token gave its successors, summed, and the
        number of those rows."""
        tokens = np.zeros((n_vocab, N_SUCCESSORS), np.int32)
        probs = np.zeros((n_vocab, N_SUCCESSORS), np.float32)
        for token, found in sums.items():
            likeliest = sorted(found.items(), key=lambda item: -item[1])[:N_SUCCESSORS]
            for i, (successor, p) in enumerate(likeliest):
                tokens[token, i], probs[token, i] = successor, p / counts[token]
        return cls(tokens, probs)

    def of(self, token: int) -> list[tuple[int, float]]:
        """Successors of ``token`` with their probabilities, which fall."""
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = self._from_start(token)
        return row

    def learn(self, token: int, logits: Floats) -> None:
        """Take the successors of ``token`` from the logits of a row, (n_vocab,).

        At most eight, none less likely than the first by a factor of 3,000. Probabilities are among
        these alone: the rest of the vocabulary is not summed up.
        """
        peak = logits.max()
        top = np.flatnonzero(logits > peak - _FURTHEST)  # mostly few: no need to sort the rest
        values = logits[top]
        if len(top) > N_SUCCESSORS:
            likeliest = values.argpartition(-N_SUCCESSORS)[-N_SUCCESSORS:]
            top, values = top[likeliest], values[likeliest]
        order = values.argsort()[::-1]
        weights = np.exp(values[order] - peak)
        weights /= weights.sum()
        self._rows[token] = list(zip(top[order].tolist(), weights.tolist(), strict=True))

    def _from_start(self, token: int) -> list[tuple[int, float]]:
        tokens, probs = self._start
        if tokens is None or probs is None or token >= len(tokens):
            return []
        known = probs[token] > 0
        return list(zip(tokens[token][known].tolist(), probs[token][known].tolist(), strict=True))

    def save(self, path: Path, n_vocab: int) -> None:
        """Write the table for a vocabulary of ``n_vocab`` tokens, 3 bytes a successor or 5.

        The file appears when it is whole.
        """
        small = np.uint16 if n_vocab <= 2**16 else np.uint32
        tokens = np.zeros((n_vocab, N_SUCCESSORS), small)
        probs = np.zeros((n_vocab, N_SUCCESSORS), np.uint8)
        for token in range(n_vocab):
            for i, (successor, p) in enumerate(self.of(token)[:N_SUCCESSORS]):
                tokens[token, i], probs[token, i] = successor, max(1, round(255 * p))
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, tokens=tokens, probs=probs)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, n_vocab: int) -> SuccessorTable:
        """Read a table. Raises InvalidParameter when it is none, or of another vocabulary."""
        try:
            with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
                tokens, probs = file["tokens"], file["probs"]
        except _UNREADABLE as error:
            raise InvalidParameter(f"{path} is no successor table: {error}; make it anew") from None
        if tokens.shape != (n_vocab, N_SUCCESSORS) or probs.shape != tokens.shape:
            raise InvalidParameter(
                f"{path} holds successors for {len(tokens)} tokens, the model has {n_vocab}; "
                f"make it anew from this model"
            )
        return cls(tokens, probs.astype(np.float32) / 255)


class Recycling:
    """A tree through the successor table each step."""

    def __init__(
        self, params: RecyclingParams, table: SuccessorTable, estimates: Estimates | None = None
    ) -> None:
        """``table`` and ``estimates`` may be shared with the texts before."""
        self.params = params
        self.n_branches = min(params.nodes, 60)
        self._table = table
        self._estimates = estimates or Estimates(PRIORS)

    def begin(self, prompt: Sequence[int]) -> None:
        self._estimates.new_text()

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        """Best-first: of all successors of nodes in the tree the one with the likeliest path.

        A node's successors wait behind its likeliest one: one comes into question when the one
        before it is taken.
        """
        floor, most, depth = tree.floor, min(self.params.nodes, tree.room), self.params.depth
        successors, push, pop = self._table.of, heapq.heappush, heapq.heappop
        by_tenth = list(accumulate(map(self._estimates.of, range(10)), max))
        # -path prob, age, parent, its successors, which of them, the parent's path prob
        waiting: list[tuple[float, int, int, list[tuple[int, float]], int, float]] = []
        age = 0
        node, reached, known = 0, 1.0, successors(tree.tokens[0])
        while True:
            if known and tree.depths[node] < depth:
                path_prob = reached * by_tenth[min(9, int(10 * known[0][1]))]
                if path_prob >= floor:
                    push(waiting, (-path_prob, age, node, known, 0, reached))
                    age += 1
            if most <= 0 or not waiting:
                return
            negative, _, parent, siblings, i, above = pop(waiting)
            token, reached = siblings[i][0], -negative
            node = tree.add(parent, token, prob=reached / above)
            most -= 1
            known = successors(token)
            if i + 1 < len(siblings):
                path_prob = above * by_tenth[min(9, int(10 * siblings[i + 1][1]))]
                if path_prob >= floor:
                    push(waiting, (-path_prob, age, parent, siblings, i + 1, above))
                    age += 1

    def observe(self, step: Step) -> None:
        tree, table = step.tree, self._table
        became = step.tokens
        for node, token in zip(step.path, became, strict=True):
            for successor, p in table.of(tree.tokens[node])[:2]:
                self._estimates.learn(min(9, int(10 * p)), held=successor == token)
        if self.params.rows == "all":
            for node, output in enumerate(tree.outputs):
                if output:
                    table.learn(tree.tokens[node], step.output.logits(node))
        else:
            for node in step.path:
                table.learn(tree.tokens[node], step.output.logits(node))
