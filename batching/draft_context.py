"""DraftContext: a tree grown in a context of its own, one decode a level.

What draft models and autoregressive draft heads need: the tokens of a level come from the output
of the level before. Every node that may get children lives in a sequence of its own, which holds
the committed text and the path down to it; a node's first child goes on in its parent's sequence,
the others get copies. Nothing of a grown tree stays, but where it is a chain, what the text then
took of it need not be decoded again. A target that cannot take it back goes back to its state from
before the tree. Rows may carry embeddings, which a head computes from more than a token; what was
guessed of them is always decoded again once it is known. Pure bookkeeping over ``Target``.
"""

from __future__ import annotations

from collections.abc import Sequence

from batching.cache import END, SequenceCache, common_prefix
from batching.rows import Rows
from batching.target import Output, Target
from batching.tree import NO_LIMIT, Floats


class DraftContext:
    """The committed text in a draft context, and the tree below its last token.

    n_leaves  nodes that can be decoded in one level: the sequences in use
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.n_leaves = 1
        self._cache = SequenceCache(target)
        self._chain: list[int] = []  # tokens of sequence 0 beyond the committed ones
        self._forked = False
        self._seq_of: list[int] = []  # of the last level's nodes
        self._depth = 0
        self.root_row = 0

    def begin(self, prompt: Sequence[int], n_leaves: int = 1) -> None:
        """Hold ``prompt`` but for its last token; what is there of it already is not decoded.

        Raises TreeTooWide when the context has fewer than ``n_leaves`` sequences.
        """
        self._drop_tree(0)
        self._cache.reserve(n_leaves)
        self.n_leaves = n_leaves
        self._cache.prefill(prompt[:-1])

    @property
    def n_past(self) -> int:
        """Committed tokens."""
        return self._cache.n_past

    def keep(self, n_tokens: int, n_leaves: int) -> None:
        """Hold the first ``n_tokens`` of what is committed, for trees with ``n_leaves``."""
        self.begin([*self._cache.tokens[:n_tokens], 0], n_leaves)

    def root(self, tokens: Sequence[int]) -> Output:
        """Commit ``tokens``, the whole text, and start a tree below it.

        ``tokens`` goes on from the text of the last call. Row ``n`` of the output, with ``n`` from
        ``root_row``, is that of the last token.
        """
        return self.extend(tokens[self._cache.n_past :])

    def extend(self, fresh: Sequence[int], embeddings: Floats | None = None) -> Output:
        """The same with the tokens that are new alone, and with embeddings, (n, n_embd)."""
        kept = 0
        is_limited = self.target.n_rewind < NO_LIMIT
        text = [*self._cache.tokens, *fresh] if is_limited else []
        if embeddings is None and not self._forked and self._chain:
            kept = min(common_prefix(self._chain, fresh), len(fresh) - 1)
            self._cache.tokens.extend(self._chain[:kept])
        self._drop_tree(kept)
        rest = text[self._cache.n_past :] if is_limited else list(fresh[kept:])
        self.root_row = len(rest) - 1
        self._seq_of = [0]
        n_batch = self.target.n_batch
        for start in range(0, len(rest), n_batch):
            chunk = rest[start : start + n_batch]
            some = None if embeddings is None else embeddings[start : start + n_batch]
            output = self._cache.extend(chunk, some)
            self.root_row = len(chunk) - 1
        if is_limited:  # what is drafted now cannot be taken back
            self._cache.save()
        return output

    def level(
        self, parents: Sequence[int], tokens: Sequence[int], embeddings: Floats | None = None
    ) -> Output:
        """Decode ``tokens`` below nodes of the level before, in one batch; row i is token i.

        ``parents[i]`` is the index of token i's parent in that level (0 for the root's children).
        At most ``n_leaves`` tokens; several may share a parent.
        """
        n_past = self._cache.n_past
        depth = self._depth
        if self.n_leaves == 1 and embeddings is None:  # a chain
            output = self.target.decode_row(tokens[0], n_past + depth, 1)
            self._depth += 1
            self._chain.append(tokens[0])
            return output
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
            [(seq,) for seq in seqs],
            [True] * len(tokens),
            embeddings,
        )
        output = self.target.decode(rows)
        self._seq_of = seqs
        self._depth += 1
        if not self._forked:
            self._chain.append(tokens[0])
        return output

    @property
    def room(self) -> int:
        """Levels of one node that still fit the context."""
        return self.target.n_ctx - self._cache.n_past - self._depth * self.n_leaves - 1

    def _drop_tree(self, kept: int) -> None:
        """Remove the tree but for the first ``kept`` tokens of its chain, now committed."""
        if self._depth:
            self._cache.truncate(self._cache.n_past)
            if kept:
                end = self._cache.n_past
                for seq in range(1, self.n_leaves):
                    self.target.seq_cp(0, seq, end - kept, end)
        self._chain, self._forked, self._depth = [], False, 0
