"""Figures: fonts, colours, subplots, and SVG output.

Matplotlib is imported when the first figure is drawn, so a benchmark without --report needs none.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from batching.errors import InvalidParameter
from speculation.drafter import BASELINE
from speculation.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 8.6  # inches
GREY = "#8a8f98"
# Distinguishable with any colour vision (after Okabe and Ito), on white and in print.
PALETTE = (
    *("#0072b2", "#e3008c", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4fc9"),
    *("#8c6d31", "#1f4e4a", "#8a1c4a", "#7ab800", "#333333", "#ff8a70", "#00b8a9"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PHASE_COLOURS = {
    "draft": "#e69f00",
    "build": "#56b4e9",
    "decode": "#b9c0c9",
    "verify": "#009e73",
    "commit": "#cc79a7",
    "loop": "#5f6670",
}
_STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9.5,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#9aa0a8",
    "axes.facecolor": "#ffffff",
    "figure.facecolor": "#ffffff",
    "savefig.facecolor": "#ffffff",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "xtick.color": "#555b63",
    "ytick.color": "#555b63",
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "path",  # text as outlines, so viewers need no font
    "svg.hashsalt": "speculation",  # reproducible files
}


def require_matplotlib() -> None:
    """Raise InvalidParameter if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise InvalidParameter(
            "--report needs matplotlib, which is not installed; run pip install matplotlib, or "
            "leave --report out"
        )


@contextmanager
def style() -> Iterator[None]:
    """A context with the project's figure style. Draw and save figures in it."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        yield


def subplots(
    n_rows: int = 1, n_columns: int = 1, *, height: float, width: float = WIDTH, **more: Any
) -> tuple[Figure, Any]:
    """A figure of ``width`` x ``height`` inches and its axes, ``(n_rows, n_columns)``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **more)


def marked(i: int) -> dict[str, Any]:
    """How the points of the ``i``-th series are drawn.

    They are hollow and differ in shape and size, so that all of several equal points are seen.
    """
    return {
        "color": PALETTE[i % len(PALETTE)],
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": max(3.0, 8.0 - 1.5 * i),
        "fillstyle": "none",
        "linewidth": 1.2,
    }


def svg(figure: Figure) -> str:
    """The figure as an SVG document."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def colours(methods: Sequence[str]) -> dict[str, str]:
    """A colour for each method: fixed for a method's plain name, an unused one for a variant."""
    names = [name for name in METHODS if name != BASELINE]
    found = {BASELINE: GREY}
    for method in methods:
        if method in names:
            found[method] = PALETTE[names.index(method) % len(PALETTE)]
    free = [colour for colour in PALETTE if colour not in found.values()] or list(PALETTE)
    others = [method for method in methods if method not in found]
    for i, method in enumerate(others):
        found[method] = free[i % len(free)]
    return found
