"""Prompt lookup: copies what followed the last few tokens earlier in the text.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023): find a place in the text that
has its last ``max_ngram`` tokens, or else fewer of them, and copy the next ``draft`` tokens. Here
it is the latest such place, and not the first one, and the copy ends where its tokens are no longer
likely to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.drafter import MethodSpec
from speculation.drafting.acceptance import Acceptance, by_length
from speculation.drafting.copying import DRAFT_MAX, Copy, CopyDrafter, along
from speculation.drafting.suffix_index import LONGEST_CONTEXT, LONGEST_COPY, SuffixIndex
from speculation.system.params import Params, param

PRIORS = by_length(0.0, 0.8)
_P_MIN = 0.5  # minimum path probability of a draft
_CELLS = along(0)
_COMPARED = 32  # latest places that have the last tokens


@dataclass(frozen=True)
class PromptLookupParams(Params):
    """Which tokens are looked up, and how many are copied."""

    max_ngram: int = param(3, "most tokens to look up; fewer are tried next", (1, 16))
    draft: int = param(DRAFT_MAX, "most tokens to copy", (1, LONGEST_COPY))


class PromptLookup(CopyDrafter):
    """Knows where the n-grams of one text occurred."""

    def __init__(self, params: PromptLookupParams, acceptance: Acceptance | None = None) -> None:
        """``acceptance`` starts from PRIORS."""
        super().__init__(acceptance or Acceptance(PRIORS), _P_MIN)
        self.params = params

    def _start(self, prompt: Sequence[int]) -> None:
        self._index = SuffixIndex(prompt)

    def _read(self, tokens: Sequence[int], n_new: int) -> None:
        self._index.extend(tokens[-n_new:])

    def _foresee(self) -> tuple[int, int] | None:
        copy = self._find()
        return copy and (copy.tokens[0], copy.cells[0])

    def _find(self) -> Copy | None:
        index, n_most = self._index, self.params.max_ngram
        tail = index.tokens[-LONGEST_CONTEXT:]
        level, _ = index.longest(tail[-n_most:])
        if level < 0:
            return None
        found = [(index.common_context(p, tail), p) for p in index.matches(level, tail, _COMPARED)]
        n, position = max(found, key=lambda pair: min(pair[0], n_most))  # the latest of equal ones
        copied = index.copy(position, self.params.draft).tolist()
        return Copy(copied, _CELLS[n : n + len(copied)])  # the longer the match, the likelier


spec = MethodSpec(
    name="prompt-lookup",
    title="Prompt lookup",
    params=PromptLookupParams,
    make=lambda params, resources: PromptLookup(
        params, resources.acceptance("prompt-lookup", PRIORS)
    ),
)
