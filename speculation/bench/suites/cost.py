"""The cost curve c(n): the time to decode n rows, and up to which n extra rows are nearly free.

Speculation pays because several rows in one batch cost less than one after the other. A model of
two lines is fitted. On a GPU the first line is nearly flat, because the weights are read once for
all rows; past the bend, each row costs its arithmetic. On a CPU the second row often adds the most,
because a single row has a faster kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from speculation.auto.calibration import measure_cost
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import NONE
from speculation.bench.results import Curve, Results
from speculation.bench.run import Plan
from speculation.bench.suites.suite import Suite
from speculation.bench.table import Table
from speculation.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)
N_PAST = (0, 128, 512, 1024, 2048, 4096, 8192)
TICKS = (1, 2, 4, 8, 16, 32, 64)  # of the logarithmic axes
BUDGET_SECONDS = 60.0  # per curve; the sizes left after it are skipped


@dataclass(frozen=True)
class TwoLines:
    """c(n) as two lines that meet at ``bend`` rows. Seconds.

    fixed       constant cost of a decode
    row         cost of each row up to the bend
    row_beyond  cost of each row past it
    error       root mean square of the relative error
    """

    fixed: float
    row: float
    row_beyond: float
    bend: int
    error: float

    def at(self, n: int) -> float:
        """Seconds for ``n`` rows."""
        return self.fixed + self.row * min(n, self.bend) + self.row_beyond * max(0, n - self.bend)


class Cost(Suite):
    """Times batches of n rows; generates nothing."""

    name = "cost"
    title = "decode time of 1 to 64 rows at several context lengths"
    refused = (
        *("methods", "prompts", "prompt", "limit", "categories", "raw", "thinking"),
        *("n_predict", "repeat", "temperature", "seed"),
    )

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        return []

    def n_measurements(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> int:
        return len(_reachable(engine))

    def notes(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> list[str]:
        notes = [f"batches of {SIZES[0]} to {SIZES[-1]} rows, {len(SIZES)} sizes"]
        skipped = sorted(set(N_PAST) - set(_reachable(engine)))
        if skipped:
            names = ", ".join(map(str, skipped))
            notes.append(f"the context or the batch is too small for n_past {names}")
        return notes

    def measure(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        plan: Plan,
        on_run: Callable[..., None],
    ) -> Iterator[Curve]:
        engine.call(lambda: engine.cache.truncate(0))
        engine.call(lambda: measure_cost(engine.context, sizes=(1, 2), n_past=0))  # warm up
        for n_past in _reachable(engine):
            measure = partial(measure_cost, engine.context, SIZES, n_past, BUDGET_SECONDS)
            curve = engine.call(measure)
            yield Curve(n_past, list(curve.sizes), list(curve.seconds))

    def tables(self, results: Results) -> list[Table]:
        curves = results.curves
        sizes = list(dict.fromkeys(n for curve in curves for n in curve.sizes))
        times = [
            {n: f"{1e3 * s:.3f}" for n, s in zip(curve.sizes, curve.seconds, strict=True)}
            for curve in curves
        ]
        fits = [(curve, fit) for curve in curves if (fit := fit_two_lines(curve)) is not None]
        return [
            Table(
                "decode time, ms",
                ["rows", *(f"n_past {curve.n_past}" for curve in curves)],
                [[str(n), *(column.get(n, NONE) for column in times)] for n in sizes],
            ),
            Table(
                "fit of two lines",
                [
                    *("n_past", "fixed ms", "row µs", "bend", "beyond µs", "error"),
                    *("2 rows", "8 rows", "32 rows"),
                ],
                [
                    [
                        str(curve.n_past),
                        f"{1e3 * fit.fixed:.3f}",
                        f"{1e6 * fit.row:.1f}",
                        str(fit.bend) if fit.row_beyond != fit.row else "none",
                        f"{1e6 * fit.row_beyond:.1f}",
                        f"{100 * fit.error:.0f}%",
                        *(f"{_relative_cost(curve, n):.1f}" for n in (2, 8, 32)),
                    ]
                    for curve, fit in fits
                ],
                "c(n) = fixed + row · n up to the bend, then a second line; error: root mean "
                "square of the relative error;\nlast three columns: measured c(n) / c(1)",
            ),
        ]

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        from speculation.bench.plots import GREY, marked, subplots

        figure, axes = subplots(n_columns=2, height=4.0)
        left, right = axes[0]
        for i, curve in enumerate(results.curves):
            milliseconds = [1e3 * value for value in curve.seconds]
            label = f"n_past {curve.n_past}"
            left.plot(curve.sizes, milliseconds, linestyle="none", label=label, **marked(i))
            fit = fit_two_lines(curve)
            if fit is not None:
                corners = sorted({curve.sizes[0], fit.bend, curve.sizes[-1]})
                times = [1e3 * fit.at(n) for n in corners]
                left.plot(corners, times, color=marked(i)["color"], linewidth=1.2)
            relative = [value / curve.seconds[0] for value in curve.seconds]
            right.plot(curve.sizes, relative, **marked(i))
        left.set_ylabel("ms")
        left.set_xlim(left=0)
        left.set_ylim(bottom=0)
        right.set_ylabel("relative to one row")
        right.plot(TICKS, TICKS, color=GREY, linestyle="--", linewidth=1.2)
        right.set_xscale("log", base=2)
        right.set_yscale("log", base=2)
        right.set_xticks(TICKS, [str(n) for n in TICKS])
        right.set_yticks(TICKS, [str(n) for n in TICKS])
        for ax in (left, right):
            ax.set_xlabel("rows per batch")
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=4)
        caption = (
            "Left: time to decode n rows (points; lower quartile) and the fitted model (lines). "
            "Right: the same relative to a single row, on logarithmic axes: a step of n rows pays "
            "off if it makes more tokens than that. Dashed: n times a single row."
        )
        return [("cost", caption, figure)]


def _reachable(engine: Engine) -> list[int]:
    """The values of N_PAST that leave room for the largest batch."""
    longest = engine.context.n_ctx - SIZES[-1] - 1
    return [n_past for n_past in N_PAST if n_past <= longest]


def fit_two_lines(curve: Curve) -> TwoLines | None:
    """Fit two lines to a curve, or one if the second improves the fit little.

    Least squares of the relative error, trying a bend at each size. None below four sizes.
    """
    if len(curve.sizes) < 4:
        return None
    straight = _fit(curve, curve.sizes[-1])
    bent = [_fit(curve, bend) for bend in curve.sizes[1:-2]]
    rising = [fit for fit in bent if min(fit.row, fit.row_beyond) >= 0]
    best = min(rising, key=lambda fit: fit.error, default=straight)
    return best if best.error < 0.8 * straight.error - 0.005 else straight


def _relative_cost(curve: Curve, n: int) -> float:
    """c(n) / c(1), interpolated linearly between measured sizes."""
    return float(np.interp(n, curve.sizes, curve.seconds)) / curve.seconds[0]


def _fit(curve: Curve, bend: int) -> TwoLines:
    """Least squares of the relative error for a given bend; the last size means no bend."""
    sizes = np.asarray(curve.sizes, dtype=float)
    seconds = np.asarray(curve.seconds, dtype=float)
    parts = [np.ones_like(sizes), np.minimum(sizes, bend)]
    if bend < curve.sizes[-1]:
        parts.append(np.maximum(0.0, sizes - bend))
    design = np.stack(parts, axis=1) / seconds[:, None]
    solution = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)[0]
    error = float(np.sqrt(np.mean((design @ solution - 1.0) ** 2)))
    fixed, row, *beyond = map(float, solution)
    return TwoLines(fixed, row, beyond[0] if beyond else row, bend, error)
