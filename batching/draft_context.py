"""DraftContext: grows a draft tree level by level in its own context, one decode per level.

For draft models and autoregressive draft heads, where each level's tokens come from the previous
level's output. Every node that may get children has its own sequence: the committed text plus the
path to the node. A node's first child continues its parent's sequence; its other children get
copies. A tree is dropped after use, but the accepted part of a chain stays cached. A target that
cannot rewind returns to the state saved before the tree. Rows may carry embeddings computed by a
head; these are always decoded again once the true ones are known. What decodes is a coroutine
(``together``). Pure bookkeeping over ``Target``.
"""

from __future__ import annotations

from collections.abc import Sequence

from batching.cache import SequenceCache, common_prefix
from batching.rows import Rows
from batching.slots import decoding
from batching.target import END, Output, Target
from batching.together import Coroutine
from batching.tree import NO_LIMIT, Floats


class DraftContext:
    """The committed text in a draft context, and the tree below its last token.

    n_leaves  most nodes in one level: the number of sequences in use
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.n_leaves = 1
        self._cache = SequenceCache(target)
        self._chain: list[int] = []  # uncommitted tokens in sequence 0
        self._forked = False
        self._seq_of: list[int] = []  # sequence of each node in the last level
        self._depth = 0
        self.root_row = 0

    def begin(self, prompt: Sequence[int], n_leaves: int = 1) -> None:
        """A text begins with ``prompt``. What is not cached of it is read for its first tree.

        ``n_leaves`` is limited to the sequences that the context has.
        """
        self.keep(common_prefix(self._cache.tokens, prompt[:-1]), n_leaves)

    def share(self, other: DraftContext, n_tokens: int) -> None:
        """Start with what ``other``, a slot of the same target, has of its first ``n_tokens``."""
        self.keep(0, 1)
        self._cache.share(other._cache, min(n_tokens, other.n_past))

    @property
    def n_past(self) -> int:
        """Number of committed tokens."""
        return self._cache.n_past

    def n_unread(self, tokens: Sequence[int]) -> int:
        """How many rows ``root`` would decode before that of the last token."""
        new = tokens[self.n_past : self.n_past + len(self._chain) + 1]
        return len(tokens) - 1 - self.n_past - self._n_reused(new)

    def _n_reused(self, new_tokens: Sequence[int]) -> int:
        """How many of the chain's tokens ``new_tokens`` begin with; their last is decoded."""
        if self._forked or not self._chain:
            return 0
        return min(common_prefix(self._chain, new_tokens), len(new_tokens) - 1)

    def keep(self, n_tokens: int, n_leaves: int) -> None:
        """Keep the first ``n_tokens`` committed tokens; later trees have ``n_leaves``."""
        self._drop_tree(0)
        self.n_leaves = min(n_leaves, self.target.n_seq_max)
        self._cache.reserve(self.n_leaves)
        self._cache.truncate(n_tokens)

    def root(self, tokens: Sequence[int]) -> Coroutine[Output]:
        """Commit ``tokens``, the whole text, and start a tree below it.

        ``tokens`` must extend the text of the last call. The last token's output is in row
        ``root_row``.
        """
        return self.extend(tokens[self._cache.n_past :])

    def extend(
        self, new_tokens: Sequence[int], embeddings: Floats | None = None
    ) -> Coroutine[Output]:
        """Like ``root`` with only the new tokens; ``embeddings`` are (n, n_embd)."""
        is_limited = self.target.n_rewind < NO_LIMIT
        text = [*self._cache.tokens, *new_tokens] if is_limited else []
        n_reused = self._n_reused(new_tokens) if embeddings is None else 0
        self._cache.tokens.extend(self._chain[:n_reused])
        self._drop_tree(n_reused)
        pending = text[self._cache.n_past :] if is_limited else list(new_tokens[n_reused:])
        self.root_row = len(pending) - 1
        self._seq_of = [0]
        n_batch = self.target.n_batch
        for start in range(0, len(pending), n_batch):
            chunk = pending[start : start + n_batch]
            inputs = None if embeddings is None else embeddings[start : start + n_batch]
            output = yield from self._cache.extend(chunk, inputs)
            self.root_row = len(chunk) - 1
        if is_limited:  # the coming tree cannot be rewound
            self._cache.save()
        return output

    def level(
        self, parents: Sequence[int], tokens: Sequence[int], embeddings: Floats | None = None
    ) -> Coroutine[Output]:
        """Decode the next level in one batch; row i of the output belongs to token i.

        ``parents[i]`` is the index of token i's parent in the previous level (0 for the root).
        At most ``n_leaves`` tokens; several may share a parent.
        """
        n_past = self._cache.n_past
        depth = self._depth
        free = [s for s in range(self.n_leaves) if s not in {self._seq_of[p] for p in parents}]
        taken: set[int] = set()
        seqs = []
        for parent in parents:
            seq = self._seq_of[parent]
            if seq in taken:
                source, seq = seq, free.pop()
                if depth or self._forked:
                    self.target.seq_rm(seq, n_past, END)
                if depth:
                    self.target.seq_cp(source, seq, n_past, n_past + depth)
                self._forked = True
            taken.add(seq)
            seqs.append(seq)
        if seqs != [0]:
            self._forked = True
        position = n_past + depth
        rows = Rows(
            list(tokens),
            [position] * len(tokens),
            [range(seq, seq + 1) for seq in seqs],
            [True] * len(tokens),
            embeddings,
        )
        output = yield from decoding(self.target, rows)
        self._seq_of = seqs
        self._depth += 1
        if not self._forked:
            self._chain.append(tokens[0])
        return output

    @property
    def room(self) -> int:
        """How many more levels of one node fit the context."""
        return self.target.n_ctx - self._cache.n_past - self._depth * self.n_leaves - 1

    def _drop_tree(self, kept: int) -> None:
        """Remove the tree except the first ``kept`` tokens of its chain, which are committed."""
        if self._depth:
            self._cache.truncate(self._cache.n_past)
            if kept:
                end = self._cache.n_past
                for seq in range(1, self.n_leaves):
                    self.target.seq_cp(0, seq, end - kept, end)
        self._chain, self._forked, self._depth = [], False, 0
