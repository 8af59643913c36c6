"""Lookahead's scaling law: tokens per step over the window size.

Fu et al. 2024 (arXiv 2402.02057) find that with long enough n-grams, lookahead's step compression
(tokens per step) grows about linearly with the logarithm of the window. This suite measures it for
the loaded model: W = G from 1 to 64 for several N, and G alone, since the guesses contribute too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from speculation.bench.prompt_file import Prompt
from speculation.bench.results import Results
from speculation.bench.run import Plan
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.bench.table import Table
from speculation.drafter import BASELINE
from speculation.drafters.lookahead import LookaheadParams
from speculation.engine import Engine
from speculation.methods import parse_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
NGRAMS = (3, 5, 7)
GUESSES_AT = (16, 5)  # window and n-gram at which the guesses are varied alone
MAX_BATCH = 512  # rows


@dataclass(frozen=True)
class Fit:
    """Least-squares fit of tokens per step = ``base`` + ``slope`` · log2 W, with its R²."""

    base: float
    slope: float
    r2: float


class Scaling(Suite):
    """A grid of lookahead's parameters on the first turn of some prompts."""

    name = "scaling"
    title = "lookahead's tokens per step by window, n-gram and guesses"
    defaults = {"limit": 1}  # noqa: RUF012

    def __init__(self) -> None:
        self.methods = [BASELINE, *grid()]

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        return [Prompt(prompt.id, prompt.category, prompt.turns[:1]) for prompt in given]

    def notes(self, engine: Engine, plan: Plan) -> list[str]:
        return [
            "tokens per step do not depend on the machine; the speed-up does, and wide windows "
            "need a GPU"
        ]

    def tables(self, results: Results) -> list[Table]:
        rows = lookahead_rows(results)
        return [
            Table(
                "lookahead, all prompts",
                ["W", "N", "G", "rows/step", "tokens/step", "accept", "speed-up"],
                [
                    [
                        str(params.window),
                        str(params.ngram),
                        str(params.guesses),
                        f"{mean_rows(row):.1f}",
                        f"{row.tokens_per_step:.3f}",
                        "–" if row.acceptance_rate is None else f"{100 * row.acceptance_rate:.1f}%",
                        f"{row.speed_up_overall:.3f}",
                    ]
                    for params, row in rows
                ],
            ),
            Table(
                "tokens per step = a + b · log2 W, with G = W",
                ["N", "a", "b", "R²"],
                [
                    [str(n), f"{fit.base:.3f}", f"{fit.slope:.3f}", f"{fit.r2:.3f}"]
                    for n in NGRAMS
                    if (fit := fitted(diagonal(rows, n))) is not None
                ],
                "b: gain per doubling of the window; R² near 1: the scaling law holds",
            ),
        ]

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        from speculation.bench.plots import GREY, PALETTE, subplots

        rows = lookahead_rows(results)
        figure, axes = subplots(n_columns=2, height=3.6, sharey=True, width_ratios=[3, 2])
        left, right = axes[0]
        for n, colour in zip(NGRAMS, PALETTE, strict=False):
            points = diagonal(rows, n)
            left.plot(*_columns(points), marker="o", linestyle="none", color=colour)
            fit = fitted(points)
            label = f"N = {n}"
            if fit is not None:
                label += f": {fit.base:.2f} + {fit.slope:.2f} log₂ W, R² {fit.r2:.2f}"
                ends = [points[0][0], points[-1][0]]
                line = [fit.base + fit.slope * log2(w) for w in ends]
                left.plot(ends, line, color=colour, label=label)
            else:
                left.plot([], [], color=colour, marker="o", label=label)
        window, n = GUESSES_AT
        guesses = [
            (params.guesses, row.tokens_per_step)
            for params, row in rows
            if (params.window, params.ngram) == GUESSES_AT
        ]
        right.plot(*_columns(sorted(guesses)), marker="o", color=PALETTE[1])
        left.set_title("window and guesses together, G = W")
        right.set_title(f"guesses alone, W = {window}, N = {n}")
        left.set_xlabel("W")
        right.set_xlabel("G")
        left.set_ylabel("tokens per step")
        left.legend(loc="upper left", fontsize=8.5)
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_xlim(0.8, 1.25 * WINDOWS[-1])
            ax.set_xticks(WINDOWS, [str(w) for w in WINDOWS])
            ax.minorticks_off()
            ax.axhline(1.0, color=GREY, linestyle="--", linewidth=1.2)
        low, high = left.get_ylim()
        left.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
        caption = (
            "Tokens per step (step compression) of lookahead over the window, on a logarithmic "
            "axis: on a straight line, each doubling of the window adds the same. Dashed: plain "
            "decoding."
        )
        return [("scaling", caption, figure)]


def grid() -> list[str]:
    """The methods: W = G for every N, as far as a batch allows, then G alone."""
    wanted = [(w, n, w) for n in NGRAMS for w in WINDOWS if 2 * w * (n - 1) <= MAX_BATCH]
    wanted += [(*GUESSES_AT, guesses) for guesses in WINDOWS]
    texts = [f"lookahead:window={w},ngram={n},guesses={g}" for w, n, g in wanted]
    return list(dict.fromkeys(str(parse_method(text)) for text in texts))


def lookahead_rows(results: Results) -> list[tuple[LookaheadParams, Row]]:
    """Parameters and results of each method over all prompts, by N, W and G."""
    rows = [
        row for row in summarise(results.runs) if row.category == ALL and row.method != BASELINE
    ]
    found: list[tuple[LookaheadParams, Row]] = [
        (parse_method(row.method).params, row) for row in rows
    ]
    return sorted(found, key=lambda pair: (pair[0].ngram, pair[0].window, pair[0].guesses))


def diagonal(rows: Sequence[tuple[LookaheadParams, Row]], ngram: int) -> list[tuple[int, float]]:
    """W and tokens per step where G = W, for one N."""
    return [
        (params.window, row.tokens_per_step)
        for params, row in rows
        if params.ngram == ngram and params.guesses == params.window
    ]


def fitted(points: Sequence[tuple[int, float]]) -> Fit | None:
    """Fit tokens per step over log2 W; None below three points."""
    if len(points) < 3:
        return None
    x = [log2(w) for w, _ in points]
    y = [tokens for _, tokens in points]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    base = y_mean - slope * x_mean
    total = sum((b - y_mean) ** 2 for b in y)
    left = sum((b - base - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return Fit(base, slope, 1 - left / total if total else 1.0)


def mean_rows(row: Row) -> float:
    """Mean rows per step."""
    steps = sum(row.rows_histogram.values())
    return sum(n * count for n, count in row.rows_histogram.items()) / steps


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
