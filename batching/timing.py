"""Times decodes of an empty target, before anything else is known."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from batching.rows import text_rows
from batching.target import Target
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
    share = seconds / _seconds(target, _PROBE_ROWS)
    return min(n_past, int(_PROBE_ROWS * max(1.0, share)))


def thread_time_ratio(
    target: Target, use_threads: Callable[[int], None], n_all: int, budget_seconds: float
) -> float:
    """Time of a single row on ``n_all`` threads divided by its time on one.

    ``target`` must be empty, and is empty afterwards, with all threads in use.
    """
    start = perf_counter()
    ones, alls = list[float](), list[float]()
    while not ones or (len(ones) < _MAX_PAIRS and perf_counter() - start <= budget_seconds):
        use_threads(1)
        ones.append(_seconds(target, 1))
        use_threads(n_all)
        alls.append(_seconds(target, 1))
    # Other programs can only add to a time, and may add several times as much.
    return min(alls) / min(ones)


def _seconds(target: Target, n: int) -> float:
    """Time to decode ``n`` rows right after as many: the first ones may read weights from disk."""
    for _ in range(2):
        checkpoint()
        begin = perf_counter()
        target.decode(text_rows([0] * n, 0, [False] * (n - 1) + [True]))
        seconds = perf_counter() - begin
        target.seq_rm(-1, 0, -1)
    return seconds
