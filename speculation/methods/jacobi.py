"""Jacobi decoding: guess the next m tokens, decode them in parallel, repeat with the results.

Each step is one iteration of a fixed-point method: the argmax at every guessed position becomes the
next guess, and the prefix that no longer changes is accepted. Santilli et al. 2023, "Accelerating
Transformer Inference for Translation via Parallel Decoding", arXiv 2305.10427. Lookahead without
the n-gram pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, MethodSpec, Step
from speculation.system.params import Params, param


@dataclass(frozen=True)
class JacobiParams(Params):
    """The size of the guess."""

    guesses: int = param(8, "tokens guessed ahead (m)", (1, 256))


class Jacobi(Drafter):
    """Drafts a chain of guesses and updates it after every step."""

    def __init__(self, params: JacobiParams) -> None:
        self.params = params
        self._guesses: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        # Any start works; repeating the last token is at least right if the text does so.
        self._guesses = [prompt[-1]] * self.params.guesses

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        tree.add_chain(0, self._guesses, max_new=budget.room(tree))

    def observe(self, step: Step) -> None:
        # Node i's argmax is the new guess for position i + 1. The bonus token came from the last
        # accepted node, so the nodes after it predict what follows the bonus token.
        m = self.params.guesses
        n_accepted = len(step.path)
        guesses = step.output.argmaxes(n_accepted, len(step.tree) - n_accepted)
        last = guesses[-1] if guesses else step.bonus
        self._guesses = (guesses + [last] * m)[:m]


spec = MethodSpec(
    name="jacobi",
    title="Jacobi",
    params=JacobiParams,
    make=lambda params, resources: Jacobi(params),
)
