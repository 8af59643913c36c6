"""The contexts of heads that take the target's states as input, and what grows trees in them.

A row of a head combines a token with the target's state before it. States arrive as the target
decodes the prompt and the steps; each waits until the next token of the text is known. Below the
text's last token, the head's own predictions replace the target's states. They are dropped with the
tree; accepted tokens are decoded again from the true states, as in EAGLE (arXiv 2401.15077).

States may be missing, because that part of the prompt was cached or because other drafters ran. The
head's context then skips these tokens: its positions count rows, and attention depends only on the
distance between rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from batching.cache import common_prefix
from batching.draft_context import DraftContext
from batching.errors import CacheFull
from batching.rows import Rows
from batching.slots import decoding
from batching.target import END, Output
from batching.together import Coroutine, done, run
from batching.tree import NO_LIMIT, Floats
from speculation.drafting.tree_growth import Scores, top_tokens, with_target_ids
from speculation.heads.base import HeadInContext
from speculation.heads.dflash import DFlashHead

_MAX_OUTPUT_ROWS = 16  # more new rows than this are decoded without output, except the last


class HeadStates:
    """Common to all: which tokens of the text have a row, and the states of the others.

    Reads prompts (``batching.cache.StateReader``).

    top     the likeliest tokens for a row of the head's output
    offset  a state at position p makes the row of the token at p + offset

    Whoever begins a text sets:

    window    tokens at the end of a prompt whose states to read
    n_leaves  most nodes in a level of its trees
    depth     levels of its trees, at most ``max_depth``
    """

    offset = 1
    max_depth = NO_LIMIT

    def __init__(self, head: HeadInContext) -> None:
        self.head, self.top = head, with_target_ids(top_tokens, head.tokens)
        self.needs_hidden, self.needs_layers = head.needs_hidden, head.layers
        self.window, self.n_leaves, self.depth = 0, 1, 1
        self._text: list[int] = []  # of a prompt, only the part read so far
        self._prompt: list[int] = []
        self._positions: list[int] = []  # positions in the text that have a row
        self._states: dict[int, Floats] = {}  # by position, until it has a row

    def clear(self) -> None:
        """Forget the text, and free its cells."""
        self.begin(())

    def begin(self, tokens: Sequence[int]) -> int:
        """Start a text with ``tokens``; return the first position whose state is needed.

        Rows and states of the prefix shared with the last text are kept. The position after it is
        always requested.
        """
        n_common = common_prefix(self._text, tokens)
        del self._positions[bisect_left(self._positions, n_common) :]
        self._states = {p: state for p, state in self._states.items() if p < n_common}
        first = len(tokens)
        if self.window:
            known = max(self._last_position - self.offset, *self._states, -1)
            first = max(0, first - self.window, known + 1)
        self._prompt, self._text = list(tokens), list(tokens[:first])
        return first

    def read(self, first: int, n: int, output: Output) -> None:
        for row in range(n):
            self.add_state(first + row, output, row)
        self._text = self._prompt[: first + n]

    def add_state(self, position: int, output: Output, row: int) -> None:
        """Store the target's state at ``position``, from ``row`` of its output."""
        self._states[position] = self.head.states_of(output, row).copy()

    def has_begun(self, prompt: Sequence[int]) -> bool:
        """Whether ``begin`` was called for this prompt, without its last token."""
        return self._text == list(prompt[:-1])

    @property
    def _last_position(self) -> int:
        """The last position that has a row; -1 if none."""
        return self._positions[-1] if self._positions else -1

    def _take_states(self, last: int) -> tuple[list[int], list[Floats]]:
        """Take the states before position ``last`` that have no row yet; discard the rest.

        Returns the positions of their rows, ascending, and the states.
        """
        done = self._last_position
        known = sorted(p for p in self._states if done < p + self.offset and p < last)
        states = [self._states[position] for position in known]
        self._states.clear()
        return [position + self.offset for position in known], states


class HeadContext(HeadStates):
    """The context of an autoregressive head, which continues from its own states."""

    def __init__(self, head: HeadInContext) -> None:
        super().__init__(head)
        self._draft = DraftContext(head.context)
        self._row = 0  # output row of the last level's first node
        self._output: Output | None = None

    def begin(self, tokens: Sequence[int]) -> int:
        first = super().begin(tokens)
        self._draft.keep(len(self._positions), self.n_leaves)
        return first

    def root(self, tokens: Sequence[int]) -> Coroutine[tuple[Output, int] | None]:
        """Decode rows for the new states of ``tokens``, the whole text; output and row of the last.

        None if the state before the last token is unknown, or if the context has no room for these
        rows and a tree.
        """
        last = len(tokens) - 1
        positions, states = self._take_states(last)
        n_rows = len(self._positions) + len(positions) + self.depth * self.n_leaves
        if not positions or positions[-1] != last or n_rows > self.head.context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        new_tokens = [tokens[position] for position in positions]
        encoded = yield from self.head.encode(np.stack(states))
        embeddings = self.head.inputs(new_tokens, encoded)
        n_leaves = min(self.n_leaves, self.head.context.n_seq_max)
        # An error interrupted the last step, or a text with smaller trees began like this one.
        if (self._draft.n_past, self._draft.n_leaves) != (len(self._positions), n_leaves):
            self._draft.keep(len(self._positions), self.n_leaves)
        if len(new_tokens) > _MAX_OUTPUT_ROWS:  # a prompt: output only for the last row
            self.head.context.want_hidden(False)
            try:
                yield from self._draft.extend(new_tokens[:-1], embeddings[:-1])
            finally:
                self.head.context.want_hidden(True)
            new_tokens, embeddings = new_tokens[-1:], embeddings[-1:]
        self._output = yield from self._draft.extend(new_tokens, embeddings)
        self._row = self._draft.root_row
        self._positions += positions
        return self._output, self._row

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Output]:
        """Decode ``tokens`` below nodes of the previous level; see ``DraftContext.level``."""
        assert self._output is not None, "a tree begins with its root"
        states = np.stack([self._output.hidden(self._row + parent) for parent in parents])
        self._row = 0
        inputs = self.head.inputs(tokens, states)
        self._output = yield from self._draft.level(parents, tokens, inputs)
        return self._output


class AttachedHeadContext(HeadStates):
    """The context of a head that attends to the target's KV cache and has none of its own.

    A tree needs only the state before the text's last token; all of its rows have that token's
    position.
    """

    def begin(self, tokens: Sequence[int]) -> int:
        self.window = min(self.window, 1)
        return super().begin(tokens)

    def root(self, tokens: Sequence[int]) -> Coroutine[tuple[Output, int] | None]:
        """Decode the text's last token; its output and row.

        None if the state before it is unknown.
        """
        last = len(tokens) - 1
        positions, states = self._take_states(last)
        if not positions or positions[-1] != last:
            return None
        self._position = last
        return (yield from self._decode(tokens[-1:], states[-1][None])), 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Output]:
        return self._decode(tokens, np.stack([self._output.hidden(row) for row in parents]))

    def _decode(self, tokens: Sequence[int], states: Floats) -> Coroutine[Output]:
        n = len(tokens)
        encoded = yield from self.head.encode(states)
        inputs = self.head.inputs(tokens, encoded)
        rows = Rows(tokens, [self._position] * n, [range(1)] * n, [True] * n, inputs)
        self._output: Output = yield from decoding(self.head.context, rows)
        return self._output


class BlockContext(HeadStates):
    """The context of a head that drafts a whole block in one decode, and its trees.

    The head has a row for each token of the text, computed from the target's state at that token.
    A block is decoded after these rows and removed by the next decode. Its positions are the levels
    of a tree: the children of every node of a level are the likeliest tokens at the next position.
    From these, the tree of a given size with the most expected accepted tokens is built (Ringel and
    Romano 2026, "Accelerating Speculative Decoding with Block Diffusion Draft Trees", arXiv
    2604.12989).
    """

    head: DFlashHead

    offset = 0  # a row is computed from the state at its own token

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self.max_depth = min(head.n_drafts, head.context.n_batch - 1)

    def clear(self) -> None:
        super().clear()
        self.head.context.seq_rm(0, 0, END)

    def read(self, first: int, n: int, output: Output) -> None:
        super().read(first, n, output)
        run(self._add_rows(first + n))  # at once: the states of a prompt would take much memory

    def root(self, tokens: Sequence[int]) -> Coroutine[tuple[Scores, int] | None]:
        """Decode a block after ``tokens``, the whole text; return the scores of its first level.

        None if the state before the last token is unknown, or the context is full.
        """
        last = len(tokens) - 1
        yield from self._add_rows(last)
        block = [tokens[-1], *[self.head.mask] * self.depth]
        n_past, n, context = len(self._positions), len(block), self.head.context
        if not n_past or self._last_position != last - 1 or n_past + n > context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        rows = Rows(block, range(n_past, n_past + n), [range(1)] * n, [True] * n)
        output = yield from self._decode(rows)
        self._scores = _BlockLevel(output, 0)
        return self._scores, 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Scores]:
        """The block's scores for the children of ``tokens``, nodes of the previous level."""
        above = self._scores
        self._scores = _BlockLevel(above.output, above.depth + 1)
        return done(self._scores)

    def _add_rows(self, last: int) -> Coroutine[None]:
        """Decode rows for the collected states of tokens before ``last``, if there are cells."""
        new_positions, states = self._take_states(last)
        n_batch = self.head.context.n_batch
        for start in range(0, len(new_positions), n_batch):
            chunk = new_positions[start : start + n_batch]
            n_past, n = len(self._positions), len(chunk)
            if n_past + n > self.head.context.n_ctx:
                return
            inputs = np.stack(states[start : start + n_batch])
            positions = range(n_past, n_past + n)
            rows = Rows([0] * n, positions, [range(1)] * n, [False] * n, inputs)
            try:
                yield from self._decode(rows)
            except CacheFull:  # other texts have them
                return
            self._positions += chunk

    def _decode(self, rows: Rows) -> Coroutine[Output]:
        """Decode rows after those of the text, replacing the last block."""
        self.head.context.seq_rm(0, len(self._positions), END)
        return decoding(self.head.context, rows)


class _BlockLevel:
    """The logits at one position of a block, which are the same below every node of a level."""

    def __init__(self, output: Output, depth: int) -> None:
        self.output, self.depth = output, depth

    def logits(self, row: int) -> Floats:
        return self.output.logits(1 + self.depth)
