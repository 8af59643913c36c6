"""Predicted outputs: copies from a text that the user expects the reply to equal for the most part.

Someone who has a file edited sends the file as the prediction. It is a text in an index as suffix
decoding has them, in which a position follows the reply. Where the reply diverges, the place where
it comes back is that with the longest match before it; among equals, the next one after the
divergence. The field is that of OpenAI's chat completions,
platform.openai.com/docs/guides/predicted-outputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from batching.cache import common_prefix
from speculation.drafter import AsSource, MethodSpec
from speculation.drafting.acceptance import Acceptance, by_length
from speculation.drafting.copying import Copy, CopyDrafter, CopyParams, along
from speculation.drafting.resources import Resources
from speculation.drafting.suffix_index import (
    LONGEST_CONTEXT,
    LONGEST_COPY,
    SEPARATOR,
    SuffixIndex,
)

_SURE = 8  # common tokens from which the reply is taken to be back in the prediction
_VISITED = 256  # latest places to look at, of which those nearest to the divergence …
_COMPARED = 16  # … on each side are compared
_NEAR = 64  # tokens after the divergence

# How a place was found: the reply followed the prediction from its start, whose beginning counts as
# a common token; just after the divergence; elsewhere. Log-odds of acceptance after one common
# token, and their change with each doubling, after 160 edits of Python and Markdown files (398,000
# tokens): just after the divergence 0.31, 0.65, 0.84 after 1, 2 and 4 tokens, elsewhere 0.17, 0.35,
# 0.58; both 0.915 after 8 and 0.985 after 16. Those files all start alike, while a reply may start
# with another sentence, so the first line is a guess.
_START, _CLOSE, _AWAY = range(3)
PRIORS = [*by_length(0.85, 1.0), *by_length(-0.75, 1.2), *by_length(-1.6, 1.2)]
_CELLS = [along(found) for found in (_START, _CLOSE, _AWAY)]


class Prediction(CopyDrafter):
    """A position in the prediction of one text."""

    def __init__(
        self,
        params: CopyParams,
        prediction: Sequence[int],
        acceptance: Acceptance | None = None,
    ) -> None:
        """``acceptance`` starts from PRIORS."""
        self.params = params
        self._index = SuffixIndex([*prediction, SEPARATOR])
        super().__init__(acceptance or Acceptance(PRIORS), params.p_min)

    def _start(self, prompt: Sequence[int]) -> None:
        self._position = 0  # of the next token …
        self._n_common = 0  # … tokens before it that equal the end of the text …
        self._found = _START  # … and how it was found
        self._diverged = 0  # position up to which the reply surely followed

    def _foresee(self) -> tuple[int, int] | None:
        copied = self._index.copy(self._position, 1)
        return (copied[0], self._cells[0]) if copied else None

    def _find(self) -> Copy | None:
        copied = self._index.copy(self._position, self.params.draft_max).tolist()
        return Copy(copied, self._cells[: len(copied)]) if copied else None

    @property
    def _cells(self) -> list[int]:
        first = min(self._n_common, LONGEST_CONTEXT) + (self._found == _START)
        return _CELLS[self._found][first:]

    def _read(self, tokens: Sequence[int], n_new: int) -> None:
        """Follow the text in the prediction; where it diverges, move to the place with the longest
        match, or else to the end of the prediction."""
        index = self._index
        n_same = common_prefix(
            index.copy(self._position, min(n_new, LONGEST_COPY)), tokens[-n_new:]
        )
        self._position += n_same
        self._n_common += n_same
        if self._found == _START or self._n_common >= _SURE:
            self._diverged = self._position
        if n_same == n_new:
            return
        tail, diverged = array("i", tokens[-LONGEST_CONTEXT:]), self._diverged
        self._position, self._n_common = len(index.tokens) - 1, 0
        level, _ = index.longest(tail)
        if level >= 0:
            found = index.matches(level, tail, _VISITED)
            ahead = [place for place in found if place >= diverged][-_COMPARED:]
            behind = [place for place in found if place < diverged][:_COMPARED]
            places = [(index.common_context(p, tail), p) for p in (*ahead[::-1], *behind)]
            self._n_common, self._position = max(places, key=lambda pair: pair[0])
        self._found = _CLOSE if 0 <= self._position - diverged <= _NEAR else _AWAY


def _make(params: CopyParams, resources: Resources) -> Prediction | None:
    if not resources.prediction:
        return None
    acceptance = resources.acceptance("prediction", PRIORS)
    return Prediction(params, resources.prediction, acceptance)


spec = MethodSpec(
    name="prediction",
    title="Predicted outputs",
    params=CopyParams,
    make=_make,
    as_source=AsSource(
        lambda resources: CopyParams() if resources.prediction else None,
    ),
)
