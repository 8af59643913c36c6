"""Measures the cost curve c(n) on this machine.

The time of a decode depends on the decodes before it: a large batch leaves the CPU caches cold, and
a change of size makes llama.cpp rebuild its compute graph, and a GPU may record the graph of a size
that repeats. So every size is measured among single rows, as in a text, and relative to them,
because the load of the machine varies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median
from time import perf_counter, process_time

from batching.errors import ContextError
from batching.llama.context import Context
from batching.rows import Rows, text_rows
from batching.timing import affordable_text
from batching.tree import NO_LIMIT
from speculation.drafting.cost import FAR, NEAR, SIZES, Cost, CostCurve

# Measured regardless of the budget: they show where the curve bends. The others by worth.
_REQUIRED = (1, 2, 4, 8, 16)
_OTHERS = (64, 32, 3, 6, 12, 24, 48)
_FAR_SIZES = (1, 8, 64)  # enough for what attention adds
_SINGLES = 4  # before each small size; the first two find cold caches, the quicker other counts
_MAX_SMALL = 8  # rows; larger batches are rare in a text, and take long to measure
_MAX_ROUNDS = 12
_MAX_REPEATS = 4  # of a size: one after another size, one that is recorded, two that are replayed
_SETTLED = 0.2  # share by which two decodes of a size may differ
_MAX_TRIES = 3
# Share of the time that llama.cpp's threads had a processor; they wait for each other actively. On
# two cores 0.99 to 1 alone, 0.65 to 0.97 beside a program that is busy, always or at times.
_UNDISTURBED = 0.98
BUDGET = 1.5  # seconds


def measure_curve(
    decode: Callable[[int], float],
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """Measure the curve over ``sizes``, which ascend from 1, in up to 12 rounds within the budget.

    ``decode(n)`` decodes n rows and returns the seconds it took. ``progress`` gets each size when
    it has first been measured. A size is decoded twice after single rows: the second time counts,
    in single rows of that moment, and the first gives the cost of switching sizes. If they
    differ much, it is decoded again, up to four times: then the last ones count, and the second
    gives the cost of recording a graph. Large sizes are decoded once at first, after others; that
    counts, less the switch, if there is nothing better. The curve takes medians over all rounds, of
    which the first may load kernels and counts alone; sizes not reached are left out. No size costs
    less than a single row, or more than its rows one by one: only an interruption looks like that.
    """
    return _sample(decode, sizes, budget_seconds, progress).curve()


@dataclass
class _Samples:
    """Seconds of decodes.

    singles   of single rows, from time to time
    first     by rows, of batches after another size, with the single row of that moment
    again     the same of batches after one of their size
    switches  what a batch after another size takes longer, in single rows
    records   what the second of a size does
    """

    singles: list[float] = field(default_factory=list)
    first: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    again: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    switches: list[float] = field(default_factory=list)
    records: list[float] = field(default_factory=list)

    def add(self, other: _Samples) -> None:
        """Add the times of another measurement."""
        self.singles += other.singles
        for n, first in other.first.items():
            self.first[n] += first
            self.again[n] += other.again[n]

    def curve(self) -> CostCurve:
        """Medians, in single rows of the same moment."""
        single = median(self.singles)
        switch, record = (max(0.0, median(s or [0.0])) for s in (self.switches, self.records))
        shares = []
        for n in sorted(self.first):
            first = [seconds / before for seconds, before in self.first[n]]
            again = [seconds / before for seconds, before in self.again[n]]
            share = median(again[1:] or again or [first[0] - switch])
            shares.append(min(float(n), max(1.0, share)))
        seconds = [single * share for share in shares]
        return CostCurve(sorted(self.first), seconds, single * switch, single * record)

    def least(self) -> CostCurve:
        """The least of each size: if most decodes are interrupted, medians say little."""
        single = min(self.singles)
        first = {n: min(found)[0] for n, found in self.first.items()}
        again = {n: min(found)[0] for n, found in self.again.items() if found}
        switch = max(0.0, median([first[n] - again[n] for n in again]))
        found = {n: again.get(n, first[n] - switch) for n in sorted(first)}
        seconds = [min(n * single, max(single, least)) for n, least in found.items()]
        return CostCurve(sorted(first), seconds, switch)


def _sample(
    decode: Callable[[int], float],
    sizes: Sequence[int],
    budget_seconds: float,
    progress: Callable[[int], None] | None,
) -> _Samples:
    """The measurement of ``measure_curve``."""
    order = [n for n in (*_REQUIRED, *_OTHERS) if n in sizes]
    order += [n for n in sizes if n not in order]
    samples = _Samples()
    singles = samples.singles
    spent = decode(1)  # may include allocation
    for n in islice(cycle(order), _MAX_ROUNDS * len(order)):
        is_new = n not in samples.first
        if spent > budget_seconds and not (is_new and n in _REQUIRED):
            break  # every required size precedes the others
        is_small = n <= _MAX_SMALL
        if not singles or (is_small and spent <= budget_seconds):
            before = [decode(1) for _ in range(_SINGLES)]
            spent += sum(before)
            singles.append(min(before[2:]))
        single = singles[-1]
        times = [decode(n) if n > 1 else single]
        spent += times[0]
        samples.first[n].append((times[0], single))
        most = _MAX_REPEATS if n > 1 and (is_small or not is_new) else 1
        while len(times) < most and spent <= budget_seconds and not _is_settled(times):
            times.append(decode(n))
            spent += times[-1]
        if n > 1 and len(times) > 1:
            samples.switches.append((times[0] - times[-1]) / single)
            samples.records.append((times[1] - times[-1]) / single)
        if n == 1 or len(times) > 1:
            samples.again[n].append((min(times[-2:]), single))
        if is_new and progress is not None:
            progress(n)
    return samples


def _is_settled(times: Sequence[float]) -> bool:
    """Whether the last two of a size's decodes took about as long."""
    return len(times) > 1 and abs(times[-1] - times[-2]) <= _SETTLED * times[-2]


def measure_cost(
    context: Context,
    sizes: Sequence[int] = SIZES,
    n_past: int = NEAR,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """``measure_curve`` on ``context`` after ``n_past`` tokens, all rows with output as in a tree.

    The context must be empty, and is empty afterwards. Leaves out sizes that do not fit it or that
    it cannot roll back. With limited rewind, measures at the start of the context. Only the first
    128 tokens are decoded; the others are copies of them, since their content does not matter.
    """
    return _sample_cost(context, sizes, n_past, budget_seconds, progress).curve()


def _sample_cost(
    context: Context,
    sizes: Sequence[int],
    n_past: int,
    budget_seconds: float,
    progress: Callable[[int], None] | None,
) -> _Samples:
    """The measurement of ``measure_cost``."""
    max_rows = min(context.n_ctx - 1, context.n_batch, 1 + context.n_rewind)
    sizes = [size for size in sizes if size <= max_rows]
    n_past = max(0, min(n_past, context.n_ctx - max(sizes) - 1))
    if context.n_rewind < NO_LIMIT:
        n_past = 0

    def decode(n: int) -> float:
        begin = perf_counter()
        context.decode(_rows(context, n_past, n, outputs=True)).argmax(0)
        seconds = perf_counter() - begin
        context.seq_rm(-1, n_past, -1)
        return seconds

    n_decoded = min(NEAR, n_past)
    for first in range(0, n_decoded, context.n_batch):
        n = min(context.n_batch, n_decoded - first)
        context.decode(_rows(context, first, n, outputs=False))
    try:
        if n_past > n_decoded:
            context.repeat(n_past)
        samples = _sample(decode, sizes, budget_seconds, progress)
        if not _is_on_gpu(context):
            samples.records.clear()
        return samples
    finally:
        context.seq_rm(-1, 0, -1)


def measure(
    context: Context,
    budget_seconds: float = BUDGET,
    progress: Callable[[int], None] | None = None,
    sizes: Sequence[int] = SIZES,
) -> Cost:
    """Measure the cost near the start of the context and, if the budget allows, far along.

    A large model exceeds the budget, because the required sizes are always measured. A small one is
    measured again, up to three times, if other programs take processors from it: an interruption
    may take longer than many decodes.
    """
    near, far = _Samples(), _Samples()
    for _ in range(_MAX_TRIES):
        cpu, start = process_time(), perf_counter()
        n_past = affordable_text(context, NEAR, budget_seconds / 6)
        found = [_sample_cost(context, sizes, n_past, budget_seconds / 2, progress)]
        left = budget_seconds - (perf_counter() - start)
        if left > 0 and context.can_repeat and FAR + SIZES[-1] < context.n_ctx:
            with suppress(ContextError):  # no copies
                found.append(_sample_cost(context, _FAR_SIZES, FAR, left, progress))
        seconds = perf_counter() - start
        had = (process_time() - cpu) / seconds / context.n_threads
        if _is_on_gpu(context) or had >= _UNDISTURBED:
            return Cost(*[samples.curve() for samples in found])
        for samples, more in zip((near, far), found, strict=False):
            samples.add(more)
        if seconds > 2 * budget_seconds:  # a large model
            break
    return Cost(near.least(), far.least() if far.singles else None, is_disturbed=True)


def _is_on_gpu(context: Context) -> bool:
    return context.model.n_host_layers < context.model.n_layer


def _rows(context: Context, position: int, n: int, *, outputs: bool) -> Rows:
    tokens = [(7 * i) % min(100, context.n_vocab) for i in range(n)]
    return text_rows(tokens, position, [outputs] * n)
