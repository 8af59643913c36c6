"""The cost of a batch: seconds to decode n rows, measured once and then followed. Pure.

On a GPU, or with a large model, the curve is nearly flat for the first dozens of rows, because the
weights are read once for all of them. With a small model on a CPU each row costs its arithmetic. No
rule of thumb covers both, so ``auto`` uses this curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

from speculation.drafting.acceptance import RATE

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NEAR, FAR = 128, 1536  # tokens in the context when the cost is measured
_BLOCK = 4  # rows; with SmolLM2-135M 6 cost as much as 8, while 12, 20 and 24 lie on a line
_SPAN = 256  # tokens of the context that share a curve
# A text's first steps are atypical: the first is decoded with the prompt, the next ones find cold
# caches and another compute graph (860, 290, 110 and 60 µs more; 7.5M parameters on 2 cores).
_FIRST_STEPS = 4
_PARTS = 50  # to which probabilities and shares of a step are rounded


@dataclass(frozen=True)
class CostCurve:
    """Seconds to decode n rows: measured, interpolated, or extrapolated beyond the last size.

    Kernels work on blocks of rows. So between two sizes, n counts as the next multiple of four, or
    as the larger size if that comes first: 7 rows may cost as much as 8, and 3 more than 4.

    sizes           row counts, ascending from 1
    seconds         time of each
    switch_seconds  extra cost of the first two batches of a size that differs from the one before:
                    llama.cpp builds a graph for the first, and a GPU records that for the second

    >>> CostCurve((1, 3, 11), (1.0, 2.0, 4.0)).table[:12]
    [0.0, 1.0, 2.0, 2.0, 2.25, 3.25, 3.25, 3.25, 3.25, 4.0, 4.0, 4.0]
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
        most = max(self.sizes[-1], SIZES[-1])
        return [0.0, *(self._at(n) for n in range(1, most + 1))]

    def table_to(self, n: int) -> list[float]:
        """Seconds for 0, 1, … ``n`` rows."""
        table = self.table
        table += [self._at(rows) for rows in range(len(table), n + 1)]
        return table[: n + 1]

    def at(self, n: int) -> float:
        """Seconds for ``n`` rows."""
        table = self.table
        return table[n] if n < len(table) else self._at(n)

    def _at(self, n: int) -> float:
        if n <= self.sizes[-1]:
            return _interpolated(_block(n, self.sizes), self.sizes, self.seconds)
        return self.seconds[-1] + self._slope * (n - self.sizes[-1])

    @cached_property
    def _slope(self) -> float:
        """Seconds of a row beyond the last size: as from the size before, or from the first.

        A last size that was disturbed, or has a faster kernel, must not make rows free.
        """
        (*sizes, last), (*seconds, end) = self.sizes, self.seconds
        rows = [(end - s) / (last - n) for n, s in zip(sizes, seconds, strict=True)]
        return max(rows[:1] + rows[-1:], default=0.0)

    @cached_property
    def row_share(self) -> float:
        """The lowest average cost of an additional row, as a share of a one-row batch."""
        plain = self.table[1]
        per_row = [(self.table[n] / plain - 1) / (n - 1) for n in range(2, SIZES[-1] + 1)]
        return max(min(per_row), 1e-9)

    def pays_from(self, n_texts: int, extra: float) -> float:
        """The least probability from which drafts pay for one of ``n_texts``, if each is accepted
        with it after those before; more than 1 if none pays.

        ``extra`` seconds are what a step with drafts costs beside its rows.
        """
        plain = self.at(n_texts) / n_texts
        key = n_texts, round(_PARTS * extra / plain)
        found = self._pays_from.get(key)
        if found is None:
            most = max(1, SIZES[-1] - n_texts)
            fixed = key[1] / _PARTS - n_texts
            needed = [self.at(n_texts + n) / plain + fixed for n in range(1, most + 1)]

            def pays(part: int) -> bool:
                expected = accumulate(repeat(part / _PARTS, most), mul)
                return any(e > need for e, need in zip(accumulate(expected), needed, strict=True))

            found = bisect_left(range(_PARTS + 1), True, key=pays) / _PARTS
            if found == 1.0 and not pays(_PARTS):
                found = 2.0
            self._pays_from[key] = found
        return found

    @cached_property
    def _pays_from(self) -> dict[tuple[int, int], float]:
        return {}


class Prices(NamedTuple):
    """What the drafts of the coming step have to save.

    curve      seconds for n rows
    plain      seconds of a token without drafts
    pays_from  probability from which they pay
    change     seconds that another number of rows costs
    """

    curve: CostCurve
    plain: float
    pays_from: float
    change: float


class Cost:
    """The cost of decoding with one model on one machine, at any place of the context.

    Attention adds to a batch's cost in proportion to the tokens before it, so two measured curves
    give all others. Real steps correct the curves.

    near       the curve after NEAR tokens, as measured or corrected
    level      real time of single rows over that of ``near``, in this run
    n_texts    texts in each batch
    n_past     tokens that a row of theirs attends to, on average; 0 for one text, whose own count
    last_rows  rows of the last decode, including a prompt's; 0 before a text's first
    overhead   average seconds of a step besides decoding and drafting, for each text
    is_rough   whether it was guessed, or measured while other programs took the processors
    """

    def __init__(
        self, near: CostCurve, far: CostCurve | None = None, *, is_rough: bool = False
    ) -> None:
        """``far`` is the curve after FAR tokens; without it the cost is the same everywhere.

        It may have fewer sizes: between them what attention adds is interpolated.
        """
        self.set(near, far, is_rough=is_rough)
        self.n_texts, self.n_past, self.last_rows = 1, 0, 0
        self.overhead = 0.0
        self._prices_of: tuple[int, int, int] | None = None
        self._n_same = 0  # decodes in a row with as many rows as the last
        self._n_first = 0  # coming decodes to ignore as atypical
        self._n_followed = 0
        self._read_seconds = 0.0  # of a prompt's row

    def set(self, near: CostCurve, far: CostCurve | None, *, is_rough: bool) -> None:
        """Take other curves, as for a new one."""
        self.near, self.is_rough = near, is_rough
        self._added = [0.0] * len(near.sizes)
        if far is not None:
            added = [s - near.at(n) for n, s in zip(far.sizes, far.seconds, strict=True)]
            self._added = [max(0.0, _interpolated(n, far.sizes, added)) for n in near.sizes]
        self.level = 1.0
        self._curves: dict[int, CostCurve] = {}  # by place of the context
        self._prices: Prices | None = None

    @property
    def far(self) -> CostCurve | None:
        """The curve after FAR tokens, if it differs."""
        if not any(self._added):
            return None
        seconds = [s + more for s, more in zip(self.near.seconds, self._added, strict=True)]
        return replace(self.near, seconds=seconds)

    def curve(self, n_past: int) -> CostCurve:
        """The curve for batches after ``n_past`` tokens."""
        place = (self.n_past or n_past) // _SPAN
        curve = self._curves.get(place)
        if curve is None:
            switch = self.level * self.near.switch_seconds
            curve = CostCurve(self.near.sizes, self._seconds(place), switch)
            self._curves[place] = curve
        return curve

    def prices(self, n_past: int) -> Prices:
        """The prices after ``n_past`` tokens. All texts of a step share one look-up."""
        at = (self.n_past or n_past) // _SPAN, self.n_texts, self.last_rows
        if self._prices is None or at != self._prices_of:
            curve, n_texts = self.curve(n_past), self.n_texts
            plain, change = curve.at(n_texts) / n_texts, self.change(curve, n_texts) / n_texts
            pays_from = curve.pays_from(n_texts, self.overhead + change)
            self._prices, self._prices_of = Prices(curve, plain, pays_from, change), at
        return self._prices

    def _seconds(self, place: int) -> list[float]:
        level, position = self.level, ((place + 0.5) * _SPAN - NEAR) / (FAR - NEAR)
        pairs = zip(self.near.seconds, self._added, strict=True)
        return [level * (s + position * more) for s, more in pairs]

    @property
    def row_seconds(self) -> float:
        """Seconds of a row among many: of a prompt's, once one was read."""
        return self._read_seconds or self.curve(0).at(SIZES[-1]) / SIZES[-1]

    def has_read(self, n_rows: int, seconds: float) -> None:
        """Learn from a batch that only read prompts. What was measured at first may be far off, for
        example while other programs took the processors."""
        new = seconds / n_rows
        self._read_seconds += (new - self._read_seconds) * (0.5 if self._read_seconds else 1.0)

    def begin(self) -> None:
        """A new text starts: ignore its first steps."""
        self._n_first = _FIRST_STEPS
        self.last_rows = 0

    def decoded(self, n_rows: int, n_steps: int = 1) -> None:
        """``n_steps`` batches of ``n_rows`` were decoded."""
        self._n_same = n_steps + (self._n_same if n_rows == self.last_rows else 0)
        self.last_rows = n_rows

    def change(self, curve: CostCurve, plain_rows: int) -> float:
        """Seconds beyond ``curve`` that a step with drafts costs, unless it has as many rows as the
        last one. A step without drafts has ``plain_rows``.

        Whoever leaves plain steps pays for the way back, too; then it is free.
        """
        is_away = self.last_rows not in (0, plain_rows)
        return curve.switch_seconds if is_away else 2.0 * curve.switch_seconds

    def follow(self, n_rows: int, n_past: int, seconds: float, n_steps: int = 1) -> None:
        """Learn from ``n_steps`` decodes of ``n_rows`` that took ``seconds`` each.

        Single rows set the level, for example when the machine slows down. Other sizes correct
        their own cost. The first two batches after another size do not count, except in a run of
        steps, less the switch. An interrupted batch counts at most twice its expected time. Curves
        change every 64 calls, since rebuilding them is too slow for every step.
        """
        changes = n_rows != self.last_rows
        self.decoded(n_rows, n_steps)
        if self._n_first > 0:
            self._n_first -= n_steps
            return
        near = self.near
        if n_rows > near.sizes[-1] or self._n_same <= 2:
            return
        if changes:
            seconds -= self.level * near.switch_seconds / n_steps
        expected = self._seconds((self.n_past or n_past) // _SPAN)
        ratio = seconds / _interpolated(_block(n_rows, near.sizes), near.sizes, expected)
        factor = min(2.0, max(0.5, ratio)) ** (1.0 - (1.0 - RATE) ** n_steps)
        if n_rows == 1:
            self.level *= factor
        else:
            corrected = list(near.seconds)
            corrected[bisect_left(near.sizes, n_rows)] *= factor
            self.near = replace(near, seconds=corrected)
        self._n_followed += 1
        if self._n_followed % 64 == 0:
            self._curves.clear()
            self._prices = None


def _block(n: int, sizes: Sequence[int]) -> int:
    """The number of rows that ``n`` cost as much as, at most the last of ``sizes``."""
    size = sizes[bisect_left(sizes, n)]
    return n if n == size else min(-(-n // _BLOCK) * _BLOCK, size)


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The y at ``x``; beyond the last of ``xs`` in the direction of the last two."""
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    i = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
