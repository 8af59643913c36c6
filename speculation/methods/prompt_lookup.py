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
from speculation.drafting.suffix_index import LONGEST_CONTEXT, LONGEST_COPY
from speculation.system.params import Params, param

PRIORS = by_length(0.0, 0.8)
_P_MIN = 0.5  # minimum path probability of a draft
_CELLS = along(0)
_TOKENS = 1 << 20  # vocabulary bound: an n-gram is a number with its tokens as digits


@dataclass(frozen=True)
class PromptLookupParams(Params):
    """Which tokens are looked up, and how many are copied."""

    max_ngram: int = param(3, "most tokens to look up; fewer are tried next", (1, 16))
    draft: int = param(DRAFT_MAX, "most tokens to copy", (1, LONGEST_COPY))


class PromptLookup(CopyDrafter):
    """Knows where each n-gram of one text occurred last."""

    def __init__(self, params: PromptLookupParams, acceptance: Acceptance | None = None) -> None:
        """``acceptance`` starts from PRIORS."""
        super().__init__(acceptance or Acceptance(PRIORS), _P_MIN)
        self.params = params
        self.begin([])

    def begin(self, prompt: Sequence[int]) -> None:
        # N-gram -> position of the token after it. Numbers, because tuples for every token would
        # trigger Python's garbage collector over and over.
        self._after: list[dict[int, int]] = [{} for _ in range(self.params.max_ngram)]
        self._n_read = 0
        self._look_up(prompt)

    def _look_up(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The position after the longest n-gram's latest earlier place, and its length; 0 = none.

        ``tokens`` is the whole text, of which an n-gram counts once a token follows.
        """
        for end in range(max(1, self._n_read), len(tokens)):
            key = 0
            for n, after in enumerate(self._after[:end], 1):
                key = key * _TOKENS + tokens[end - n]
                after[key] = end
        self._n_read = len(tokens)
        found, key = (0, 0), 0
        for n, after in enumerate(self._after[: len(tokens)], 1):
            key = key * _TOKENS + tokens[-n]
            if key not in after:
                break  # no longer n-gram has occurred either
            found = after[key], n
        return found

    def _foresee(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        position, n = self._look_up(tokens)
        return (tokens[position], _CELLS[n]) if n else None

    def _find(self, tokens: Sequence[int]) -> Copy | None:
        position, n = self._look_up(tokens)
        if not n:
            return None
        most = min(position, LONGEST_CONTEXT)
        while n < most and tokens[position - 1 - n] == tokens[-1 - n]:
            n += 1  # the longer the match, the likelier its tokens
        length = self.params.draft
        copied = list(tokens[position : position + length])
        # A copy that reaches the end of the text continues with itself: a short period repeats.
        copied = (copied * (length // len(copied) + 1))[:length]
        return Copy(copied, _CELLS[n : n + length])


spec = MethodSpec(
    name="prompt-lookup",
    title="Prompt lookup",
    params=PromptLookupParams,
    make=lambda params, resources: PromptLookup(
        params, resources.acceptance("prompt-lookup", PRIORS)
    ),
)
