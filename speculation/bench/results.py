"""Results of the benchmark: runs, differences from plain decoding, cost curves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculation.stats import rate


@dataclass(frozen=True)
class Difference:
    """Where a text diverges from plain decoding's.

    index      first generated token that differs, from 0
    ar_token   plain decoding's token there; None = its text has ended
    token      the method's token there; None = its text has ended
    logit_gap  logit of ``ar_token`` minus logit of ``token`` in plain decoding; None if either is
               None
    """

    index: int
    ar_token: int | None
    token: int | None
    logit_gap: float | None


@dataclass(frozen=True)
class Run:
    """One run of one method on one turn of one prompt. Seconds are wall-clock.

    method              as on the command line, without defaults
    prompt_id           ``chat-03``, or ``chat-03#2`` for the second turn
    tokens              generated token ids, including an end-of-generation token
    n_first             tokens of the first step, whose time is part of ``prefill_seconds``
    n_rows              rows decoded in all steps
    phase_seconds       draft, build, decode, verify and commit, over the whole run
    rows_histogram      rows of a step -> number of steps
    tokens_histogram    tokens of a step -> number of steps
    accepted_by_source  draft source -> accepted tokens; empty for methods with one source
    """

    method: str
    prompt_id: str
    category: str
    repeat: int
    n_prompt: int
    tokens: Sequence[int]
    n_first: int
    n_steps: int
    n_rows: int
    n_drafted: int
    n_accepted: int
    prefill_seconds: float
    decode_seconds: float
    phase_seconds: Mapping[str, float]
    finish_reason: str | None
    first_difference: Difference | None = None
    rows_histogram: Mapping[int, int] = field(default_factory=dict)
    tokens_histogram: Mapping[int, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)

    @property
    def same_as_ar(self) -> bool:
        return self.first_difference is None

    @property
    def tokens_per_second(self) -> float:
        """Excludes the first step; 0 if there was no other."""
        return rate(len(self.tokens), self.n_first, self.decode_seconds)


@dataclass(frozen=True)
class Skipped:
    """A turn that was skipped, and why."""

    prompt_id: str
    category: str
    reason: str


@dataclass(frozen=True)
class Curve:
    """Decode time after ``n_past`` tokens: ``seconds[i]`` for ``sizes[i]`` rows."""

    n_past: int
    sizes: Sequence[int]
    seconds: Sequence[float]


@dataclass
class Results:
    """All results of a benchmark so far, with its model, device and settings.

    started   date and time when the benchmark began, ISO 8601
    complete  whether everything is measured
    """

    model: Mapping[str, Any]
    device: Mapping[str, Any]
    settings: Mapping[str, Any]
    started: str
    runs: list[Run] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    complete: bool = False

    def add(self, item: Sequence[Run] | Skipped | Curve) -> None:
        """Add a round of runs, a skipped turn, or a curve."""
        if isinstance(item, Skipped):
            self.skipped.append(item)
        elif isinstance(item, Curve):
            self.curves.append(item)
        else:
            self.runs += item


def first_difference(ar_tokens: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None. The end of the shorter text counts."""
    for index, (ar_token, token) in enumerate(zip(ar_tokens, tokens, strict=False)):
        if ar_token != token:
            return index
    if len(ar_tokens) != len(tokens):
        return min(len(ar_tokens), len(tokens))
    return None
