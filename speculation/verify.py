"""Verification: decides which drafts of a tree are accepted.

``Match`` is lossless for any tree and any sampler. It samples at a node as plain decoding would; if
a child has the sampled token, it is accepted and sampling continues there. The first token without
a matching child is the bonus token. So the sampler sees exactly the tokens of the text, with one
random draw per token.

``Rejection`` is for drafts sampled from a distribution q. It preserves the target's distribution,
but not the exact text that plain decoding would draw with the same seed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batching.target import Output, Sampler
from batching.tree import Floats, TokenTree


class Verifier(Protocol):
    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        """The accepted path, starting with the root, and the bonus token."""
        ...


class Match:
    """Accept a draft if it is exactly the token that the sampler chooses."""

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        if not tree.n_drafted:
            return [0], sampler.sample(output, 0)
        if tree.is_chain:
            tokens, last, node = tree.tokens, len(tree.tokens) - 1, 0
            while True:
                token = sampler.sample(output, node)
                if node == last or tokens[node + 1] != token:
                    return list(range(node + 1)), token
                node += 1
        # Unmerged branches with a common prefix have the same token in several nodes. All of them
        # are followed until one is left; the logits are read from the first.
        nodes = [0]
        while True:
            token = sampler.sample(output, nodes[0])
            if len(nodes) == 1:
                below = tree.children(nodes[0], token)
            else:
                below = [child for node in nodes for child in tree.children(node, token)]
            if not below:
                return tree.path_to(nodes[0]), token
            nodes = below


class Rejection:
    """Accept a draft x sampled from q with probability p(x) / q(x), else draw from the residual.

    Leviathan et al. 2023, arXiv 2211.17192, and Chen et al. 2023, arXiv 2302.01318, for a chain.
    Siblings are tried in turn: each is an independent sample of q, and after a rejection p becomes
    norm(max(p - q, 0)), so the emitted token is distributed as p for any q (Miao et al. 2024,
    "SpecInfer", arXiv 2305.09781, multi-step speculative sampling). A draft without a q counts as
    certain: q(x) = 1.
    """

    def __init__(self, seed: int) -> None:
        """``seed`` seeds the draws here; the sampler's own seed is not used."""
        self._random = np.random.default_rng(seed)

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        below = tree.drafts()
        path = [0]
        while True:
            p = sampler.probabilities(output.logits(path[-1]))
            for child in below.get(path[-1], ()):
                token, q = tree.tokens[child], tree.draft_probs.get(child)
                if self._random.random() * (1.0 if q is None else q[token]) < p[token]:
                    sampler.accept(token)
                    path.append(child)
                    break
                p = _without(p, token, q)
            else:
                bonus = draw(p, self._random)
                sampler.accept(bonus)
                return path, bonus


def draw(p: Floats, random: np.random.Generator) -> int:
    """Draw a token from the distribution ``p``, (n_vocab,)."""
    edges = np.cumsum(p, dtype=np.float64)
    token = int(np.searchsorted(edges, random.random() * edges[-1], side="right"))
    return min(token, len(p) - 1)


def _without(p: Floats, token: int, q: Floats | None) -> Floats:
    """norm(max(p - q, 0)): the residual distribution after a sample of q was rejected."""
    if q is None:
        left = p.copy()
        left[token] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    total = left.sum()
    # All zero only if p and q are equal up to rounding; then p itself will do.
    return left / total if total > 0 else p
