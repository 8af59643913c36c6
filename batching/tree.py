"""TokenTree: the draft tokens of one step.

Pure: knows neither llama.cpp nor any method. A node is an index; node 0, the root, is the last
committed token, which is not in the KV cache yet. Parents come before their children. The order
in which nodes are added is the row order of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from batching.errors import TreeError

Floats = npt.NDArray[np.float32]

NO_LIMIT = 1 << 30


class TokenTree:
    """Draft tokens below the last committed one, as parallel lists indexed by node.

    tokens       token id of each node
    parents      parent node; -1 for the root
    depths       distance from the root; a node's position is ``n_past + depth``
    outputs      whether the node's logits are needed
    probs        estimated probability that the node is accepted if its parent is; 1 = no estimate
    draft_probs  node -> q over all tokens, ``(n_vocab,)``, for sampled drafts only
    n_drafted    draft nodes, which directly follow the root. Nodes that cannot be accepted, such
                 as lookahead's window, come after them
    sources      node -> name of its source, if a drafter combines several; else empty
    branches     last nodes of branches, in the order of their sequences, for drafters that need an
                 exact layout. Those through a node stay together; the others come after them
    n_seq        sequences in use, if the layout must be exact; 0 = as many as the branches need

    >>> tree = TokenTree(5)
    >>> left, right = tree.add(0, 7, prob=0.6), tree.add(0, 8, prob=0.3)
    >>> tree.add(left, 9, prob=0.5)
    3
    >>> tree.parents, tree.path_probs()
    ([-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.3])
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
        self.branches: list[int] = []
        self.n_seq = 0
        self.n_drafted = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node after the root is a draft and the child of the node before it."""
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
        """Add ``token`` below ``parent`` and return its node.

        With ``merge``, the first existing child with the same token is returned instead; it gets
        output if requested, and ``prob`` if that is higher. Without ``merge`` the node is always
        new, as in llama.cpp's lookahead, where n-grams with a common prefix stay separate rows.
        ``draft=False`` adds a node that is decoded but never accepted, such as a token of
        lookahead's window; no draft can come after it.
        """
        same = self.children(parent, token) if draft and merge else []
        node = same[0] if same else self.add_nodes([parent], [token], [output], [prob], draft=draft)
        self.outputs[node] = self.outputs[node] or output
        self.probs[node] = max(self.probs[node], prob)
        if draft_probs is not None and not same:
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
        """Add ``tokens`` below ``parent`` as a chain, merged, and return its last node.

        Adds at most ``max_new`` nodes; existing equal children do not count.
        """
        path = self.follow(parent, tokens)
        probs = probs or [1.0] * len(tokens)
        for node, prob in zip(path, probs, strict=False):
            self.outputs[node] = True
            self.probs[node] = max(self.probs[node], prob)
        parent = path[-1] if path else parent
        new = slice(len(path), len(path) + max(0, max_new))
        tokens, first = tokens[new], len(self.tokens)
        if not tokens:
            return parent
        parents = [parent, *range(first, first + len(tokens) - 1)]
        self.add_nodes(parents, tokens, [True] * len(tokens), probs[new])
        return first + len(tokens) - 1

    def add_nodes(
        self,
        parents: Sequence[int],
        tokens: Sequence[int],
        outputs: Sequence[bool],
        probs: Sequence[float] | None = None,
        *,
        draft: bool = True,
    ) -> int:
        """Add new nodes, whose parents may be new too, and return the first."""
        first, n = len(self.tokens), len(tokens)
        if draft:
            if self.n_drafted != first - 1:
                raise ValueError("drafts cannot be added after non-draft nodes")
            self.n_drafted += n
        self.tokens += tokens
        self.parents += parents
        for parent in parents:
            self.depths.append(self.depths[parent] + 1)
        self.outputs += outputs
        self.probs += probs or [1.0] * n
        return first

    def keep(self, nodes: Sequence[int]) -> None:
        """Drop all nodes except the root and ``nodes``: ascending, with all their parents.

        The rest is renumbered in the same order. Call it before ordering branches and before
        adding non-draft nodes.
        """
        if len(nodes) == len(self.tokens) - 1:
            return
        kept = [0, *nodes]
        new = {node: i for i, node in enumerate(kept)}
        self.parents = [-1, *[new[self.parents[node]] for node in nodes]]
        self.tokens = [self.tokens[node] for node in kept]
        self.depths = [self.depths[node] for node in kept]
        self.outputs = [self.outputs[node] for node in kept]
        self.probs = [self.probs[node] for node in kept]
        self.draft_probs = {new[node]: q for node, q in self.draft_probs.items() if node in new}
        self.n_drafted = len(nodes)

    def children(self, parent: int, token: int) -> list[int]:
        """Draft children of ``parent`` with ``token``: at most one unless added unmerged.

        A linear scan is faster than an index for the few nodes of a step.
        """
        found, node, end = [], parent, self.n_drafted + 1
        try:
            while True:
                node = self.parents.index(parent, node + 1, end)
                if self.tokens[node] == token:
                    found.append(node)
        except ValueError:
            return found

    def follow(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """The draft nodes that spell the longest prefix of ``tokens`` below ``parent``.

        Among equal siblings, follows the first.
        """
        path: list[int] = []
        for token in tokens:
            nodes = self.children(path[-1] if path else parent, token)
            if not nodes:
                break
            path.append(nodes[0])
        return path

    def take(self, other: TokenTree, n_vocab: int, max_nodes: int) -> None:
        """Become a copy of ``other``, which is below the same token.

        Raises TreeError, changing nothing, unless that has at most ``max_nodes`` tokens of a
        vocabulary of ``n_vocab``, each with its parent, depth and probability.
        """
        tree = TokenTree(self.tokens[0])
        try:
            tree.tokens, tree.parents = [*map(index, other.tokens)], [*map(index, other.parents)]
            tree.depths, tree.outputs = [*map(index, other.depths)], [*map(bool, other.outputs)]
            tree.probs, tree.branches = [*map(float, other.probs)], [*map(index, other.branches)]
            tree.n_seq, tree.n_drafted = index(other.n_seq), index(other.n_drafted)
            tree.draft_probs, tree.sources = {**other.draft_probs}, {**other.sources}
            fields = tree.tokens, tree.parents, tree.depths, tree.probs, tree.outputs
            nodes = [*zip(*fields, strict=True)]
        except (TypeError, ValueError, OverflowError) as error:
            raise TreeError(f"a field of the tree is wrong: {error}") from None
        n = len(nodes)
        if nodes[:1] != [(self.tokens[0], -1, 0, 1.0, True)]:
            raise TreeError("the root is not as it was")
        if n - 1 > max(0, max_nodes):
            raise TreeError(f"there are {n - 1} nodes below the root where {max_nodes} fit")
        for node, (token, parent, depth, prob, _) in enumerate(nodes[1:], 1):
            if not 0 <= token < n_vocab:
                raise TreeError(f"node {node} is token {token} of a vocabulary of {n_vocab}")
            if not 0.0 <= prob <= 1.0:
                raise TreeError(f"node {node} has probability {prob}")
            if not 0 <= parent < node or depth != tree.depths[parent] + 1:
                raise TreeError(f"node {node} is in depth {depth} below node {parent}")
        if not 0 <= tree.n_drafted < n or tree.n_seq < 0:
            raise TreeError(f"{tree.n_drafted} of {n} nodes are drafts, in {tree.n_seq} sequences")
        if not all(0 <= node < n for node in tree.branches):
            raise TreeError(f"branches end at {tree.branches} in {n} nodes")
        for name in self.__slots__:
            setattr(self, name, getattr(tree, name))

    def path_probs(self) -> list[float]:
        """Path probability of each node: the product of ``probs`` from the root; 1 for the root."""
        path_probs = [1.0]
        for parent, prob in zip(self.parents[1:], self.probs[1:], strict=True):
            path_probs.append(path_probs[parent] * prob)
        return path_probs

    def likeliest_path(self) -> list[int]:
        """The path with the most expected accepted tokens, without the root.

        For sampled drafts, the path sampled first at each node: choosing among samples by their
        values would change their distribution.
        """
        if self.draft_probs:
            path, end = [0], self.n_drafted + 1
            while path[-1] in self.parents[path[-1] + 1 : end]:
                path.append(self.parents.index(path[-1], path[-1] + 1, end))
            return path[1:]
        expected = [0.0]  # accepted tokens of the path ending at each node
        probs = self.path_probs()
        for node in range(1, self.n_drafted + 1):
            expected.append(expected[self.parents[node]] + probs[node])
        return self.path_to(expected.index(max(expected)))[1:]

    def drafts(self) -> dict[int, list[int]]:
        """Draft nodes by parent, in the order they were added."""
        children: dict[int, list[int]] = {}
        for node in range(1, self.n_drafted + 1):
            children.setdefault(self.parents[node], []).append(node)
        return children

    def path_to(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, inclusive."""
        path = [node]
        while node:
            node = self.parents[node]
            path.append(node)
        path.reverse()
        return path


def keep_leaves(tree: TokenTree, nodes: list[int], max_leaves: int) -> None:
    """Drop the last of ``nodes``, whose parents come first, until they have few enough leaves."""
    n_leaves, have_children = 0, {0}
    for i, node in enumerate(nodes):
        parent = tree.parents[node]
        n_leaves += parent in have_children  # else it takes the place of its parent
        if n_leaves > max_leaves:
            del nodes[i:]
            return
        have_children.add(parent)
