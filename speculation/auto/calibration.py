"""Measuring c(n) on the machine at hand, and keeping it between runs.

A decode takes what it takes because of those before it: after a large batch the caches are cold,
after one of another size llama.cpp makes its compute graph anew. So the sizes are measured in the
order a text would have them, small ones among single rows, and each as a multiple of the single
rows beside it, since a machine is busier in one second than in the next.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from batching.llama.context import Context
from batching.llama.hardware import build_info, devices
from batching.rows import Rows, text_rows
from batching.timing import affordable_text
from batching.tree import NO_LIMIT
from speculation.auto.cost_curve import REGIONS, SIZES, CostCurve, CostModel, middle
from speculation.system.cache_folder import cache_folder

_FAR = 1024  # the region that is measured beside the first
_FAR_SIZES = (1, 2, 4, 8, 16, 32, 64)
_NEEDED = (1, 2, 4, 8, 16)  # sizes that are measured whatever they take: they show the bend
_LARGEST_SMALL = 8  # rows; larger batches leave the caches cold, and are rare in a text
_SINGLES = 4  # rows decoded one by one before a small size
_REPEATS = 3  # of a small size
_SMALL_ROUNDS = 3  # for each over the large sizes
_MOST_ROUNDS = 32
_WARM_SHARE = 0.05  # of the budget: what takes longer is timed without having been run before
_DISTURBED = 1.5  # a single row's time, over a larger batch's
_VERSION = 7  # of how it is measured: what an older one measured is measured again


def measure_curve(
    decode: Callable[[int], float],
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """The curve over ``sizes``, which ascend from 1, as ``decode`` says it.

    ``decode(n)`` decodes n rows and returns the seconds that took. First each size once: 1, 2, 4, 8
    and 16 in any case, since a large model's curve may be flat between the first and bend before
    the last; then the other powers of two, then those between, which ends when the budget is spent:
    sizes that it did not reach are left out. Then rounds, of which no one is begun that would
    exceed the budget. In a round over the small sizes each comes three times after four single
    rows; the last of each counts, relative to the median of the round's single rows, and the first
    says what changing the size costs. One over the large sizes is measured by the single rows of
    the round before. Of all rounds the medians count.
    ``progress`` is told each size when it has been measured first.
    """
    rounds = _Rounds(decode)
    rounds.first(sizes, budget_seconds, progress)
    small = [n for n in rounds.known if 1 < n <= _LARGEST_SMALL]
    large = [n for n in rounds.known if n > _LARGEST_SMALL]
    for turn in range(_MOST_ROUNDS):
        if rounds.spent + rounds.seconds_of_small(small) > budget_seconds:
            break
        rounds.small(small)
        if turn % _SMALL_ROUNDS == 0:
            if rounds.spent + rounds.seconds_of_large(large) > budget_seconds:
                break
            rounds.large(large)
    return rounds.curve()


class _Rounds:
    """What was measured so far."""

    def __init__(self, decode: Callable[[int], float]) -> None:
        self._decode = decode
        self.spent = 0.0  # seconds
        self.known: dict[int, float] = {}  # seconds of each size when it was measured first
        self._singles: list[float] = []  # the median of each round
        self._ratios: dict[int, list[float]] = {}  # of a size to the single rows of its round
        self._switches: list[float] = []  # what a change costs, in single rows

    def _seconds(self, n: int) -> float:
        seconds = self._decode(n)
        self.spent += seconds
        return seconds

    def first(
        self, sizes: Sequence[int], budget_seconds: float, progress: Callable[[int], None] | None
    ) -> None:
        needed = [n for n in sizes if n in _NEEDED]
        others = sorted((n for n in sizes if n not in _NEEDED), key=lambda n: (n & (n - 1) > 0, n))
        known: dict[int, float] = {}
        for n in (*needed, *others):
            if n not in _NEEDED and self.spent > budget_seconds:
                break
            known[n] = self._seconds(n)  # memory may have to be found, and a compute graph made
            if n == 1 or known[n] < _WARM_SHARE * budget_seconds:
                known[n] = min(known[n], self._seconds(n))
            if progress is not None:
                progress(n)
        self.known = dict(sorted(known.items()))

    def seconds_of_small(self, sizes: Sequence[int]) -> float:
        """About what a round takes."""
        each = (_SINGLES * self.known[1] + _REPEATS * self.known[n] for n in sizes)
        return sum(each, _SINGLES * self.known[1])

    def seconds_of_large(self, sizes: Sequence[int]) -> float:
        return sum(2 * self.known[n] for n in sizes)

    def small(self, sizes: Sequence[int]) -> None:
        singles = []
        times: dict[int, tuple[float, float]] = {}  # of a size, the first and the last
        for n in sizes or (1,):
            for _ in range(_SINGLES):
                single = self._seconds(1)
            singles.append(single)
            if n > 1:
                repeated = [self._seconds(n) for _ in range(_REPEATS)]
                times[n] = repeated[0], repeated[-1]
        single = median(singles)
        self._singles.append(single)
        for n, (changed, same) in times.items():
            self._ratios.setdefault(n, []).append(same / single)
            self._switches.append((changed - same) / single)

    def large(self, sizes: Sequence[int]) -> None:
        for n in sizes:
            self._seconds(n)
            self._ratios.setdefault(n, []).append(self._seconds(n) / self._singles[-1])

    def curve(self) -> CostCurve:
        single = median(self._singles) if self._singles else self.known[1]
        seconds = [
            single * median(self._ratios[n]) if n in self._ratios else known
            for n, known in self.known.items()
        ]
        if self._singles:
            seconds[0] = single
        switch = median(self._switches) if self._switches else 0.0
        return CostCurve(tuple(self.known), seconds, single * max(0.0, switch))


def measure_cost(
    context: Context,
    sizes: Sequence[int] = SIZES,
    n_past: int = 128,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """``measure_curve`` after ``n_past`` tokens, every row with output, as a tree's rows have.

    The context must be empty and is empty afterwards. Sizes that do not fit it are left out, as are
    those that it cannot take back; one that cannot take back all is measured at its beginning.
    """
    most = min(context.n_ctx - 1, context.n_batch, 1 + context.n_rewind)
    sizes = [size for size in sizes if size <= most]
    n_past = max(0, min(n_past, context.n_ctx - max(sizes) - 1))
    if context.n_rewind < NO_LIMIT:
        n_past = 0

    def decode(n: int) -> float:
        begin = perf_counter()
        context.decode(_rows(context, n_past, n, outputs=True)).argmax(0)
        seconds = perf_counter() - begin
        context.seq_rm(-1, n_past, -1)
        return seconds

    for first in range(0, n_past, context.n_batch):
        n = min(context.n_batch, n_past - first)
        context.decode(_rows(context, first, n, outputs=False))
    try:
        return measure_curve(decode, sizes, budget_seconds, progress)
    finally:
        context.seq_rm(-1, 0, -1)


def measure_regions(
    context: Context,
    budget_seconds: float = 1.5,
    progress: Callable[[int], None] | None = None,
) -> CostModel:
    """The curve at the start of the context and, if the budget allows, one far along in it.

    A large model takes longer than the budget, for the few sizes without which nothing is known.
    A far one that was cut short is left out: what disturbed its few times would be drawn on to 64
    rows and from there to every region between, and drafts that look so dear are never tried again.
    """
    start = perf_counter()
    n_past = affordable_text(context, middle(0), budget_seconds / 6)
    is_quick = n_past == middle(0)
    near = measure_cost(
        context,
        n_past=n_past,
        budget_seconds=budget_seconds / 3 if is_quick else budget_seconds,
        progress=progress,
    )
    curves = {0: near}
    n_past = middle(_FAR)
    if context.n_rewind == NO_LIMIT and n_past + SIZES[-1] < context.n_ctx:
        seconds = near.at(SIZES[-1]) * n_past / SIZES[-1]  # of getting there, about
        left = budget_seconds - (perf_counter() - start) - seconds
        if left > 0:
            far = measure_cost(context, _FAR_SIZES, n_past, left, progress)
            if far.sizes == _FAR_SIZES:
                curves[_FAR] = far
    return CostModel(curves)


def _rows(context: Context, position: int, n: int, *, outputs: bool) -> Rows:
    tokens = [(7 * i) % min(100, context.n_vocab) for i in range(n)]
    return text_rows(tokens, position, [outputs] * n)


def load_cost(
    context: Context,
    *,
    refresh: bool = False,
    progress: Callable[[int], None] | None = None,
) -> CostModel:
    """The cost model of ``context``: from the user's cache, else measured now and put there.

    It is kept for each model, build, device, number of threads, KV type and flash attention.
    ``progress`` is told of each size measured, and what it raises ends the measuring.
    """
    path = cache_folder() / "cost" / f"{_key(context)}.json"
    if not refresh:
        kept = _read(path)
        if kept is not None:
            return kept
    cost = measure_regions(context, progress=progress)
    if _is_nonsense(cost):
        cost = measure_regions(context, progress=progress)
    save_cost(context, cost)
    return cost


def save_cost(context: Context, cost: CostModel) -> None:
    """Keep ``cost``, refined by the steps since, for the next start. A full disk is no error."""
    path = cache_folder() / "cost" / f"{_key(context)}.json"
    regions = {
        str(region): {
            "sizes": curve.sizes,
            "seconds": curve.seconds,
            "switch_seconds": curve.switch_seconds,
            "weights": curve.weights,
        }
        for region, curve in cost.curves.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".partial", delete=False, encoding="utf-8"
        ) as file:
            json.dump(regions, file)
        Path(file.name).replace(path)
    except OSError:
        return


def _read(path: Path) -> CostModel | None:
    try:
        regions: Any = json.loads(path.read_text(encoding="utf-8"))
        curves = {
            int(region): CostCurve(
                kept["sizes"], kept["seconds"], kept["switch_seconds"], kept["weights"]
            )
            for region, kept in regions.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, or of another version: it is measured again
    if not curves or not set(curves) <= set(REGIONS):
        return None
    cost = CostModel(curves)
    return None if _is_nonsense(cost) else cost


def _is_nonsense(cost: CostModel) -> bool:
    """Whether a single row takes clearly longer than several, as where it was disturbed.

    With such a curve every draft looks free, single rows are never decoded, and it stands for good.
    """
    curves = cost.curves.values()
    return any(curve.seconds[0] > _DISTURBED * min(curve.seconds) for curve in curves)


def _key(context: Context) -> str:
    model = context.model
    what = (
        _VERSION,
        model.path.name,
        model.n_bytes,
        model.description,
        build_info(),
        [device.name for device in devices()],
        context.n_threads,
        context.params.kv_type,
        context.flash_attn,
        model.n_gpu_layers,
        context.n_rewind,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]
