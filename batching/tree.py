"""TokenTree: what one step asks the model to look at.

Pure: knows neither llama.cpp nor any method. A node is an index; node 0, the root, is the last
committed token, whose KV entry does not exist yet. Parents come before their children, so the
order in which nodes are added is also an order in which they can be decoded, and it becomes the
row order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

NO_LIMIT = 1 << 30


class TokenTree:
    """Tokens that hang below the last committed one, as parallel lists indexed by node.

    tokens       token id of each node
    parents      parent node; -1 for the root
    depths       distance from the root, so that a node's position is ``n_past + depth``
    outputs      whether the node's logits are wanted
    probs        estimated probability that the node is accepted if its parent is; 1 = no estimate
    draft_probs  node -> q over all tokens, ``(n_vocab,)``, of a sampled draft; others are certain
    n_drafted    nodes that may be accepted: the first after the root. Those of lookahead's window,
                 which may not, come after them
    sources      node -> name of what drafted it, where a drafter combines several; else empty
    branches     nodes that end a sequence, in seq_id order; ``branches[0]`` is the root, which ends
                 sequence 0, the committed text. Drafters whose layout must be exact append to it;
                 leaves that are in no branch get the sequences after those.
    n_seq        sequences that are to be in use, where the layout must be exact; 0 = as many as
                 its branches need
    """

    __slots__ = (
        "branches",
        "depths",
        "draft_probs",
        "n_drafted",
        "n_seq",
        "outputs",
        "parents",
        "probs",
        "sources",
        "tokens",
    )

    def __init__(self, token: int) -> None:
        self.tokens: list[int] = [token]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.outputs: list[bool] = [True]
        self.probs: list[float] = [1.0]
        self.draft_probs: dict[int, Floats] = {}
        self.sources: dict[int, str] = {}
        self.branches: list[int] = [0]
        self.n_seq = 0
        self.n_drafted = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node but the root is a draft that hangs below the one before it."""
        n = len(self.tokens) - 1
        return self.depths[-1] == n == self.n_drafted

    def add(
        self,
        parent: int,
        token: int,
        *,
        output: bool = True,
        draft: bool = True,
        merge: bool = True,
        prob: float = 1.0,
        draft_probs: Floats | None = None,
    ) -> int:
        """Hang ``token`` below ``parent`` and return its node.

        With ``merge`` an equal child that is there already is returned instead (and gets output if
        it is wanted now, and ``prob`` if that is higher). Without it the node is always new, as in
        llama.cpp's lookahead, where n-grams with a common prefix stay separate rows.
        ``draft=False`` adds a node that is only looked at and never accepted, such as a token of
        lookahead's window; no draft can come after it.
        """
        if draft:
            node = self._child(parent, token) if merge else 0
            if node:
                self.outputs[node] = self.outputs[node] or output
                self.probs[node] = max(self.probs[node], prob)
                return node
            self._count_drafts(1)
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.outputs.append(output)
        self.probs.append(prob)
        if draft_probs is not None:
            self.draft_probs[node] = draft_probs
        return node

    def add_chain(
        self,
        parent: int,
        tokens: Sequence[int],
        probs: Sequence[float] | None = None,
        *,
        max_new: int = NO_LIMIT,
    ) -> int:
        """Add ``tokens`` below ``parent`` as a chain and return the node of its end.

        The same as adding one after the other, but faster: most drafts are chains. At most
        ``max_new`` nodes are new; equal children that exist already do not count.
        """
        max_new = max(0, max_new)
        if len(self.tokens) == 1:
            return self._append_chain(parent, tokens[:max_new], probs and probs[:max_new])
        path = self.follow(parent, tokens)
        for node, prob in zip(path, probs or [1.0] * len(path), strict=False):
            self.outputs[node] = True
            self.probs[node] = max(self.probs[node], prob)
        i = len(path)
        end = i + max_new
        parent = path[-1] if path else parent
        return self._append_chain(parent, tokens[i:end], probs and probs[i:end])

    def add_nodes(
        self,
        parents: Sequence[int],
        depths: Sequence[int],
        tokens: Sequence[int],
        outputs: Sequence[bool],
        *,
        draft: bool = True,
    ) -> None:
        """Add nodes, unmerged: the same as one after the other, for less. Parents may be new.

        ``depths`` is one more than the parent's of each: who adds many nodes knows their shape.
        """
        if draft:
            self._count_drafts(len(tokens))
        self.tokens += tokens
        self.parents += parents
        self.depths += depths
        self.outputs += outputs
        self.probs += [1.0] * len(tokens)

    def _append_chain(
        self, parent: int, tokens: Sequence[int], probs: Sequence[float] | None
    ) -> int:
        """New nodes for all of ``tokens``, whose first is no child of ``parent`` yet."""
        first, n = len(self.tokens), len(tokens)
        if not n:
            return parent
        self._count_drafts(n)
        parents = [parent, *range(first, first + n - 1)]
        depth = self.depths[parent]
        self.tokens += tokens
        self.parents += parents
        self.depths += range(depth + 1, depth + 1 + n)
        self.outputs += [True] * n
        self.probs += probs or [1.0] * n
        return first + n - 1

    def _count_drafts(self, n: int) -> None:
        """Take the next ``n`` nodes for drafts."""
        if self.n_drafted != len(self.tokens) - 1:
            raise ValueError("drafts cannot be added after nodes that are none")
        self.n_drafted += n

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes but the root and ``nodes``: drafts, ascending, with all their parents.

        What is left is numbered anew, in the same order. To be called before branches are named and
        before nodes are added that are no drafts.
        """
        n = len(nodes)
        if n == len(self.tokens) - 1:
            return
        if not n or nodes[-1] == n:  # the first ones, which keep their numbers
            del self.tokens[n + 1 :]
            del self.parents[n + 1 :]
            del self.depths[n + 1 :]
            del self.outputs[n + 1 :]
            del self.probs[n + 1 :]
        else:
            new = {node: i for i, node in enumerate(nodes, 1)}
            new[0] = 0
            kept = [0, *nodes]
            self.parents = [-1, *[new[self.parents[node]] for node in nodes]]
            self.tokens = [self.tokens[node] for node in kept]
            self.depths = [self.depths[node] for node in kept]
            self.outputs = [self.outputs[node] for node in kept]
            self.probs = [self.probs[node] for node in kept]
        if self.draft_probs:
            q = self.draft_probs
            self.draft_probs = {i: q[node] for i, node in enumerate(nodes, 1) if node in q}
        self.n_drafted = n

    def follow(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """The drafts that hold ``tokens`` below ``parent``, one below the other, as far as they go.

        Where equal children stand side by side, the first is followed.
        """
        path = []
        node, parents, drafted, last = parent, self.parents, self.tokens, self.n_drafted
        for token in tokens:
            # In a chain the child is the next node, and a first child always is the first found.
            if node < last and parents[node + 1] == node and drafted[node + 1] == token:
                node += 1
            elif not (node := self._child(node, token)):
                break
            path.append(node)
        return path

    def children(self, parent: int, token: int) -> list[int]:
        """Drafts below ``parent`` that hold ``token``: one at most unless added unmerged."""
        found = []
        node = self._child(parent, token)
        while node:
            found.append(node)
            node = self._child(parent, token, node)
        return found

    def _child(self, parent: int, token: int, after: int = 0) -> int:
        """The first draft below ``parent`` that holds ``token``, behind node ``after``; 0 = none.

        Found by looking through a list, which for a step's nodes is quicker than an index.
        """
        tokens, end = self.tokens, self.n_drafted + 1
        node = max(parent, after)
        try:
            while True:
                node = self.parents.index(parent, node + 1, end)
                if tokens[node] == token:
                    return node
        except ValueError:
            return 0

    def path_probs(self) -> list[float]:
        """Estimated probability that each node is accepted; 1 for the root."""
        found = [1.0]
        for parent, prob in zip(self.parents[1:], self.probs[1:], strict=True):
            found.append(found[parent] * prob)
        return found

    def likeliest_path(self) -> list[int]:
        """The path with the most expected tokens, without the root.

        Where drafts were sampled, it is the path sampled first at each node: choosing among
        samples by what was drawn would change their distribution.
        """
        if self.draft_probs:
            path, end = [0], self.n_drafted + 1
            while path[-1] in self.parents[path[-1] + 1 : end]:
                path.append(self.parents.index(path[-1], path[-1] + 1, end))
            return path[1:]
        expected = [0.0]  # tokens of the path that ends with a node
        probs = self.path_probs()
        for node in range(1, self.n_drafted + 1):
            expected.append(expected[self.parents[node]] + probs[node])
        return self.path_to(expected.index(max(expected)))[1:]

    def drafts(self) -> dict[int, list[int]]:
        """Draft nodes by parent, in the order they were added."""
        found: dict[int, list[int]] = {}
        for node in range(1, self.n_drafted + 1):
            found.setdefault(self.parents[node], []).append(node)
        return found

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        path = [node]
        while node:
            node = self.parents[node]
            path.append(node)
        path.reverse()
        return path
