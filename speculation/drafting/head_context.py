"""HeadContext: the KV state of a head that takes the target's states as input, and its trees.

A row of the head combines a token with the target's state before it. States arrive as the target
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
from typing import Generic, TypeVar

import numpy as np

from batching.cache import common_prefix
from batching.draft_context import DraftContext
from batching.rows import Rows
from batching.slots import decoding
from batching.target import Output
from batching.together import Coroutine
from batching.tree import Floats
from speculation.drafting.tree_growth import Top, top_tokens, with_target_ids
from speculation.heads.base import HeadInContext

H = TypeVar("H", bound=HeadInContext)
_MAX_OUTPUT_ROWS = 16  # more new rows than this are decoded without output, except the last


class _HeadContext(Generic[H]):
    """Common to all head contexts.

    top  the likeliest tokens for a row of the head's output
    """

    def __init__(self, head: H, top: Top) -> None:
        self.head = head
        self.top = top

    @property
    def needs_hidden(self) -> bool:
        return self.head.needs_hidden

    @property
    def needs_layers(self) -> tuple[int, ...]:
        return self.head.layers


class HeadKVState(_HeadContext[H]):
    """Tracks which tokens of the text have a row; reads prompts (``batching.cache.StateReader``).

    offset  a state at position p makes the row of the token at p + offset
    window  tokens at the end of a prompt whose states to read, for the next texts
    """

    offset = 1

    def __init__(self, head: H, top: Top) -> None:
        super().__init__(head, top)
        self.window = 0
        self._text: list[int] = []  # of a prompt, only the part read so far
        self._prompt: list[int] = []
        self._positions: list[int] = []  # positions in the text that have a row
        self._states: dict[int, Floats] = {}  # by position, until it has a row

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


class HeadContext(HeadKVState[HeadInContext]):
    """The context of an autoregressive head, which continues from its own states.

    n_leaves  most nodes in one level
    """

    def __init__(self, head: HeadInContext) -> None:
        super().__init__(head, with_target_ids(top_tokens, head.tokens))
        self.n_leaves = 1
        self._max_tree_rows = 0
        self._draft = DraftContext(head.context)
        self._row = 0  # output row of the last level's first node
        self._output: Output | None = None

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """Set the sizes of the next text's trees; return the depth they can reach.

        window    prompt tokens to read
        n_leaves  most nodes in one level
        depth     levels
        """
        self.window = window
        self._max_tree_rows = depth * n_leaves
        if n_leaves != self.n_leaves:
            self.n_leaves = n_leaves
            self._draft.keep(len(self._positions), n_leaves)
        return depth

    def clear(self) -> None:
        """Forget the text, and free its cells."""
        self.begin(())

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
        n_rows = len(self._positions) + len(positions) + self._max_tree_rows
        if not positions or positions[-1] != last or n_rows > self.head.context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        new_tokens = [tokens[position] for position in positions]
        encoded = yield from self.head.encode(np.stack(states))
        embeddings = self.head.inputs(new_tokens, encoded)
        if self._draft.n_past != len(self._positions):  # an error interrupted the last step
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


class AttachedHeadContext(_HeadContext[HeadInContext]):
    """The context of a head that attends to the target's KV cache and has none of its own.

    A tree needs only the state before the text's last token; all of its rows have that token's
    position.
    """

    window = 1

    def __init__(self, head: HeadInContext) -> None:
        super().__init__(head, with_target_ids(top_tokens, head.tokens))
        self._text: list[int] = []
        self._last = -1  # position of the latest state
        self._state: Floats | None = None
        self._position = 0
        self._output: Output | None = None

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """Nothing to prepare; any depth works."""
        return depth

    def begin(self, tokens: Sequence[int]) -> int:
        self._text = list(tokens)
        self._last = -1
        return max(0, len(tokens) - 1)

    def clear(self) -> None:
        """Forget the text."""
        self.begin(())

    def read(self, first: int, n: int, output: Output) -> None:
        self.add_state(first + n - 1, output, n - 1)

    def add_state(self, position: int, output: Output, row: int) -> None:
        self._last, self._state = position, self.head.states_of(output, row).copy()

    def has_begun(self, prompt: Sequence[int]) -> bool:
        return self._text == list(prompt[:-1])

    def root(self, tokens: Sequence[int]) -> Coroutine[tuple[Output, int] | None]:
        """Decode the text's last token; its output and row.

        None if the state before it is unknown.
        """
        self._position = len(tokens) - 1
        if self._last != self._position - 1 or self._state is None:
            return None
        return (yield from self._decode(tokens[-1:], self._state[None])), 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Output]:
        assert self._output is not None, "a tree begins with its root"
        states = np.stack([self._output.hidden(parent) for parent in parents])
        return self._decode(tokens, states)

    def _decode(self, tokens: Sequence[int], states: Floats) -> Coroutine[Output]:
        n = len(tokens)
        encoded = yield from self.head.encode(states)
        rows = Rows(
            tokens,
            [self._position] * n,
            [range(1)] * n,
            [True] * n,
            self.head.inputs(tokens, encoded),
        )
        self._output = yield from decoding(self.head.context, rows)
        return self._output
