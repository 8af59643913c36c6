"""Verification: which drafts hold.

``Match`` is lossless for any tree under any sampler. It samples at a node as plain decoding would;
if a draft below holds that token, it goes there and samples again. The first token without a draft
is the bonus. The sampler thus sees exactly the tokens of the text, and spends one draw on each.
"""

from __future__ import annotations

from typing import Protocol

from batching.sampler import Sampler
from batching.target import Output
from batching.tree import TokenTree


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
