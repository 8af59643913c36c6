"""--plot FILE: a picture of the results, one for each suite.

Matplotlib is imported when the picture is drawn, so a benchmark without --plot needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import log2, nan
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter
from speculation.bench.report import by_category, category_title
from speculation.bench.results import Results
from speculation.bench.suites.scaling import NGRAMS, WINDOWS, diagonal, fitted, lookahead_rows
from speculation.bench.summary import summarise
from speculation.drafter import BASELINE
from speculation.system.files import require_writable

MARKERS = "osD^vPX"


def check_plot(file: str) -> None:
    """Check before measuring that the picture can be drawn. Raises InvalidParameter."""
    if find_spec("matplotlib") is None:
        raise InvalidParameter(
            "--plot needs matplotlib, which is not installed; run pip install matplotlib, or "
            "leave --plot out"
        )
    path = Path(file)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidParameter(f"--plot is {path}; give a name that ends with .svg, .png or .pdf")
    require_writable(path)


def write_plot(file: str, suite: str, results: Results) -> None:
    """Draw the results of ``suite`` into the file."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    ax = figure.subplots()
    ax.grid(color="#e6e8eb")
    ax.set_axisbelow(True)
    {"cost": _cost, "scaling": _scaling}.get(suite, _speed_ups)(ax, results)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    figure.savefig(file)


def _speed_ups(ax: Any, results: Results) -> None:
    """Bars grouped by category, one for each method."""
    blocks = by_category(summarise(results.runs))
    methods = [row.method for row in blocks[-1] if row.method != BASELINE] or [BASELINE]
    thick = 0.8 / len(methods)
    ax.figure.set_size_inches(8, 1.5 + len(blocks) * (0.2 + 0.2 * len(methods)))
    for i, method in enumerate(methods):
        rows = [next(row for row in block if row.method == method) for block in blocks]
        ax.barh(
            [n + (i - (len(methods) - 1) / 2) * thick for n in range(len(blocks))],
            [row.speed_up_mean for row in rows],
            xerr=[nan if row.speed_up_std is None else row.speed_up_std for row in rows],
            height=0.9 * thick,
            label=method,
        )
    ax.axvline(1.0, color="grey", linestyle="--")
    ax.set_yticks(range(len(blocks)), [category_title(block[0]) for block in blocks])
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.set_xlabel("speed-up over plain decoding, mean and standard deviation over the prompts")


def _cost(ax: Any, results: Results) -> None:
    for i, curve in enumerate(results.curves):
        relative = [value / curve.seconds[0] for value in curve.seconds]
        label = f"n_past {curve.n_past}, one row {1e3 * curve.seconds[0]:.2f} ms"
        ax.plot(curve.sizes, relative, label=label, **_hollow(i))
    ax.plot(WINDOWS, WINDOWS, color="grey", linestyle="--", label="as many single rows")
    _powers_of_two(ax.set_xscale, ax.set_xticks)
    _powers_of_two(ax.set_yscale, ax.set_yticks)
    ax.set_xlabel("rows per batch")
    ax.set_ylabel("decode time, relative to one row")


def _scaling(ax: Any, results: Results) -> None:
    rows = lookahead_rows(results)
    for i, n in enumerate(NGRAMS):
        points = diagonal(rows, n)
        fit, style = fitted(points), _hollow(i)
        label = f"N = {n}" if fit is None else f"N = {n}: {fit}"
        x, y = [w for w, _ in points], [tokens for _, tokens in points]
        ax.plot(x, y, linestyle="none", label=label, **style)
        if fit is not None:
            ends = [points[0][0], points[-1][0]]
            ax.plot(ends, [fit.base + fit.slope * log2(w) for w in ends], color=style["color"])
    ax.axhline(1.0, color="grey", linestyle="--")
    _powers_of_two(ax.set_xscale, ax.set_xticks)
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.9), max(high, 1.5))  # or rounding would look like a trend
    ax.set_xlabel("window W = guesses G")
    ax.set_ylabel("tokens per step")


def _hollow(i: int) -> dict[str, Any]:
    """How the points of the i-th series are drawn: equal ones are all seen."""
    style = {"color": f"C{i}", "marker": MARKERS[i % len(MARKERS)], "fillstyle": "none"}
    return {**style, "markersize": max(3.0, 8.0 - 1.5 * i)}


def _powers_of_two(set_scale: Callable[..., Any], set_ticks: Callable[..., Any]) -> None:
    set_scale("log", base=2)
    set_ticks(WINDOWS, [str(n) for n in WINDOWS], minor=False)
