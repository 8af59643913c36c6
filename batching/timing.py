"""How long decodes take in one setting and in another, in turn. Pure, but for the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

from batching.rows import Rows, text_rows
from batching.target import Target
from batching.tree import NO_LIMIT

_MOST = 9  # pairs
_CHUNK = 16  # rows by which it is found out how much text is affordable


def log_ratio(a: Target, b: Target, n_past: int, budget_seconds: float) -> float:
    """Logarithm of the time that decoding takes in ``a``, relative to ``b``.

    Both decode 1, 4 and 16 rows after ``n_past`` tokens, or fewer where those alone would take
    half of ``budget_seconds``; single rows count half, since they are most of what is decoded.
    After the budget what was measured decides, for a large model the single rows. Both must be
    empty, and are not afterwards.
    """
    start = time.perf_counter()
    n_past = affordable_text(a, n_past, 0.25 * budget_seconds)
    for target in (a, b):
        target.decode(_rows(0, n_past))  # warms up, and is the text that the rows attend to
    total = 0.0
    for n, weight in ((1, 0.5), (4, 0.25), (16, 0.25)):
        ratios: list[float] = []
        while len(ratios) < _MOST:
            ratios.append(_seconds(a, n_past, n) / _seconds(b, n_past, n))
            if time.perf_counter() - start > budget_seconds:
                return total + weight * math.log(median(ratios))
        total += weight * math.log(median(ratios))
    return total


def affordable_text(target: Target, n_past: int, seconds: float) -> int:
    """So many of ``n_past`` tokens as are read in that time, about; never fewer than 16 of them.

    Of a large model's decode little is attention, so a short text says of it what a long one does.
    ``target`` must be empty and is so afterwards.
    """
    if n_past <= _CHUNK or min(target.n_ctx, target.n_batch) < _CHUNK:
        return n_past
    for _ in range(2):  # at first the weights may have to come from the disk
        start = time.perf_counter()
        target.decode(_rows(0, _CHUNK))
        share = seconds / (time.perf_counter() - start)
        target.seq_rm(-1, 0, -1)
    return min(n_past, int(_CHUNK * max(1.0, share)))


def all_over_one(
    target: Target, use_threads: Callable[[int], None], n_all: int, budget_seconds: float
) -> float:
    """What a single row takes on ``n_all`` threads, relative to one.

    ``target`` must be empty and is so afterwards, with all threads in use.
    """
    start = time.perf_counter()
    ratios: list[float] = []
    while len(ratios) < _MOST:
        seconds = []
        for n in (1, n_all):
            use_threads(n)
            seconds.append(_seconds(target, 0, 1))
        ratios.append(seconds[1] / seconds[0])
        if time.perf_counter() - start > budget_seconds:
            break
    return median(ratios)


def _seconds(target: Target, n_past: int, n: int) -> float:
    """Time of decoding ``n`` rows where as many were decoded before: the second of two."""
    for _ in range(2):
        begin = time.perf_counter()
        target.decode(_rows(n_past, n))
        seconds = time.perf_counter() - begin
        if target.n_rewind == NO_LIMIT:
            target.seq_rm(-1, n_past, -1)
        else:  # the text anew
            target.seq_rm(-1, 0, -1)
            if n_past:
                target.decode(_rows(0, n_past))
    return seconds


def _rows(position: int, n: int) -> Rows:
    return text_rows([0] * n, position, [False] * (n - 1) + [True])
