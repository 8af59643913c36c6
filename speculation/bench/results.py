"""Results of the benchmark: runs, differences from plain decoding, cost curves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batching.cache import common_prefix
from speculation.meter import Stats


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
    """One run of one method on one turn of one prompt.

    method     as on the command line, without defaults
    prompt_id  ``chat-03``, or ``chat-03#2`` for the second turn
    tokens     generated token ids, including an end-of-generation token
    """

    method: str
    prompt_id: str
    category: str
    repeat: int
    tokens: Sequence[int]
    finish_reason: str | None
    stats: Stats
    first_difference: Difference | None = None


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


def first_difference(ar_tokens: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None. The end of the shorter text counts."""
    index = common_prefix(ar_tokens, tokens)
    return None if index == len(ar_tokens) == len(tokens) else index
