"""Lookahead's scaling law: tokens per step over the window size.

Fu et al. 2024 (arXiv 2402.02057) find that with long enough n-grams, lookahead's step compression
(tokens per step) grows about linearly with the logarithm of the window. This suite measures it for
the loaded model: W = G from 1 to 64 for several N, and G alone, since the guesses contribute too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import correlation, linear_regression
from types import MappingProxyType

from speculation.bench.prompt_file import Prompt
from speculation.bench.report import NONE, Table, percent
from speculation.bench.results import Results
from speculation.bench.run import Plan
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.drafter import BASELINE
from speculation.engine import Engine
from speculation.methods import parse_method
from speculation.methods.lookahead import LookaheadParams

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
NGRAMS = (3, 5, 7)
GUESSES_AT = (16, 5)  # window and n-gram at which the guesses are varied alone
MAX_BATCH = 512  # rows
SAME = 0.005  # tokens per step; smaller differences do not count


@dataclass(frozen=True)
class Fit:
    """Least-squares fit of tokens per step = ``base`` + ``slope`` · log2 W.

    r2  its R²; None if tokens per step are the same for every W, which says nothing about the law
    """

    base: float
    slope: float
    r2: float | None

    def __str__(self) -> str:
        if self.r2 is None:
            return f"{self.base:.2f} for every W"
        return f"{self.base:.2f} + {self.slope:.2f} log₂ W, R² {self.r2:.2f}"


class Scaling(Suite):
    """A grid of lookahead's parameters on the first turn of some prompts."""

    name = "scaling"
    title = "lookahead's tokens per step by window, n-gram and guesses"
    defaults = MappingProxyType({"limit": 1})
    refused = ("methods",)

    def __init__(self) -> None:
        self.methods = [BASELINE, *grid()]

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        return [Prompt(prompt.id, prompt.category, prompt.turns[:1]) for prompt in given]

    def notes(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> list[str]:
        return [
            *super().notes(engine, prompts, plan),
            "tokens per step do not depend on the machine; the speed-up does, and wide windows "
            "need a GPU",
        ]

    def tables(self, results: Results) -> list[Table]:
        rows = lookahead_rows(results)
        fits = [(n, fit) for n in NGRAMS if (fit := fitted(diagonal(rows, n))) is not None]
        note = "b: gain per doubling of the window; R² near 1: the scaling law holds"
        if any(fit.r2 is None for _, fit in fits):
            note += (
                "\nR² –: tokens per step are the same for every W, which says nothing about the law"
            )
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
                        percent(row.acceptance_rate),
                        f"{row.speed_up_overall:.3f}",
                    ]
                    for params, row in rows
                ],
            ),
            Table(
                "tokens per step = a + b · log2 W, with G = W",
                ["N", "a", "b", "R²"],
                [
                    [
                        str(n),
                        f"{fit.base:.3f}",
                        f"{fit.slope:.3f}",
                        NONE if fit.r2 is None else f"{fit.r2:.3f}",
                    ]
                    for n, fit in fits
                ],
                note,
            ),
        ]


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
    slope, base = linear_regression(x, y)
    constant = max(y) - min(y) < SAME
    return Fit(base, slope, None if constant else correlation(x, y) ** 2)


def mean_rows(row: Row) -> float:
    """Mean rows per step."""
    steps = sum(row.rows_histogram.values())
    return sum(n * count for n, count in row.rows_histogram.items()) / steps
