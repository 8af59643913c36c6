"""Measures the cost curve c(n) on this machine, and caches it between runs.

The time of a decode depends on the decodes before it: a large batch leaves the CPU caches cold, and
a change of size makes llama.cpp rebuild its compute graph. So sizes are measured in the order they
occur in a text, small ones between single rows. Each is measured relative to the single rows around
it, because the load of the machine varies.
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
from speculation.auto.cost_curve import REGIONS, SIZES, CostCurve, CostModel, typical_n_past
from speculation.system.cache_folder import cache_folder

_FAR = 1024  # the second region to measure, after region 0
_FAR_SIZES = (1, 2, 4, 8, 16, 32, 64)
_REQUIRED = (1, 2, 4, 8, 16)  # measured regardless of the budget: they show where the curve bends
_MAX_SMALL = 8  # rows; larger batches leave the caches cold and are rare in a text
_SINGLES = 4  # single rows before each small size
_REPEATS = 3  # of a small size
_SMALL_ROUNDS = 3  # per round over the large sizes
_MAX_ROUNDS = 32
_WARM_SHARE = 0.05  # of the budget; a decode longer than this gets no warm-up run
_MAX_SINGLE_RATIO = 1.5  # time of one row over that of a larger batch; more is a bad measurement
_VERSION = 7  # of the measurement; older cached curves are ignored


def measure_curve(
    decode: Callable[[int], float],
    sizes: Sequence[int] = SIZES,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """Measure the curve over ``sizes``, which ascend from 1.

    ``decode(n)`` decodes n rows and returns the seconds it took. ``progress`` gets each size when
    it has first been measured.

    1. Measure each size once: 1, 2, 4, 8 and 16 in any case (a large model's curve may be flat at
       first and bend before 16), then the other powers of two, then the rest until the budget is
       spent. Sizes not reached are left out.
    2. Repeat in rounds while one fits the budget. A round over the small sizes decodes each three
       times after four single rows. The last of the three counts, relative to the median single row
       of the round; the first gives the cost of switching sizes. A round over the large sizes is
       relative to the single rows of the round before. The curve takes medians over all rounds.
    """
    rounds = _Rounds(decode)
    rounds.first(sizes, budget_seconds, progress)
    small = [n for n in rounds.first_seconds if 1 < n <= _MAX_SMALL]
    large = [n for n in rounds.first_seconds if n > _MAX_SMALL]
    for turn in range(_MAX_ROUNDS):
        if rounds.spent + rounds.seconds_of_small(small) > budget_seconds:
            break
        rounds.small(small)
        if turn % _SMALL_ROUNDS == 0:
            if rounds.spent + rounds.seconds_of_large(large) > budget_seconds:
                break
            rounds.large(large)
    return rounds.curve()


class _Rounds:
    """The measurements so far."""

    def __init__(self, decode: Callable[[int], float]) -> None:
        self._decode = decode
        self.spent = 0.0  # seconds
        self.first_seconds: dict[int, float] = {}  # first measurement of each size
        self._singles: list[float] = []  # median single row of each round
        self._ratios: dict[int, list[float]] = {}  # by size, relative to the round's single rows
        self._switches: list[float] = []  # cost of a switch, in single rows

    def _seconds(self, n: int) -> float:
        seconds = self._decode(n)
        self.spent += seconds
        return seconds

    def first(
        self, sizes: Sequence[int], budget_seconds: float, progress: Callable[[int], None] | None
    ) -> None:
        required = [n for n in sizes if n in _REQUIRED]
        others = sorted(
            (n for n in sizes if n not in _REQUIRED), key=lambda n: (n & (n - 1) > 0, n)
        )
        measured: dict[int, float] = {}
        for n in (*required, *others):
            if n not in _REQUIRED and self.spent > budget_seconds:
                break
            measured[n] = self._seconds(n)  # may include allocation and building the graph
            if n == 1 or measured[n] < _WARM_SHARE * budget_seconds:
                measured[n] = min(measured[n], self._seconds(n))
            if progress is not None:
                progress(n)
        self.first_seconds = dict(sorted(measured.items()))

    def seconds_of_small(self, sizes: Sequence[int]) -> float:
        """Estimated duration of a round over the small sizes."""
        single = self.first_seconds[1]
        each = (_SINGLES * single + _REPEATS * self.first_seconds[n] for n in sizes)
        return sum(each, _SINGLES * single)

    def seconds_of_large(self, sizes: Sequence[int]) -> float:
        """Estimated duration of a round over the large sizes."""
        return sum(2 * self.first_seconds[n] for n in sizes)

    def small(self, sizes: Sequence[int]) -> None:
        singles = []
        times: dict[int, tuple[float, float]] = {}  # first and last time of each size
        for n in sizes or (1,):
            for _ in range(_SINGLES):
                single = self._seconds(1)
            singles.append(single)
            if n > 1:
                repeated = [self._seconds(n) for _ in range(_REPEATS)]
                times[n] = repeated[0], repeated[-1]
        single = median(singles)
        self._singles.append(single)
        for n, (after_switch, repeated_size) in times.items():
            self._ratios.setdefault(n, []).append(repeated_size / single)
            self._switches.append((after_switch - repeated_size) / single)

    def large(self, sizes: Sequence[int]) -> None:
        for n in sizes:
            self._seconds(n)
            self._ratios.setdefault(n, []).append(self._seconds(n) / self._singles[-1])

    def curve(self) -> CostCurve:
        single = median(self._singles) if self._singles else self.first_seconds[1]
        seconds = [
            single * median(self._ratios[n]) if n in self._ratios else first
            for n, first in self.first_seconds.items()
        ]
        if self._singles:
            seconds[0] = single
        switch = median(self._switches) if self._switches else 0.0
        return CostCurve(tuple(self.first_seconds), seconds, single * max(0.0, switch))


def measure_cost(
    context: Context,
    sizes: Sequence[int] = SIZES,
    n_past: int = 128,
    budget_seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> CostCurve:
    """``measure_curve`` on ``context`` after ``n_past`` tokens, all rows with output as in a tree.

    The context must be empty, and is empty afterwards. Leaves out sizes that do not fit it or that
    it cannot roll back. With limited rewind, measures at the start of the context.
    """
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
    """Measure the curve at the start of the context and, if the budget allows, farther along.

    A large model exceeds the budget, because the required sizes are always measured. An incomplete
    far curve is dropped: an outlier in it would be extrapolated to 64 rows and to every region in
    between, and drafts that look that expensive are never tried again.
    """
    start = perf_counter()
    n_past = affordable_text(context, typical_n_past(0), budget_seconds / 6)
    is_quick = n_past == typical_n_past(0)
    near = measure_cost(
        context,
        n_past=n_past,
        budget_seconds=budget_seconds / 3 if is_quick else budget_seconds,
        progress=progress,
    )
    curves = {0: near}
    n_past = typical_n_past(_FAR)
    if context.n_rewind == NO_LIMIT and n_past + SIZES[-1] < context.n_ctx:
        seconds = near.at(SIZES[-1]) * n_past / SIZES[-1]  # rough time to decode that far
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
    """The cost model of ``context``, from the user's cache or else measured and cached.

    Cached per model, build, device, thread count, KV type and flash attention. ``progress`` gets
    each size measured; an exception from it stops the measurement.
    """
    path = cache_folder() / "cost" / f"{_key(context)}.json"
    if not refresh:
        cached = _read(path)
        if cached is not None:
            return cached
    cost = measure_regions(context, progress=progress)
    if _is_implausible(cost):
        cost = measure_regions(context, progress=progress)
    save_cost(context, cost)
    return cost


def save_cost(context: Context, cost: CostModel) -> None:
    """Cache ``cost`` for the next start. Write errors, such as a full disk, are ignored."""
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
                data["sizes"], data["seconds"], data["switch_seconds"], data["weights"]
            )
            for region, data in regions.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing, or another format: measure again
    if not curves or not set(curves) <= set(REGIONS):
        return None
    cost = CostModel(curves)
    return None if _is_implausible(cost) else cost


def _is_implausible(cost: CostModel) -> bool:
    """Whether one row seems to take much longer than several: a disturbed measurement.

    Such a curve never corrects itself: every draft looks free, so single rows are never decoded.
    """
    curves = cost.curves.values()
    return any(curve.seconds[0] > _MAX_SINGLE_RATIO * min(curve.seconds) for curve in curves)


def _key(context: Context) -> str:
    model = context.model
    identity = (
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
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
