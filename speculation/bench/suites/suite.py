"""The base class of suites. Most measure prompts and differ in methods, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speculation.bench.prompt_file import Prompt
from speculation.bench.report import counted
from speculation.bench.results import Curve, Results, Run, Skipped
from speculation.bench.run import Plan, measure, warm_up
from speculation.bench.table import Table
from speculation.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure
MAX_NAMED = 8  # methods


class Suite:
    """A benchmark suite. Subclasses override what differs.

    name      as given to ``--suite``
    title     what it measures, on one line
    methods   as on the command line; plain decoding is added
    defaults  defaults of flags that differ from the usual ones, by their names in Options
    refused   flags that do not apply, by their names in Options
    """

    name = ""
    title = ""
    methods: Sequence[str] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})
    refused: Sequence[str] = ()

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        """The prompts to measure; ``given`` are the prompts selected by the flags."""
        return list(given)

    def notes(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> list[str]:
        """What is measured, and what else to know before the results, one line each."""
        n_turns = sum(len(prompt.turns) for prompt in prompts)
        names = ", ".join(map(str, plan.methods))
        if len(plan.methods) > MAX_NAMED:
            names = counted(len(plan.methods), "method")
        return [
            f"{counted(len(prompts), 'prompt')} with {counted(n_turns, 'turn')}, "
            f"up to {plan.n_predict} tokens each, {plan.repeat}x {names}"
        ]

    def n_measurements(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> int:
        """The number of measurements: runs, unless the suite measures something else."""
        turns = sum(len(prompt.turns) for prompt in prompts)
        return turns * plan.repeat * len(plan.methods)

    def measure(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        plan: Plan,
        on_run: Callable[..., None],
    ) -> Iterator[list[Run] | Skipped | Curve]:
        """Warm up, measure, and yield results as they come."""
        warm_up(engine, prompts, plan)
        yield from measure(engine, prompts, plan, on_run)

    def tables(self, results: Results) -> list[Table]:
        """The results as tables."""
        raise NotImplementedError

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        """The results as figures: file name, caption, figure. Needs matplotlib."""
        raise NotImplementedError
