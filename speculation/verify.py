"""Verification: which drafts hold.

``Match`` is lossless for any tree under any sampler. It samples at a node as plain decoding would;
if a draft below holds that token, it goes there and samples again. The first token without a draft
is the bonus. The sampler thus sees exactly the tokens of the text, and spends one draw on each.

``Rejection`` is for drafts that were sampled from a distribution q themselves. It keeps the
target's distribution, not the very text that plain decoding would draw with the same seed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from batching.sampler import Sampler
from batching.target import Output
from batching.tree import Floats, TokenTree


class Verifier(Protocol):
    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        """The accepted path, the root first, and the bonus token."""
        ...


class Match:
    """Accept a draft when it is the very token that the sampler chooses."""

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        # Unmerged branches with a common prefix hold equal tokens in several nodes; all of them
        # are followed until one is left, and the logits are read from the first.
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
    """Accept a draft x sampled from q with probability p(x) / q(x), else draw from what is left.

    Leviathan et al. 2023, arXiv 2211.17192, and Chen et al. 2023, arXiv 2302.01318, for a chain.
    Siblings are tried in turn: each is an independent sample of q, and after a rejection p becomes
    norm(max(p - q, 0)), so the token of the text is distributed as p whatever q was (Miao et al.
    2024, "SpecInfer", arXiv 2305.09781, multi-step speculative sampling). A draft without q counts
    as certain: its q is 1 there.
    """

    def __init__(self, seed: int) -> None:
        """``seed`` is that of the draws; the sampler's own is not used."""
        self._random = np.random.default_rng(seed)

    def verify(self, tree: TokenTree, output: Output, sampler: Sampler) -> tuple[list[int], int]:
        below = tree.drafts()
        path = [0]
        while True:
            p = sampler.probabilities(output.logits(path[-1]))
            for child in below.get(path[-1], ()):
                token, q = tree.tokens[child], tree.draft_probs[child]
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
    """A token with probability ``p``, (n_vocab,)."""
    edges = np.cumsum(p, dtype=np.float64)
    token = int(np.searchsorted(edges, random.random() * edges[-1], side="right"))
    return min(token, len(p) - 1)


def _without(p: Floats, token: int, q: Floats | None) -> Floats:
    """norm(max(p - q, 0)): what to draw from once a sample of q was refused."""
    if q is None:
        left = p.copy()
        left[token] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    total = left.sum()
    # Rounding alone can leave nothing: p and q are the same then, and any sample of p will do.
    return left / total if total > 0 else p
