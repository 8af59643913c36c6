"""HeadContext: a text in the context of a head that is fed with the target's states, and trees.

A row of such a head takes a token and the state before it. States come in as the target reads the
prompt and decodes the steps; each waits until the text has the token after it. Below the text's
last token the head's own guesses stand for the states, and go again with the tree: what was
accepted of it is decoded anew from the true states, as in EAGLE (arXiv 2401.15077).

Where states are missing, because the target held that part of the text already or other drafters
were at work, the head's context simply lacks those tokens: its positions count rows, and attention
knows only how far apart two rows are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from batching.cache import common_prefix
from batching.draft_context import DraftContext
from batching.rows import Rows
from batching.target import Output
from batching.tree import Floats
from speculation.drafting.tree_growth import Top, likeliest, named
from speculation.heads.base import DraftHead, StateHead

H = TypeVar("H", bound=StateHead)
_UNREAD = 16  # rows before the last that are decoded in one batch with it, output and all


class _OfHead(Generic[H]):
    """What drafting asks of a head, whatever becomes of the text.

    top  the likeliest tokens after a row of what the head gives
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


class HeadKVState(_OfHead[H]):
    """What a head's context holds of the text; reads prompts (``batching.cache.StateReader``).

    ahead   how far behind a state in the text the token is that its row stands for
    window  tokens at the end of a prompt whose states are wanted, for the texts to come
    """

    ahead = 1

    def __init__(self, head: H, top: Top) -> None:
        super().__init__(head, top)
        self.window = 0
        self._text: list[int] = []  # as far as it is known and, of a prompt, was read
        self._prompt: list[int] = []
        self._places: list[int] = []  # which tokens of the text have a row
        self._states: dict[int, Floats] = {}  # by token, until there is a row for it

    def begin(self, tokens: Sequence[int]) -> int:
        """A text starts with ``tokens``: the first whose state is wanted, as far as needed.

        What was known of the tokens that the text before began with stays; the first after these is
        asked for, seen before or not.
        """
        n_common = common_prefix(self._text, tokens)
        del self._places[bisect_left(self._places, n_common) :]
        self._states = {p: state for p, state in self._states.items() if p < n_common}
        first = len(tokens)
        if self.window:
            known = max(self._done - self.ahead, *self._states, -1)
            first = max(0, first - self.window, known + 1)
        self._prompt, self._text = list(tokens), list(tokens[:first])
        return first

    def read(self, first: int, n: int, output: Output) -> None:
        for row in range(n):
            self.see(first + row, output, row)
        self._text = self._prompt[: first + n]

    def see(self, place: int, output: Output, row: int) -> None:
        """The state after token ``place`` of the text is in ``row`` of the target's output."""
        self._states[place] = self.head.states_of(output, row).copy()

    def follows(self, prompt: Sequence[int]) -> bool:
        """Whether ``begin`` was called for this very prompt, but for its last token."""
        return self._text == list(prompt[:-1])

    @property
    def _done(self) -> int:
        """The last token that has a row."""
        return self._places[-1] if self._places else -1

    def _take_states(self, last: int) -> tuple[list[int], list[Floats]]:
        """States that came and have no row yet, of tokens before ``last``: their rows' tokens, by
        place in the text, and what they are. None is left."""
        done = self._done
        known = sorted(p for p in self._states if done < p + self.ahead and p < last)
        states = [self._states[place] for place in known]
        self._states.clear()
        return [place + self.ahead for place in known], states


class HeadContext(HeadKVState[DraftHead]):
    """The text in the context of a head that goes on from its own states.

    n_leaves nodes that can be decoded in one level
    """

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head, named(likeliest, head.tokens))
        self.n_leaves = 1
        self._n_below = 0  # rows of a tree below the text's last token, at most
        self._levels = DraftContext(head.context)
        self._row = 0  # of the last level's first node in its output
        self._output: Output | None = None

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """A text will be drafted with trees of ``n_leaves``, ``depth`` levels deep, by ``window``
        tokens of its prompt: how deep they can be."""
        self.window = window
        self._n_below = depth * n_leaves
        if n_leaves != self.n_leaves:
            self.n_leaves = n_leaves
            self._levels.keep(len(self._places), n_leaves)
        return depth

    def begin(self, tokens: Sequence[int]) -> int:
        first = super().begin(tokens)
        self._levels.keep(len(self._places), self.n_leaves)
        return first

    def root(self, tokens: Sequence[int]) -> tuple[Output, int] | None:
        """Decode rows for the tokens of the text whose states came: output and row of the last.

        None where the state before the last token is unknown, or the context has no room for that
        and a tree.
        """
        last = len(tokens) - 1
        places, known = self._take_states(last)
        n_rows = len(self._places) + len(places) + self._n_below
        if not places or places[-1] != last or n_rows > self.head.context.n_ctx:
            return None
        self._text += tokens[len(self._text) :]
        fresh = [tokens[place] for place in places]
        embeddings = self.head.inputs(fresh, self.head.encode(np.stack(known)))
        if self._levels.n_past != len(self._places):  # an error came in between
            self._levels.keep(len(self._places), self.n_leaves)
        if len(fresh) > _UNREAD:  # a prompt: no output but for the last row
            self.head.context.want_hidden(False)
            try:
                self._levels.extend(fresh[:-1], embeddings[:-1])
            finally:
                self.head.context.want_hidden(True)
            fresh, embeddings = fresh[-1:], embeddings[-1:]
        self._output = self._levels.extend(fresh, embeddings)
        self._row = self._levels.root_row
        self._places += places
        return self._output, self._row

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Output:
        """Decode ``tokens`` below nodes of the level before; see ``DraftContext.level``."""
        assert self._output is not None, "a tree begins with its root"
        states = np.stack([self._output.hidden(self._row + parent) for parent in parents])
        self._row = 0
        self._output = self._levels.level(parents, tokens, self.head.inputs(tokens, states))
        return self._output


class AttachedHeadContext(_OfHead[DraftHead]):
    """The same for a head that attends to the target's KV cache, and so holds nothing of a text.

    A tree needs the state before the text's last token and no other; all of its rows have that
    token's position.
    """

    window = 1

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head, named(likeliest, head.tokens))
        self._text: list[int] = []
        self._last = -1  # the token of the text whose state was seen last
        self._state: Floats | None = None
        self._position = 0
        self._output: Output | None = None

    def prepare(self, window: int, n_leaves: int, depth: int) -> int:
        """Whatever the tree, there is nothing to prepare."""
        return depth

    def begin(self, tokens: Sequence[int]) -> int:
        self._text = list(tokens)
        self._last = -1
        return max(0, len(tokens) - 1)

    def read(self, first: int, n: int, output: Output) -> None:
        self.see(first + n - 1, output, n - 1)

    def see(self, place: int, output: Output, row: int) -> None:
        self._last, self._state = place, self.head.states_of(output, row).copy()

    def follows(self, prompt: Sequence[int]) -> bool:
        return self._text == list(prompt[:-1])

    def root(self, tokens: Sequence[int]) -> tuple[Output, int] | None:
        """Decode the text's last token: output and row. None where the state before it is
        unknown."""
        self._position = len(tokens) - 1
        if self._last != self._position - 1 or self._state is None:
            return None
        return self._decode(tokens[-1:], self._state[None]), 0

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Output:
        assert self._output is not None, "a tree begins with its root"
        states = np.stack([self._output.hidden(parent) for parent in parents])
        return self._decode(tokens, states)

    def _decode(self, tokens: Sequence[int], states: Floats) -> Output:
        n = len(tokens)
        rows = Rows(
            tokens,
            [self._position] * n,
            [range(1)] * n,
            [True] * n,
            self.head.inputs(tokens, self.head.encode(states)),
        )
        self._output = self.head.context.decode(rows)
        return self._output
