"""Jacobi decoding: guess the next m tokens, decode them at once, repeat with what came out.

Each step is one sweep of a fixed-point iteration: the argmax at every guessed position becomes the
guess of the next sweep, and the prefix that no longer changes is accepted. Source: Santilli et al.
2023, "Accelerating Transformer Inference for Translation via Parallel Decoding",
arXiv 2305.10427; without the n-gram pool of lookahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter, MethodSpec, Step


@dataclass(frozen=True)
class JacobiParams:
    """guesses: tokens guessed ahead (m)."""

    guesses: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.guesses <= 256:
            raise InvalidParameter(f"guesses is {self.guesses}; give 1 to 256")


class Jacobi(Drafter):
    """The chain of guesses, refreshed by every step."""

    def __init__(self, params: JacobiParams) -> None:
        self.params = params
        self._guesses: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        # Any start will do; the last token repeated is right at least where the text repeats.
        self._guesses = [prompt[-1]] * self.params.guesses

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        tree.add_chain(0, self._guesses, max_new=budget.room(tree))

    def observe(self, step: Step) -> None:
        # Node i's argmax is the new guess for position i + 1; the path's last node gave the bonus,
        # so the nodes after it speak of what follows the bonus.
        m = self.params.guesses
        accepted = len(step.path)
        fresh = step.output.argmaxes(accepted, len(step.tree) - accepted)
        last = fresh[-1] if fresh else step.bonus
        self._guesses = (fresh + [last] * m)[:m]


spec = MethodSpec(
    name="jacobi",
    title="Jacobi",
    params=JacobiParams,
    make=lambda params, resources: Jacobi(params),
)
