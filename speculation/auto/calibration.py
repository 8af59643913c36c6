"""Measures the cost curve c(n) on this machine.

The time of a decode depends on the decodes before it: a large batch leaves the CPU caches cold, and
a change of size makes llama.cpp rebuild its compute graph, and a GPU may record the graph of a size
that repeats. So every size is measured among single rows, as in a text, and relative to them,
because the load of the machine varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from statistics import median
from time import perf_counter, process_time

from batching.errors import ContextError
from batching.llama.context import Context
from batching.llama.timing import affordable_text, decode_seconds, fill
from speculation.drafting.cost import FAR, NEAR, SIZES, Cost, CostCurve

# Measured regardless of the budget: they show where the curve bends. The others by worth.
_REQUIRED = (1, 2, 4, 8, 16)
_OTHERS = (64, 32, 3, 6, 12, 24, 48)
_FAR_SIZES = (1, 8, 64)  # enough for what attention adds
_MAX_SMALL = 8  # rows; larger batches are rare in a text, and take long to measure
_MAX_ROUNDS = 12
_MAX_TRIES = 3
# Share of the time that llama.cpp's threads had a processor; they wait for each other actively. On
# two cores 0.99 to 1 alone, 0.65 to 0.97 beside a program that is busy, always or at times.
_UNDISTURBED = 0.98
BUDGET = 1.5  # seconds
# Seconds of SIZES over those of a single row, until they are measured: Qwen2.5-Coder 1.5B Q4_K_M on
# two cores, and SmolLM2 with 5.4 billion parameters in Q8_0 on an H200.
_CPU_SHARES = (1, 1.5, 1.9, 2.1, 3.0, 3.6, 4.7, 5.7, 8.0, 10.5, 15.0, 20.0)
_GPU_SHARES = (1, 1.03, 1.04, 1.05, 1.2, 1.4, 1.6, 1.7, 1.9, 2.1, 2.5, 2.8)


def measure_curve(
    decode: Callable[[int], float],
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """Measure the curve over ``sizes``, which ascend from 1, in up to 12 rounds within the budget.

    ``decode(n)`` decodes n rows and returns the seconds it took. ``progress`` gets each size when
    it has first been measured. A size is decoded three times after four single rows. The quickest
    after the first counts, in single rows of that moment; what the first two took more is the cost
    of switching sizes. Large sizes are decoded once, less what a first decode takes more. The curve
    takes medians; sizes not reached are left out. No size costs less than a single row, or more
    than its rows one by one: only an interruption looks like that.
    """
    order = [n for n in (*_REQUIRED, *_OTHERS) if n in sizes]
    order += [n for n in sizes if n not in order]
    singles: list[float] = []
    extras: list[tuple[float, float]] = []  # of the first two decodes, in single rows
    found: dict[int, list[float]] = {}  # by rows, in single rows
    once: dict[int, list[float]] = {}  # the same, with the extra of the first decode
    spent = decode(1)  # may include allocation

    def repeated(n: int, most: int) -> list[float]:
        nonlocal spent
        times: list[float] = []
        while not times or (len(times) < most and spent <= budget_seconds):
            times.append(decode(n))
            spent += times[-1]
        return times

    for n in chain.from_iterable(repeat(order, _MAX_ROUNDS)):
        is_known, is_small = n in found or n in once, n <= _MAX_SMALL
        if spent > budget_seconds and (is_known or n not in _REQUIRED):
            break  # every required size precedes the others
        if not singles or (is_small and spent <= budget_seconds):
            before = repeated(1, 4)
            singles.append(min(before[2:] or before))  # the first two find cold caches
        times = repeated(n, 3 if is_small else 1) if n > 1 else [singles[-1]] * 3
        first, *again = [seconds / singles[-1] for seconds in times]
        if again:
            found.setdefault(n, []).append(min(again))
        else:
            once.setdefault(n, []).append(first)
        if n > 1 and len(again) == 2:
            extras.append((first - min(again), again[0] - min(again)))
        if not is_known and progress is not None:
            progress(n)
    build = max(0.0, median([first for first, _ in extras] or [0.0]))
    record = median([second for _, second in extras] or [0.0])
    shares = {n: median(values) - build for n, values in once.items()}
    shares |= {n: median(values) for n, values in found.items()}
    measured = sorted(shares)
    single = median(singles)
    seconds = [single * min(float(n), max(1.0, shares[n])) for n in measured]
    return CostCurve(measured, seconds, single * (build + record))


def measure_cost(
    context: Context,
    sizes: Sequence[int] = SIZES,
    n_past: int = NEAR,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
    n_read: int = NEAR,
) -> CostCurve:
    """``measure_curve`` on ``context`` after ``n_past`` tokens, all rows with output as in a tree.

    The context must be empty, and is empty afterwards. Leaves out sizes that do not fit it or that
    it cannot roll back. With limited rewind, measures at the start of the context. Tokens after the
    first ``n_read`` are copies of them.
    """
    max_rows = min(context.n_ctx - 1, context.n_batch, 1 + context.n_rewind)
    sizes = [size for size in sizes if size <= max_rows]
    n_past = max(0, min(n_past, context.n_ctx - max(sizes) - 1))
    try:
        n_past = fill(context, n_past, n_read)
        decode = partial(decode_seconds, context, n_past=n_past, outputs=True)
        return measure_curve(decode, sizes, budget_seconds, progress)
    finally:
        context.seq_rm(-1, 0, -1)


def guess(context: Context) -> Cost:
    """A cost from the time of three single rows, for the first texts. ``context`` must be empty,
    and is empty afterwards."""
    single = min([decode_seconds(context, 1) for _ in range(3)])
    is_on_gpu = context.model.n_host_layers < context.model.n_layer
    shares = _GPU_SHARES if is_on_gpu else _CPU_SHARES
    return Cost(CostCurve(SIZES, [single * share for share in shares]), is_rough=True)


def measure(
    context: Context,
    budget_seconds: float = BUDGET,
    progress: Callable[[int], None] | None = None,
    sizes: Sequence[int] = SIZES,
) -> Cost:
    """Measure the cost near the start of the context and, if the context can be copied, far along.

    A large model exceeds the budget: the required sizes are always measured, far along three times.
    A small one is measured again, up to three times, if other programs take processors from it: an
    interruption may take longer than many decodes.
    """
    near: list[CostCurve] = []
    far: list[CostCurve] = []
    for _ in range(_MAX_TRIES):
        cpu, start = process_time(), perf_counter()
        n_past = affordable_text(context, NEAR, budget_seconds / 6)
        near.append(measure_cost(context, sizes, n_past, budget_seconds / 2, progress))
        left = max(6 * near[-1].at(8), budget_seconds - (perf_counter() - start))
        if context.can_repeat and FAR + SIZES[-1] < context.n_ctx:
            with suppress(ContextError):  # no copies
                far.append(measure_cost(context, _FAR_SIZES, FAR, left, progress, n_past))
        seconds = perf_counter() - start
        had = (process_time() - cpu) / seconds / context.n_threads
        is_on_gpu = context.model.n_host_layers < context.model.n_layer
        if is_on_gpu or had >= _UNDISTURBED:
            return Cost(near[-1], far[-1] if far else None)
        if seconds > 2 * budget_seconds:  # a large model
            break
    return Cost(_least(near), _least(far) if far else None, is_rough=True)


def _least(curves: Sequence[CostCurve]) -> CostCurve:
    """The least of each size that all ``curves`` have: an interruption only adds time."""
    sizes = [n for n in curves[0].sizes if all(n in curve.sizes for curve in curves)]
    seconds = [min(curve.at(n) for curve in curves) for n in sizes]
    return CostCurve(sizes, seconds, min(curve.switch_seconds for curve in curves))
