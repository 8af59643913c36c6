"""A parameter sweep of prompt lookup: which variant drafts best.

Saxena (github.com/apoorvumang/prompt-lookup-decoding, 2023) copies ten tokens from the first match
of the longest n-gram, and leaves better rules as an open question. This suite combines n-gram
length, draft length, match order, and fixed or adaptive length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any

from speculation.bench.results import Results
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.bench.table import Table
from speculation.drafter import BASELINE
from speculation.drafters.prompt_lookup import ORDERS, PromptLookupParams
from speculation.methods import parse_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NGRAMS = (1, 2, 3, 5)
DRAFTS = (3, 7, 15, 31, 63)  # draft length, or its maximum if adaptive
SAXENA = "prompt-lookup:adaptive=off,order=first"


class Lookup(Suite):
    """A sweep of prompt lookup's parameters."""

    name = "lookup"
    title = "prompt lookup's parameters: n-gram, draft length, match order, adaptive or fixed"
    defaults = {"limit": 2}  # noqa: RUF012

    def __init__(self) -> None:
        self.methods = [BASELINE, *sweep()]

    def tables(self, results: Results) -> list[Table]:
        rows = lookup_rows(results)
        return [
            Table(
                "variants by overall speed-up",
                HEADINGS,
                [_cells(*pair) for pair in _ranked(rows, lambda row: row.speed_up_overall)],
            ),
            Table(
                "variants by tokens per step",
                HEADINGS,
                [_cells(*pair) for pair in _ranked(rows, lambda row: row.tokens_per_step)],
            ),
            Table(
                "effect of each setting",
                ["setting", "mean overall", "best overall", "mean tokens/step", "best tokens/step"],
                list(_effects(rows)),
                "over all variants with that setting; Saxena's rule is order first, adaptive off, "
                "max_ngram 3, draft 10",
            ),
        ]

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        from speculation.bench.plots import GREY, PALETTE, subplots

        rows = lookup_rows(results)
        colour = dict(zip(ORDERS, PALETTE, strict=False))
        figure, axes = subplots(n_columns=2, height=3.9, width_ratios=[3, 2])
        left, right = axes[0]
        for order, adaptive in product(ORDERS, (True, False)):
            points = [
                (row.tokens_per_step, row.speed_up_overall)
                for params, row in rows
                if (params.order, params.adaptive) == (order, adaptive)
            ]
            left.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                s=26,
                color=colour[order] if adaptive else "none",
                edgecolors=colour[order],
                label=f"{order}, adaptive" if adaptive else f"{order}, fixed",
            )
        saxena = [row for _, row in rows if row.method == SAXENA_SHOWN]
        for row in saxena:
            left.annotate(
                "Saxena's rule",
                (row.tokens_per_step, row.speed_up_overall),
                xytext=(-10, -24),
                textcoords="offset points",
                ha="right",
                arrowprops={"arrowstyle": "-", "color": "#555b63"},
                fontsize=8.5,
            )
        left.axhline(1.0, color=GREY, linestyle="--", linewidth=1.2)
        left.set_xlabel("tokens per step")
        left.set_ylabel("overall speed-up")
        figure.legend(loc="outside upper left", ncols=4, fontsize=8.5)
        settings = list(_settings(rows))
        names = [name for name, _ in settings]
        for y, (_, chosen) in enumerate(settings):
            values = [row.speed_up_overall for row in chosen]
            right.plot([min(values), max(values)], [y, y], color="#c3c8cf", linewidth=3)
            right.plot([mean(values)], [y], marker="o", color="#0072b2")
        right.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2)
        right.set_yticks(range(len(names)), names, fontsize=8.5)
        right.invert_yaxis()
        right.set_xlabel("overall speed-up: mean and range")
        caption = (
            "Left: every variant, all prompts together; filled: adaptive draft length, hollow: "
            "fixed. Right: mean and range over all variants that share a setting. Dashed: plain "
            "decoding."
        )
        return [("lookup", caption, figure)]


HEADINGS = (
    *("order", "adaptive", "max_ngram", "draft", "overall", "speed-up", "tokens/step", "accept"),
    "lookup µs/step",
)
SAXENA_SHOWN = str(parse_method(SAXENA))


def sweep() -> list[str]:
    """Saxena's rule and every combination, as on the command line."""
    texts = [SAXENA]
    for order, adaptive, ngram, draft in product(ORDERS, (True, False), NGRAMS, DRAFTS):
        length = f"draft_max={draft}" if adaptive else f"adaptive=off,draft={draft}"
        texts.append(f"prompt-lookup:order={order},max_ngram={ngram},{length}")
    return list(dict.fromkeys(str(parse_method(text)) for text in texts))


def lookup_rows(results: Results) -> list[tuple[PromptLookupParams, Row]]:
    """Parameters and results of each variant over all prompts."""
    return [
        (parse_method(row.method).params, row)
        for row in summarise(results.runs)
        if row.category == ALL and row.method != BASELINE
    ]


Rows = Sequence[tuple[PromptLookupParams, Row]]


def _ranked(rows: Rows, value: Callable[[Row], float]) -> Rows:
    return sorted(rows, key=lambda pair: value(pair[1]), reverse=True)


def _cells(params: PromptLookupParams, row: Row) -> list[str]:
    std = "–" if row.speed_up_std is None else f"{row.speed_up_std:.2f}"
    return [
        params.order,
        _adaptive(params),
        str(params.max_ngram),
        str(_length(params)),
        f"{row.speed_up_overall:.3f}",
        f"{row.speed_up_mean:.2f} ± {std}",
        f"{row.tokens_per_step:.2f}",
        "–" if row.acceptance_rate is None else f"{100 * row.acceptance_rate:.1f}%",
        f"{1e6 * row.phase_seconds['draft']:.1f}",
    ]


def _adaptive(params: PromptLookupParams) -> str:
    return "on" if params.adaptive else "off"


def _length(params: PromptLookupParams) -> int:
    return params.draft_max if params.adaptive else params.draft


def _settings(rows: Rows) -> Iterator[tuple[str, list[Row]]]:
    """Each value of each parameter, and the variants that have it."""
    parameters: list[tuple[str, Sequence[Any], Callable[[PromptLookupParams], Any]]] = [
        ("order", ORDERS, lambda params: params.order),
        ("adaptive", ("on", "off"), _adaptive),
        ("max_ngram", NGRAMS, lambda params: params.max_ngram),
        ("draft", DRAFTS, _length),
    ]
    for name, values, value_of in parameters:
        for value in values:
            chosen = [row for params, row in rows if value_of(params) == value]
            if chosen:
                yield f"{name} {value}", chosen


def _effects(rows: Rows) -> Iterator[list[str]]:
    for name, chosen in _settings(rows):
        overall = [row.speed_up_overall for row in chosen]
        tokens = [row.tokens_per_step for row in chosen]
        yield [
            name,
            *(f"{value:.3f}" for value in (mean(overall), max(overall))),
            *(f"{value:.2f}" for value in (mean(tokens), max(tokens))),
        ]
