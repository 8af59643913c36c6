"""The cost of a batch: seconds to decode n rows, measured once and then followed. Pure.

On a GPU, or with a large model, the curve is nearly flat for the first dozens of rows, because the
weights are read once for all of them. With a small model on a CPU each row costs its arithmetic. No
rule of thumb covers both, so ``auto`` uses this curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from speculation.average import Average
from speculation.drafting.acceptance import RATE

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NEAR, FAR = 128, 1536  # tokens in the context when the cost is measured
_SPAN = 256  # tokens of the context that share a curve
_SHORT = 0.05  # share of a single row's time below which a switch does not count
_OWN = 0.2  # share of a correction that is of the size alone
_CHECKED = 4  # single rows in a row that check a rough cost
_CHAINS = (1, 3, 7, 15, 31, 63)  # lengths of drafts, to see whether any pays


@dataclass(frozen=True)
class CostCurve:
    """Seconds to decode n rows: measured, interpolated, or extrapolated beyond the last size.

    sizes           row counts, ascending from 1
    seconds         time of each
    switch_seconds  extra cost of the first two batches of a size that differs from the one before:
                    llama.cpp builds a graph for the first, and a GPU records that for the second

    >>> CostCurve((1, 3, 11), (1.0, 2.0, 4.0)).table[:8]
    [0.0, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0]
    """

    sizes: Sequence[int]
    seconds: Sequence[float]
    switch_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes are {list(self.sizes)}; give them ascending from 1")
        if len(self.sizes) != len(self.seconds) or min(self.seconds) <= 0:
            raise ValueError("seconds must be positive, one for each size")

    @classmethod
    def linear(cls, step: float, row: float, switch: float = 0.0) -> CostCurve:
        """``step`` seconds for one row, and ``row`` for each further one."""
        sizes = list(range(1, SIZES[-1] + 1))
        return cls(sizes, [step + row * (n - 1) for n in sizes], switch)

    @cached_property
    def table(self) -> list[float]:
        """Seconds for 0, 1, 2, … at least 64 rows."""
        rows = range(1, max(self.sizes[-1], SIZES[-1]) + 1)
        within = np.interp(rows, self.sizes, self.seconds).tolist()
        beyond = [self._beyond(n) for n in rows[self.sizes[-1] :]]
        return [0.0, *within[: self.sizes[-1]], *beyond]

    def at(self, n: int) -> float:
        """Seconds for ``n`` rows."""
        table = self.table
        return table[n] if n < len(table) else self._beyond(n)

    def _beyond(self, n: int) -> float:
        return self.seconds[-1] + self._slope * (n - self.sizes[-1])

    @cached_property
    def _slope(self) -> float:
        """Seconds of a row beyond the last size: as from the size before, or from the first.

        A last size that was disturbed, or has a faster kernel, must not make rows free.
        """
        (*sizes, last), (*seconds, end) = self.sizes, self.seconds
        if not sizes:
            return end / last
        return max([(end - seconds[i]) / (last - sizes[i]) for i in (0, -1)] + [0.0])

    @cached_property
    def row_share(self) -> float:
        """The lowest average cost of an additional row, as a share of a one-row batch."""
        plain = self.table[1]
        per_row = [(self.table[n] / plain - 1) / (n - 1) for n in range(2, SIZES[-1] + 1)]
        return max(min(per_row), 1e-9)

    def scaled(self, factor: float) -> CostCurve:
        """The curve of a machine that is ``factor`` times as slow."""
        seconds = [factor * each for each in self.seconds]
        return CostCurve(self.sizes, seconds, factor * self.switch_seconds)


class Prices(NamedTuple):
    """What the drafts of the coming step have to save.

    cost       whose prices they are
    curve      seconds for n rows
    n_past     tokens that a row attends to, on average
    n_texts    texts in the batch
    last_rows  rows of the last step; 0 = none
    plain      seconds of a token without drafts
    change     seconds that another number of rows costs a text
    overhead   seconds that a step with drafts costs a text beside its rows
    """

    cost: Cost
    curve: CostCurve
    n_past: int
    n_texts: int
    last_rows: int
    plain: float
    change: float
    overhead: float

    def pay(self, prob: float) -> bool:
        """Whether drafts pay of which each is accepted with ``prob`` after those before."""
        extra = self.overhead + self.change - self.curve.at(self.n_texts)
        expected, n = 0.0, 0
        for length in _CHAINS if prob > 0.0 else ():
            while n < length:
                n += 1
                expected += prob**n
            if expected * self.plain > self.curve.at(self.n_texts + n) + extra:
                return True
        return False

    def change_from(self, plain_rows: int) -> float:
        """Seconds beyond ``curve`` that a step with drafts costs, unless it has ``last_rows``. A
        step without drafts has ``plain_rows``.

        To leave plain steps costs the way back, too, which is free then.
        """
        is_away = self.last_rows not in (0, plain_rows)
        return self.curve.switch_seconds if is_away else 2.0 * self.curve.switch_seconds


class Cost:
    """The cost of decoding with one model on one machine, at any place of the context.

    Attention adds in proportion to the tokens before a batch, on a CPU for each of its rows: far
    along, rows are dear. Real steps correct both parts.

    level      real time of single rows over that measured, in this run
    last_rows  rows of the last decode, including a prompt's; 0 before a text's first
    overhead   average seconds of a step besides decoding and drafting, for each text
    is_rough   whether it was guessed, or measured while other programs took the processors
    is_checked whether real single rows have shown the level of a rough one
    """

    def __init__(
        self, near: CostCurve, far: CostCurve | None = None, *, is_rough: bool = False
    ) -> None:
        """``near`` is the curve after NEAR tokens, ``far`` the one after FAR tokens, which may have
        fewer sizes; without it the cost is the same everywhere."""
        self.set(near, far, is_rough=is_rough)
        self.last_rows = 0
        self.overhead = Average(RATE, 0.0)
        self._n_same = 0  # decodes in a row with as many rows as the last
        self._n_followed = 0
        self._read = Average(0.5)  # seconds of a prompt's row

    def set(self, near: CostCurve, far: CostCurve | None, *, is_rough: bool) -> None:
        """Take other curves, as for a new one."""
        self._sizes, self._seconds, self._switch = near.sizes, [*near.seconds], near.switch_seconds
        self.is_rough, self.level = is_rough, 1.0
        self.is_checked = not is_rough
        self._attention = [0.0] * len(near.sizes)  # seconds for each token before, by size
        if far is not None:
            pairs = zip(far.sizes, far.seconds, strict=True)
            added = [max(1e-9, each - near.at(n)) / (FAR - NEAR) for n, each in pairs]
            self._attention = [CostCurve(far.sizes, added).at(n) for n in near.sizes]
        self._curves: dict[int, CostCurve] = {}  # by place of the context

    @property
    def near(self) -> CostCurve:
        """The curve after NEAR tokens, as measured or corrected."""
        return CostCurve(self._sizes, self._seconds[:], self._switch)

    @property
    def far(self) -> CostCurve | None:
        """The curve after FAR tokens, if it differs."""
        return self._after(FAR) if any(self._attention) else None

    def curve(self, n_past: int) -> CostCurve:
        """The curve for batches after ``n_past`` tokens."""
        place = n_past // _SPAN
        if place not in self._curves:
            self._curves[place] = self._after((place + 0.5) * _SPAN).scaled(self.level)
        return self._curves[place]

    def _after(self, n_past: float) -> CostCurve:
        """The curve after ``n_past`` tokens, at level 1."""
        parts = zip(self._seconds, self._attention, strict=True)
        seconds = [each + (n_past - NEAR) * attention for each, attention in parts]
        return CostCurve(self._sizes, seconds, self._switch)

    def prices(self, n_past: int, n_texts: int = 1) -> Prices:
        """The prices of a step with ``n_texts``, whose rows attend to ``n_past`` tokens."""
        curve, n = self.curve(n_past), max(1, n_texts)
        plain, overhead = curve.at(n) / n, self.overhead.value
        found = Prices(self, curve, n_past, n, self.last_rows, plain, 0.0, overhead)
        return found._replace(change=found.change_from(n) / n)

    @property
    def row_seconds(self) -> float:
        """Seconds of a row among many: of a prompt's, once one was read."""
        return self._read.value or self.curve(0).at(SIZES[-1]) / SIZES[-1]

    def has_read(self, n_rows: int, seconds: float) -> None:
        """Learn from a batch that only read prompts."""
        self._read.add(seconds / n_rows)

    def begin(self) -> None:
        """A new text starts."""
        self.last_rows = 0

    def decoded(self, n_rows: int, n_steps: int = 1) -> None:
        """``n_steps`` batches of ``n_rows`` were decoded."""
        self._n_same = n_steps + (self._n_same if n_rows == self.last_rows else 0)
        self.last_rows = n_rows

    def follow(self, n_rows: int, n_past: int, seconds: float, n_steps: int = 1) -> None:
        """Learn from ``n_steps`` decodes of ``n_rows`` that took ``seconds`` each.

        Single rows set the level, for example when the machine slows down; those of a rough cost at
        once, since all may have been ten times as slow when it was measured. Other sizes correct
        the level most and their own cost a little. The first two batches after another size do not
        count where a switch takes long, except in a run of steps: caches are cold, and graphs are
        built. An interrupted batch counts at most twice its expected time. Curves change every 64
        calls, since rebuilding them is too slow for every step.
        """
        changes = n_rows != self.last_rows
        self.decoded(n_rows, n_steps)
        is_settled = self._n_same > 2 or self._switch < _SHORT * self.level * self._seconds[0]
        if n_rows > self._sizes[-1] or not is_settled:
            return
        if changes:
            seconds -= self.level * self._switch / n_steps
        weights = float(np.interp(n_rows, self._sizes, self._seconds))
        per_token = float(np.interp(n_rows, self._sizes, self._attention))
        attention = max(0, n_past - NEAR) * per_token
        expected = self.level * (weights + attention)
        if n_rows == 1 and not self.is_checked and self._n_same >= _CHECKED:
            self.is_checked = True
            self.level *= seconds / expected
            self._curves.clear()
            return
        factor = min(2.0, max(0.5, seconds / expected)) ** (1.0 - (1.0 - RATE) ** n_steps)
        if n_rows == 1:
            self.level *= factor
        else:
            self.level *= factor ** (1.0 - _OWN)
            size, share = bisect_left(self._sizes, n_rows), attention / (weights + attention)
            self._seconds[size] *= factor ** (_OWN * (1.0 - share))
            self._attention[size] *= factor ** (_OWN * share)
        self._n_followed += 1
        if self._n_followed % 64 == 0:
            self._curves.clear()
