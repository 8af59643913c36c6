"""Compares decode times of two settings by running them alternately.

The quickest time of each counts. Other programs can only add to a time, and may add several times
as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from batching.rows import Rows, text_rows
from batching.target import Target
from batching.tree import NO_LIMIT
from batching.watched import checkpoint

_MAX_PAIRS = 9
_PROBE_ROWS = 16


def affordable_text(target: Target, n_past: int, seconds: float) -> int:
    """Roughly how many tokens, 16 to ``n_past``, can be decoded in ``seconds``.

    A shorter text is enough for a large model: attention is a small part of its decode time.
    ``target`` must be empty, and is empty afterwards.
    """
    if n_past <= _PROBE_ROWS or min(target.n_ctx, target.n_batch) < _PROBE_ROWS:
        return n_past
    for _ in range(2):  # the first decode may read the weights from disk
        start = time.perf_counter()
        target.decode(_rows(0, _PROBE_ROWS))
        share = seconds / (time.perf_counter() - start)
        target.seq_rm(-1, 0, -1)
    return min(n_past, int(_PROBE_ROWS * max(1.0, share)))


def thread_time_ratio(
    target: Target, use_threads: Callable[[int], None], n_all: int, budget_seconds: float
) -> float:
    """Time of a single row on ``n_all`` threads divided by its time on one.

    ``target`` must be empty, and is empty afterwards, with all threads in use.
    """
    start = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < _MAX_PAIRS:
        use_threads(1)
        one = _seconds(target, 0, 1)
        use_threads(n_all)
        pairs.append((_seconds(target, 0, 1), one))
        if time.perf_counter() - start > budget_seconds:
            break
    return _ratio(pairs)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The quickest first time divided by the quickest second one."""
    return min([a for a, _ in pairs]) / min([b for _, b in pairs])


def _seconds(target: Target, n_past: int, n: int) -> float:
    """Time to decode ``n`` rows right after another ``n``: the second of two runs."""
    for _ in range(2):
        checkpoint()
        begin = time.perf_counter()
        target.decode(_rows(n_past, n))
        seconds = time.perf_counter() - begin
        if target.n_rewind == NO_LIMIT:
            target.seq_rm(-1, n_past, -1)
        else:  # decode the text again
            target.seq_rm(-1, 0, -1)
            if n_past:
                target.decode(_rows(0, n_past))
    return seconds


def _rows(position: int, n: int) -> Rows:
    return text_rows([0] * n, position, [False] * (n - 1) + [True])
