"""What one run yielded, and how it compares with plain decoding. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BASELINE = "ar"


@dataclass(frozen=True)
class Difference:
    """Where a text leaves plain decoding's.

    index      first generated token that differs, from 0
    ar_token   plain decoding's token there; None = its text has ended
    token      the method's; None = its text has ended
    logit_gap  logit of ``ar_token`` minus logit of ``token`` in plain decoding; None without both
    """

    index: int
    ar_token: int | None
    token: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class Run:
    """One method on one turn of one prompt, once. Seconds are wall-clock.

    method         as it is written on the command line, defaults left out
    prompt_id      ``chat-03``, or ``chat-03#2`` for the second turn
    tokens         token ids generated, an end-of-generation token included
    n_rows         rows that the steps decoded
    phase_seconds  draft, build, decode, verify and commit over the whole run
    """

    method: str
    prompt_id: str
    category: str
    repeat: int
    n_prompt: int
    tokens: Sequence[int]
    n_steps: int
    n_rows: int
    n_drafted: int
    n_accepted: int
    prefill_seconds: float
    decode_seconds: float
    phase_seconds: Mapping[str, float]
    finish_reason: str | None
    first_difference: Difference | None = None

    @property
    def same_as_ar(self) -> bool:
        return self.first_difference is None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.decode_seconds


@dataclass(frozen=True)
class Skipped:
    """A turn that was not measured, and why."""

    prompt_id: str
    category: str
    reason: str


def first_difference(ar_tokens: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None; where one text ends, the other differs."""
    for index, (ar_token, token) in enumerate(zip(ar_tokens, tokens, strict=False)):
        if ar_token != token:
            return index
    if len(ar_tokens) != len(tokens):
        return min(len(ar_tokens), len(tokens))
    return None
