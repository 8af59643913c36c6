"""The cost curve c(n): seconds to decode a batch of n rows, measured and then updated online.

On a GPU, or with a large model, the curve is nearly flat for the first dozens of rows, because the
weights are read once for all of them. With a small model on a CPU each row costs its arithmetic. No
rule of thumb covers both, so ``auto`` uses this curve.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REGIONS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # first n_past of each
_RATE = 0.05  # how fast the curve follows the observed times
_MEASURED = 10.0  # weight of a calibrated time, in steps
_MAX_WEIGHT = 100.0  # of a time, in steps
# A text's first steps are atypical: the first is decoded with the prompt, the next ones find cold
# caches and another compute graph (860, 290, 110 and 60 µs more; 7.5M parameters on 2 cores).
_FIRST_STEPS = 4

Decode = tuple[int, int, float]  # rows, n_past, seconds


class CostCurve:
    """Seconds to decode n rows: linear between the measured sizes, extrapolated beyond them.

    sizes           row counts, ascending from 1
    seconds         time of each; if a larger batch was faster, its time is used instead, since
                    disturbances only ever make a measurement longer
    switch_seconds  extra cost of a batch whose size differs from the one before
    weights         number of steps behind each time
    table           seconds for 0, 1, 2, … at least 64 rows; read-only
    row_share       lowest average cost of an additional row, as a share of a one-row batch

    >>> CostCurve((1, 3), (1.0, 2.0)).table[:4]
    [0.0, 1.0, 1.5, 2.0]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        switch_seconds: float = 0.0,
        weights: Sequence[float] = (),
    ) -> None:
        """``weights`` default to those of a freshly calibrated curve."""
        if not sizes or sizes[0] != 1 or any(b <= a for a, b in zip(sizes, sizes[1:])):  # noqa: B905, RUF007
            raise ValueError(f"sizes are {list(sizes)}; give them ascending from 1")
        if len(sizes) != len(seconds) or min(seconds) <= 0:
            raise ValueError("seconds must be positive, one for each size")
        if weights and (len(weights) != len(seconds) or min(weights) <= 0):
            raise ValueError("weights must be positive, one for each size")
        self.sizes = tuple(sizes)
        self.seconds = list(seconds)
        self.switch_seconds = switch_seconds
        self.weights = list(weights) or [_MEASURED] * len(self.seconds)
        self._rebuild()
        self._steps: list[tuple[int, float]] = []  # pending (rows, seconds)
        self._n_followed = 0

    def at(self, n: int) -> float:
        """Seconds for ``n`` rows; extrapolated beyond the table."""
        table = self.table
        if n < len(table):
            return table[n]
        return table[-1] + (table[-1] - table[-2]) * (n + 1 - len(table))

    def _rebuild(self) -> None:
        """Recompute ``table`` and ``row_share``."""
        n_rows = max(SIZES[-1], self.sizes[-1])
        seconds = np.minimum.accumulate(self.seconds[::-1])[::-1]
        curve = np.interp(np.arange(1, n_rows + 1), self.sizes, seconds)
        if len(seconds) > 1 and n_rows > self.sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            curve[self.sizes[-1] :] += slope * np.arange(1, n_rows + 1 - self.sizes[-1])
        self.table: list[float] = [0.0, *curve.tolist()]
        per_row = (curve[1:] - curve[0]) / np.arange(1, n_rows)
        self.row_share = max(float(per_row.min() / curve[0]), 1e-9)

    def follow(self, n: int, seconds: float) -> None:
        """Update the curve with an observed decode of ``n`` rows.

        The scale adapts quickly, for example when the machine slows down or the context grows. The
        shape adapts more and more slowly: a bad initial measurement is soon corrected, and a time
        backed by many steps is stable. Pass only steps whose previous step had as many rows: single
        rows after long drafts find cold caches and would make every draft look cheap.

        An interrupted batch counts at most twice its expected time. Updates take effect every 64
        calls, at first every 8, because rebuilding the table is too slow for every step.
        """
        steps = self._steps
        steps.append((n, seconds))
        if len(steps) < (64 if self._n_followed >= 64 else 8):
            return
        times, scale = self.seconds, 1.0
        for rows, observed in steps:
            self._n_followed += 1
            expected = scale * self.at(rows)
            ratio = min(2.0, max(0.5, observed / expected))
            scale *= ratio ** max(_RATE, 1 / (4 + self._n_followed))
            i = min(bisect_left(self.sizes, rows), len(times) - 1)
            self.weights[i] = min(self.weights[i] + 1, _MAX_WEIGHT)
            times[i] *= ratio ** (1 / self.weights[i])
        self.seconds = [scale * value for value in times]
        steps.clear()
        self._rebuild()


class CostModel:
    """The cost curves of one model on one machine, one per region of the context.

    The cost of a row grows linearly with the tokens before it (attention). So an unmeasured region
    is interpolated from the two nearest measured ones; if only one was measured, it is copied.
    """

    def __init__(self, curves: Mapping[int, CostCurve]) -> None:
        """``curves`` are keyed by the first n_past of their region, one of REGIONS."""
        self.curves = dict(curves)
        self._measured = {region: _copy_of(curve) for region, curve in curves.items()}
        self._last_rows = 0  # of the decode before
        self._n_first = 0  # coming decodes to ignore as atypical
        # The last region looked up: its curve, and its range of n_past.
        self._current, self._first, self._end = self.curves[min(self.curves)], 0, 0

    def curve(self, n_past: int) -> CostCurve:
        """The curve for batches after ``n_past`` tokens."""
        if not self._first <= n_past < self._end:
            i = bisect_right(REGIONS, n_past)
            self._first, self._end = REGIONS[i - 1], (*REGIONS, 1 << 62)[i]
            self._current = self._region_curve(self._first)
        return self._current

    def _region_curve(self, region: int) -> CostCurve:
        curve = self.curves.get(region)
        if curve is None:
            curve = self.curves[region] = self._interpolated(region)
        return curve

    def _interpolated(self, region: int) -> CostCurve:
        nearest = sorted(self._measured, key=lambda other: abs(other - region))[:2]
        curves = [self._measured[other] for other in nearest]
        if len(curves) == 1:
            return _copy_of(curves[0])
        first, second = curves
        here, start, end = (typical_n_past(other) for other in (region, *nearest))
        position = (here - start) / (end - start)
        seconds = [
            max(0.5 * own, own + position * (second.at(n) - own))
            for n, own in zip(first.sizes, first.seconds, strict=True)
        ]
        return CostCurve(first.sizes, seconds, first.switch_seconds)

    def begin(self) -> None:
        """A new text starts: ignore its first steps."""
        self._n_first = _FIRST_STEPS

    def follow(self, decodes: Iterable[Decode]) -> None:
        """Update the curves with consecutive decodes, in order."""
        for n_rows, n_past, seconds in decodes:
            last_rows, self._last_rows = self._last_rows, n_rows
            if self._n_first:
                self._n_first -= 1
                continue
            curve = self.curve(n_past)
            if n_rows == last_rows:
                curve.follow(n_rows, seconds)
            else:
                extra = seconds - curve.at(n_rows)
                extra = min(max(extra, -curve.at(1)), curve.at(1))
                curve.switch_seconds += _RATE * (extra - curve.switch_seconds)


def typical_n_past(region: int) -> int:
    """The n_past at which a region is measured; ``region`` is its first n_past."""
    return region * 3 // 2 if region else REGIONS[1] // 2


def _copy_of(curve: CostCurve) -> CostCurve:
    return CostCurve(curve.sizes, curve.seconds, curve.switch_seconds, curve.weights)
