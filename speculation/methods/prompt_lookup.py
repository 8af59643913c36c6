"""Prompt lookup: copies what followed the last few tokens earlier in the text.

Saxena's rule (github.com/apoorvumang/prompt-lookup-decoding, 2023): find the first place in the
text that has its last ``max_ngram`` tokens, or else fewer of them, and copy the next ``draft``
tokens. ``adaptive=off`` is exactly that. By default the latest place counts, and a draft
ends where its tokens are no longer likely to be accepted. ``suffix`` finds better matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.errors import InvalidParameter, check_ranges
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, MethodSpec
from speculation.drafting.acceptance import Acceptance, by_length
from speculation.drafting.copying import DRAFT_MAX, Copy, CopyDrafter, along
from speculation.drafting.resources import Resources
from speculation.drafting.suffix_index import LONGEST_CONTEXT, LONGEST_COPY

PRIORS = by_length(0.0, 0.8)
_P_MIN = 0.5  # minimum path probability of a draft
_SAXENAS = 10  # tokens to copy
_CELLS = along(0)
_TOKENS = 1 << 20  # vocabulary bound: an n-gram is a number with its tokens as digits


@dataclass(frozen=True)
class PromptLookupParams:
    """Which tokens are looked up, and how many are copied.

    max_ngram  most tokens to look up; fewer are tried next
    min_ngram  fewest tokens that count as a match
    draft      tokens to copy, at most if adaptive; 0 = 10, and 63 if adaptive
    adaptive   copy from the latest match, as long as the tokens are likely to be accepted; off =
               copy all from the first match, as Saxena does
    """

    max_ngram: int = 3
    min_ngram: int = 1
    draft: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, (("max_ngram", 1, 16), ("min_ngram", 1, 16), ("draft", 0, LONGEST_COPY)))
        if self.min_ngram > self.max_ngram:
            raise InvalidParameter(
                f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}; lower it"
            )


class PromptLookup(CopyDrafter):
    """Knows where each n-gram of one text occurred last or, if not adaptive, first."""

    def __init__(self, params: PromptLookupParams, acceptance: Acceptance | None = None) -> None:
        """``acceptance`` starts from PRIORS."""
        super().__init__(acceptance or Acceptance(PRIORS), _P_MIN)
        self.params = params
        self._length = params.draft or (DRAFT_MAX if params.adaptive else _SAXENAS)
        self._start()

    def _start(self) -> None:
        # N-gram -> position of the token after it. Numbers, because tuples for every token would
        # trigger Python's garbage collector over and over.
        self._after: list[dict[int, int]] = [{} for _ in range(self.params.max_ngram)]
        self._n_read = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._start()
        self._read(prompt)

    def _foresee(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        position, n = self._look_up(tokens)
        return (tokens[position], _CELLS[n]) if n else None

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        if self.params.adaptive:
            super().draft(tokens, tree, budget)
            return
        position, n = self._look_up(tokens)
        if n:
            copied = tokens[position : position + min(self._length, budget.max_depth)]
            tree.add_chain(0, copied, max_new=budget.room(tree))

    def _find(self, tokens: Sequence[int]) -> Copy | None:
        position, n = self._look_up(tokens)
        if not n:
            return None
        most = min(position, LONGEST_CONTEXT)
        while n < most and tokens[position - 1 - n] == tokens[-1 - n]:
            n += 1
        length = self._length
        copied = list(tokens[position : position + length])
        # A copy that reaches the end of the text continues with itself: a short period repeats.
        copied = (copied * (length // len(copied) + 1))[:length]
        return Copy(copied, _CELLS[n : n + length])

    def _look_up(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The position after an earlier place of the longest n-gram, and its length; 0 = none.

        If not adaptive, the text must have all tokens to copy, as in Saxena's code.
        """
        self._read(tokens)
        found, key = (0, 0), 0
        for n, after in enumerate(self._after[: len(tokens)], 1):
            key = key * _TOKENS + tokens[-n]
            if key not in after:
                break  # no longer n-gram has occurred either
            needed = 1 if self.params.adaptive else max(self._length, n + 1)
            if n >= self.params.min_ngram and after[key] + needed <= len(tokens):
                found = after[key], n
        return found

    def _read(self, tokens: Sequence[int]) -> None:
        """Note the n-grams of ``tokens``, the whole text. An n-gram counts once a token follows."""
        is_last = self.params.adaptive
        for end in range(max(1, self._n_read), len(tokens)):
            key = 0
            for n, after in enumerate(self._after[:end], 1):
                key = key * _TOKENS + tokens[end - n]
                if is_last or key not in after:
                    after[key] = end
        self._n_read = len(tokens)


def _make(params: PromptLookupParams, resources: Resources) -> PromptLookup:
    return PromptLookup(params, resources.acceptance("prompt-lookup", PRIORS))


spec = MethodSpec(
    name="prompt-lookup",
    title="Prompt lookup",
    params=PromptLookupParams,
    make=_make,
)
