"""Times decodes of a context in which nothing else happens, for costs and for settings."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

from batching.llama.context import Context
from batching.rows import text_rows
from batching.target import ALL, END
from batching.tree import NO_LIMIT
from batching.watched import checkpoint

_PROBE_ROWS = 16


def decode_seconds(context: Context, n: int, n_past: int = 0, *, outputs: bool = False) -> float:
    """The time of a decode of ``n`` rows after ``n_past`` tokens, which drops them again.

    The last row has output, or all of them have ``outputs``. Raises GivenUp.
    """
    checkpoint()
    rows = text_rows(_tokens(context, n), n_past, [outputs] * (n - 1) + [True])
    start = perf_counter()
    context.decode(rows)
    seconds = perf_counter() - start
    context.seq_rm(ALL, n_past, END)
    return seconds


def fill(context: Context, n_tokens: int, n_decoded: int) -> int:
    """Put a text of ``n_tokens`` into an empty context; returns how many there are.

    Only ``n_decoded`` are decoded. The others are copies of them, since their content does not
    matter, and are left out where there can be none. A context that cannot rewind stays empty.
    Raises ContextError.
    """
    if context.n_rewind < NO_LIMIT:
        return 0
    n = min(n_tokens, n_decoded)
    for first in range(0, n, context.n_batch):
        tokens = _tokens(context, min(context.n_batch, n - first))
        context.decode(text_rows(tokens, first, [False] * len(tokens)))
    if n < n_tokens and context.can_repeat:
        context.repeat(n_tokens)
        return n_tokens
    return n


def _tokens(context: Context, n: int) -> list[int]:
    return [(7 * i) % min(100, context.n_vocab) for i in range(n)]


def affordable_text(context: Context, n_past: int, seconds: float) -> int:
    """Roughly how many tokens, 16 to ``n_past``, can be decoded in ``seconds``.

    A shorter text is enough for a large model: attention is a small part of its decode time.
    ``context`` must be empty, and is empty afterwards.
    """
    if n_past <= _PROBE_ROWS or min(context.n_ctx, context.n_batch) < _PROBE_ROWS:
        return n_past
    decode_seconds(context, _PROBE_ROWS)  # may read weights from disk
    share = seconds / decode_seconds(context, _PROBE_ROWS)
    return min(n_past, int(_PROBE_ROWS * max(1.0, share)))


def time_ratio(
    a: Callable[[], float], b: Callable[[], float], budget: float, least: int = 1, most: int = 15
) -> float:
    """The median time of ``a`` over that of ``b``, which return the seconds of what they do.

    They are done in turn, ``least`` to ``most`` times, as often as fits a ``budget`` of seconds:
    other programs disturb both.
    """
    ratios, spent, order = list[float](), 0.0, [a, b]
    while len(ratios) < least or (len(ratios) < most and spent < budget):
        seconds = {work: work() for work in order}
        ratios.append(seconds[a] / seconds[b])
        spent += sum(seconds.values())
        order.reverse()
    return median(ratios)
