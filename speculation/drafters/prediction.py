"""Predicted outputs: copies from a text that the user expects the reply to equal for the most part.

Someone who has a file edited sends the file as the prediction. A position in it follows the reply.
Where the reply diverges, the place where it comes back is that with the longest context in common
with the end of the reply; among equals, the nearest one after the divergence. The field is that of
OpenAI's chat completions, platform.openai.com/docs/guides/predicted-outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from batching.cache import common_prefix
from batching.tree import TokenTree
from speculation.drafter import (
    AsSource,
    DraftBudget,
    Drafter,
    MethodSpec,
    Step,
)
from speculation.drafting.draft_length import round_length
from speculation.drafting.estimates import Estimates
from speculation.ranges import check_ranges
from speculation.resources import Resources

_LONGEST_COPY = 256
_LONGEST_CONTEXT = 32  # longer common contexts count as this
_SURE = 8  # common tokens from which the reply is taken to be back in the prediction
_AHEAD, _BEHIND = 16, 4  # places to compare after and before the divergence; more are no better
_NEAR = 64  # tokens after the divergence
_FROM_START = 2  # common tokens that it is worth if a match starts where the prediction does
_LONG, _EVERY = 256, 4  # tokens after a divergence from which only every 4th is looked up
_LEARN_EVERY = 8  # steps; Python code right after a decode is several times slower (cold caches)

# How a place was found, and the acceptance rate of its next token after 0, 1, 2, … common tokens.
# Measured on 160 edits of Python and Markdown files, 398,000 tokens. The rates of _START are set by
# hand: those files all start alike, while a reply may start with another sentence.
_START, _CLOSE, _AWAY = range(3)
_RATES = (
    (0.7, 0.9, 0.95, 0.96, 0.97, 0.97, 0.97, 0.97),  # the reply follows from its start
    (0.2, 0.31, 0.65, 0.81, 0.84, 0.89, 0.91, 0.93),  # just after the divergence
    (0.1, 0.17, 0.35, 0.48, 0.58, 0.64, 0.72, 0.78),  # elsewhere
)
_SURE_CONTEXTS = (8, 12, 16, 24, _LONGEST_CONTEXT)
_SURE_RATES = (0.915, 0.965, 0.985, 0.99, 0.999)
PRIORS = (*chain(*_RATES), *_SURE_RATES)
# Kinds of estimates by how the place was found, and by context plus distance from it.
_SURE_KINDS = [
    _SURE * len(_RATES) + sum(context >= bound for bound in _SURE_CONTEXTS) - 1
    for context in range(_SURE, _LONGEST_CONTEXT + _LONGEST_COPY + 1)
]
_KINDS = [[*range(_SURE * i, _SURE * (i + 1)), *_SURE_KINDS] for i in range(len(_RATES))]


@dataclass(frozen=True)
class PredictionParams:
    """How much is copied from the prediction.

    draft_max  most tokens in a draft, whose length is 1, 3, 7, 15, … up to this
    p_min      minimum path probability of a draft; auto decides by cost instead
    """

    draft_max: int = 63
    p_min: float = 0.55

    def __post_init__(self) -> None:
        check_ranges(self, (("draft_max", 1, _LONGEST_COPY), ("p_min", 0.0, 1.0)))


class Place(NamedTuple):
    """A place in the prediction where the reply may go on.

    position  of the next token
    context   tokens before it that equal the end of the reply
    found     how it was found: _START, …
    """

    position: int
    context: int
    found: int

    def kinds(self, n: int) -> list[int]:
        """The kinds of estimates of the next ``n`` tokens."""
        first = min(self.context, _LONGEST_CONTEXT)
        return _KINDS[self.found][first : first + n]


class Prediction(Drafter):
    """A position in the prediction of one text, with learnt acceptance estimates."""

    def __init__(
        self,
        params: PredictionParams,
        prediction: Sequence[int],
        estimates: Estimates | None = None,
    ) -> None:
        """``estimates``, started from PRIORS, may be shared with other texts."""
        self.params = params
        self._prediction = list(prediction)
        self._nowhere = Place(len(self._prediction), 0, _AWAY)
        self._after: dict[int, list[int]] = {}  # positions after each token, once it is needed
        self._estimates = estimates or Estimates(PRIORS)
        self._start(0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._start(len(prompt))
        self._estimates.new_text()

    def _start(self, n_prompt: int) -> None:
        self._n_read = n_prompt  # tokens of the text
        self._place = Place(0, 0, _START)
        self._diverged = 0  # position up to which the reply surely followed the prediction …
        self._n_followed = n_prompt  # … and the tokens of the text up to there
        self._is_drafted = False  # whether it was asked in this step
        self._outcomes: list[tuple[Place, list[int]]] = []  # places and actual tokens to learn

    def end(self, tokens: Sequence[int]) -> None:
        self._learn()

    def strength(self, tokens: Sequence[int]) -> int:
        """1 to 4 for 1, 2, 4, 8 or more common tokens, 5 for a reply's first token."""
        self._read(tokens)
        place = self._place
        if place.position == len(self._prediction):
            return 0
        return min(place.context.bit_length(), 4) if place.context else 5

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        self._read(tokens)
        self._is_drafted = True
        place, params = self._place, self.params
        length = min(params.draft_max, budget.room(tree), budget.max_depth)
        copied = self._prediction[place.position : place.position + length]
        floor = budget.min_path_prob or params.p_min
        probs = self._estimates.chain_probs(place.kinds(len(copied)), 1.0, floor)
        if not budget.min_path_prob:
            del probs[round_length(len(probs)) :]
        if probs:
            tree.add_chain(0, copied[: len(probs)], probs)

    def observe(self, step: Step) -> None:
        """Record the step's tokens; every few steps, learn from them."""
        if self._is_drafted:
            self._is_drafted = False
            self._outcomes.append((self._place, step.tokens))
            if len(self._outcomes) >= _LEARN_EVERY:
                self._learn()

    def _learn(self) -> None:
        """Update the estimates with the recorded places and tokens."""
        for place, actual in self._outcomes:
            copied = self._prediction[place.position : place.position + len(actual)]
            n = common_prefix(copied, actual)
            self._estimates.learn_chain(place.kinds(len(copied)), n, failed=n < len(copied))
        self._outcomes.clear()

    def _read(self, tokens: Sequence[int]) -> None:
        """Follow ``tokens``, the whole text, in the prediction."""
        new = list(tokens[self._n_read :])
        if not new:
            return
        self._n_read += len(new)
        position, context, found = self._place
        followed = self._prediction[position : position + len(new)]
        n_same = len(new) if followed == new else common_prefix(followed, new)
        position, context = position + n_same, context + n_same
        if found == _START or context >= _SURE:
            self._diverged, self._n_followed = position, len(tokens) - len(new) + n_same
        n_astray = len(tokens) - self._n_followed
        if n_same == len(new):
            self._place = Place(position, context, found)
        elif n_astray > _LONG and n_astray % _EVERY:
            self._place = self._nowhere
        else:
            self._place = self._search(tokens)

    def _search(self, tokens: Sequence[int]) -> Place:
        """The place that has the longest context in common with the end of ``tokens``.

        At the end of the prediction if no place has any.
        """
        prediction, diverged = self._prediction, self._diverged
        if not self._after:
            for position, token in enumerate(prediction[:-1], 1):
                self._after.setdefault(token, []).append(position)
        after = self._after.get(tokens[-1], [])
        i = bisect_left(after, diverged)
        best, longest, worth = self._nowhere.position, 0, 0
        for position in (*after[i : i + _AHEAD], *after[max(0, i - _BEHIND) : i][::-1]):
            context, most = 1, min(position, _LONGEST_CONTEXT, len(tokens))
            while context < most and prediction[position - 1 - context] == tokens[-1 - context]:
                context += 1
            bonus = _FROM_START if context == position and diverged < _SURE else 0
            if context + bonus > worth:
                best, longest, worth = position, context, context + bonus
        found = _CLOSE if 0 <= best - diverged <= _NEAR else _AWAY
        return Place(best, longest, found)


def _make(params: PredictionParams, resources: Resources) -> Prediction | None:
    if not resources.prediction:
        return None
    return Prediction(params, resources.prediction, resources.estimates("prediction", PRIORS))


spec = MethodSpec(
    name="prediction",
    title="Predicted outputs",
    params=PredictionParams,
    make=_make,
    as_source=AsSource(
        lambda resources: PredictionParams() if resources.prediction else None,
        gains=(0.1, 0.5, 1.5, 4.0, 1.0),
    ),
)
