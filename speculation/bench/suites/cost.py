"""The cost curve c(n): the time to decode n rows, and up to which n extra rows are nearly free.

Speculation pays because several rows in one batch cost less than one after the other. On a GPU the
first rows are nearly free, because the weights are read once for all; past a bend, each row costs
its arithmetic. On a CPU the second row often adds the most, because a single row has a faster
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from speculation.auto.calibration import measure_cost
from speculation.bench.prompt_file import Prompt
from speculation.bench.report import NONE, Table
from speculation.bench.results import Curve, Results
from speculation.bench.run import Plan
from speculation.bench.suites.suite import Suite
from speculation.engine import Engine

SIZES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)
N_PAST = (0, 128, 512, 1024, 2048, 4096, 8192)
RELATIVE = (2, 4, 8, 16, 32, 64)
BUDGET_SECONDS = 60.0  # per curve; the sizes left after it are skipped


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

    def measure(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> Iterator[Curve]:
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
        return [
            Table(
                "decode time, ms",
                ["rows", *(f"n_past {curve.n_past}" for curve in curves)],
                [[str(n), *(column.get(n, NONE) for column in times)] for n in sizes],
            ),
            Table(
                "relative to one row",
                ["n_past", *(f"{n} rows" for n in RELATIVE)],
                [
                    [str(curve.n_past), *(f"{_relative_cost(curve, n):.1f}" for n in RELATIVE)]
                    for curve in curves
                ],
                "a step of n rows pays if it makes more tokens than that",
            ),
        ]


def _reachable(engine: Engine) -> list[int]:
    """The values of N_PAST that leave room for the largest batch."""
    longest = engine.context.n_ctx - SIZES[-1] - 1
    return [n_past for n_past in N_PAST if n_past <= longest]


def _relative_cost(curve: Curve, n: int) -> float:
    """c(n) / c(1), interpolated linearly between measured sizes."""
    return float(np.interp(n, curve.sizes, curve.seconds)) / curve.seconds[0]
