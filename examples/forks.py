"""A method that drafts a tree: what followed the last two tokens the two latest times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.tree import TokenTree
from speculation.drafter import AsSource, DraftBudget, Drafter, MethodSpec, Requirements, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.resources import Resources
from speculation.system.params import Params, param

PRIORS = [0.0, -1.0]  # log-odds that the latest is accepted, and the one before if that is wrong


@dataclass(frozen=True)
class ForkParams(Params):
    length: int = param(4, "most tokens of a branch", (1, 64))


class Forks(Drafter):
    requires = Requirements(branches=2)

    def __init__(self, params: ForkParams, acceptance: Acceptance) -> None:
        self._params, self._acceptance = params, acceptance
        self._places: dict[tuple[int, ...], list[int]] = {}  # after two tokens, the latest first
        self._n_seen = 2
        self._firsts: list[int] = []  # the first token of each branch of this step

    def begin(self, prompt: Sequence[int]) -> None:
        self._places, self._n_seen = {}, 2

    def promise(self, tokens: Sequence[int]) -> float:
        """Without places to copy from, the step is a plain one."""
        for end in range(self._n_seen, len(tokens)):
            places = self._places.setdefault(tuple(tokens[end - 2 : end]), [])
            places[:] = [end, *places[:1]]
        self._n_seen = max(2, len(tokens))
        found = tuple(tokens[-2:]) in self._places
        return self._acceptance.prob(0) if found else 0.0

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self.promise(tokens)  # reads what is new
        places = self._places.get(tuple(tokens[-2:]), [])
        length = min(self._params.length, budget.max_depth)
        self._firsts, left = [tokens[place] for place in places], 1.0
        for cell, place in enumerate(places):
            prob = left * self._acceptance.prob(cell)
            left -= prob
            copied = tokens[place : place + length]
            probs = [prob, *[0.8] * length][: len(copied)]
            tree.add_chain(0, copied, probs, max_new=budget.room(tree))

    def observe(self, step: Step) -> None:
        for cell, first in enumerate(self._firsts):
            self._acceptance.learn(cell, accepted=first == step.tokens[0])
            if first == step.tokens[0]:
                break
        self._firsts = []


def make(params: ForkParams, resources: Resources) -> Forks:
    return Forks(params, resources.acceptance("forks", PRIORS))


spec = MethodSpec(
    "forks",
    "Forks of the text",
    make,
    ForkParams,
    as_source=AsSource(lambda resources: ForkParams()),
)
