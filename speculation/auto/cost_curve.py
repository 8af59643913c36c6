"""What a decode costs: the curve c(n), seconds for a batch of n rows, measured and kept true.

On a GPU or a large model the curve is nearly flat for the first dozens of rows, since the weights
are read once for all of them; with a small model on a CPU every row is as dear as the arithmetic it
takes. No rule of thumb covers both, so ``auto`` looks it up here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REGIONS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # first n_past of each
_RATE = 0.05  # how fast the curve follows what a step took
_MEASURED = 10.0  # steps that a measured time counts for
_MOST_STEPS = 100.0  # those before count for no more
# Of a text, the first is decoded with the prompt, and those after it find cold caches and another
# compute graph: 860, 290, 110 and 60 µs more, measured with 7.5M parameters on 2 cores.
_FIRST_STEPS = 4

Decode = tuple[int, int, float]  # rows of a batch, tokens before it, and what it took in seconds


class CostCurve:
    """Seconds of decoding n rows: straight lines between the measured sizes, and beyond them.

    sizes           row counts, ascending, the first 1
    seconds         time of each; where a larger batch was quicker, its time counts, since what
                    disturbs a measurement only ever lengthens it
    switch_seconds  what a batch costs more when the one before had another number of rows
    weights         how many steps stand behind each time
    table           seconds for 0, 1, 2, … 64 rows at least; not to be changed
    row_share       what a further row costs at the cheapest, as a share of a batch of one
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        switch_seconds: float = 0.0,
        weights: Sequence[float] = (),
    ) -> None:
        """``weights`` are those of a curve that was measured, unless they are given."""
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
        self._draw()
        self._steps: list[tuple[int, float]] = []  # rows and seconds, not yet followed
        self._n_followed = 0

    def at(self, n: int) -> float:
        """Seconds for ``n`` rows; beyond the largest size as steep as before it."""
        table = self.table
        if n < len(table):
            return table[n]
        return table[-1] + (table[-1] - table[-2]) * (n + 1 - len(table))

    def _draw(self) -> None:
        """Table and figures of the curve as it is now."""
        most = max(SIZES[-1], self.sizes[-1])
        seconds = np.minimum.accumulate(self.seconds[::-1])[::-1]
        inside = np.interp(np.arange(1, most + 1), self.sizes, seconds)
        if len(seconds) > 1 and most > self.sizes[-1]:
            slope = (seconds[-1] - seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            inside[self.sizes[-1] :] += slope * np.arange(1, most + 1 - self.sizes[-1])
        self.table: list[float] = [0.0, *inside.tolist()]
        further = (inside[1:] - inside[0]) / np.arange(1, most)
        self.row_share = max(float(further.min() / inside[0]), 1e-9)

    def follow(self, n: int, seconds: float) -> None:
        """Move towards what a batch of ``n`` rows took just now.

        The whole curve follows soon, as when the machine slows down or the context grows. Its shape
        follows ever more slowly: a time that was measured in a bad moment is soon set right, and
        what many steps have shown stands. They must be steps after others of as many rows: which
        batch is run when is no accident, and single rows that come after long drafts, with cold
        caches, taken as typical would make every draft look cheap.
        One batch that was interrupted counts no more than twice its due. It takes effect after
        every 64th call, at first every 8th: a curve that is drawn anew costs more than a step may.
        """
        steps = self._steps
        steps.append((n, seconds))
        if len(steps) < (64 if self._n_followed >= 64 else 8):
            return
        known, scale = self.seconds, 1.0
        for rows, took in steps:
            self._n_followed += 1
            expected = scale * self.at(rows)
            ratio = min(2.0, max(0.5, took / expected))
            scale *= ratio ** max(_RATE, 1 / (4 + self._n_followed))
            i = min(bisect_left(self.sizes, rows), len(known) - 1)
            self.weights[i] = min(self.weights[i] + 1, _MOST_STEPS)
            known[i] *= ratio ** (1 / self.weights[i])
        self.seconds = [scale * value for value in known]
        steps.clear()
        self._draw()


class CostModel:
    """The curves of one model on one machine, one for each region of the context.

    Attention makes a row dearer with every token before it, so a region that was not measured lies
    on the straight line through the two nearest that were; with one, it borrows that.
    """

    def __init__(self, curves: Mapping[int, CostCurve]) -> None:
        """``curves`` are by the first n_past of their region, one of REGIONS."""
        self.curves = dict(curves)
        self._measured = {region: _copy_of(curve) for region, curve in curves.items()}
        self._last_rows = 0  # of the decode before
        self._n_first = 0  # decodes to come that are no measure of others
        self._here, self._first, self._end = self.curves[min(self.curves)], 0, 0  # asked for last

    def curve(self, n_past: int) -> CostCurve:
        """The curve for batches after ``n_past`` tokens."""
        if not self._first <= n_past < self._end:
            i = bisect_right(REGIONS, n_past)
            self._first, self._end = REGIONS[i - 1], (*REGIONS, 1 << 62)[i]
            self._here = self._of(self._first)
        return self._here

    def _of(self, region: int) -> CostCurve:
        found = self.curves.get(region)
        if found is None:
            found = self.curves[region] = self._between(region)
        return found

    def _between(self, region: int) -> CostCurve:
        nearest = sorted(self._measured, key=lambda other: abs(other - region))[:2]
        curves = [self._measured[other] for other in nearest]
        if len(curves) == 1:
            return _copy_of(curves[0])
        first, second = curves
        at = (middle(region) - middle(nearest[0])) / (middle(nearest[1]) - middle(nearest[0]))
        seconds = [
            max(0.5 * own, own + at * (second.at(n) - own))
            for n, own in zip(first.sizes, first.seconds, strict=True)
        ]
        return CostCurve(first.sizes, seconds, first.switch_seconds)

    def begin(self) -> None:
        """A prompt is about to be read: the first steps after it are no measure of the others."""
        self._n_first = _FIRST_STEPS

    def follow(self, decodes: Iterable[Decode]) -> None:
        """Refine the curves by what was decoded, in order and one right after the other."""
        for n_rows, n_past, seconds in decodes:
            last_rows, self._last_rows = self._last_rows, n_rows
            if self._n_first:
                self._n_first -= 1
                continue
            curve = self.curve(n_past)
            if n_rows == last_rows:
                curve.follow(n_rows, seconds)
            else:
                more = seconds - curve.at(n_rows)
                more = min(max(more, -curve.at(1)), curve.at(1))
                curve.switch_seconds += _RATE * (more - curve.switch_seconds)


def middle(region: int) -> int:
    """The n_past that stands for a region, given by its first."""
    return region * 3 // 2 if region else REGIONS[1] // 2


def _copy_of(curve: CostCurve) -> CostCurve:
    return CostCurve(curve.sizes, curve.seconds, curve.switch_seconds, curve.weights)
