"""The base class of suites. Most measure prompts and differ in methods, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from speculation.bench.prompt_file import Prompt
from speculation.bench.report import counted
from speculation.bench.results import Curve, Results, Run, Skipped
from speculation.bench.resume import rounds
from speculation.bench.run import Plan, measure, warm_up
from speculation.bench.table import Table
from speculation.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 24  # per table in the terminal


class Suite:
    """A benchmark suite. Subclasses override what differs.

    name            as given to ``--suite``
    title           what it measures, on one line
    methods         as on the command line; plain decoding is added
    defaults        defaults of flags that differ from the usual ones, by their names in Options
    own_methods     ``--methods`` does not apply
    own_prompts     ``--prompts``, ``--prompt``, ``--limit`` and ``--categories`` do not apply
    no_runs         nothing is generated: ``--n-predict``, ``--repeat`` and the like do not apply
    """

    name = ""
    title = ""
    methods: Sequence[str] = ()
    defaults: dict[str, Any] = {}  # noqa: RUF012 - constant of a subclass
    own_methods = True
    own_prompts = False
    no_runs = False

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        """The prompts to measure; ``given`` are the prompts selected by the flags."""
        return list(given)

    def notes(self, engine: Engine, plan: Plan) -> list[str]:
        """Notes to print before the results, one line each."""
        return []

    def what(self, prompts: Sequence[Prompt], plan: Plan) -> str:
        """What is measured, on one line."""
        n_turns = sum(len(prompt.turns) for prompt in prompts)
        names = ", ".join(map(str, plan.methods))
        if len(plan.methods) > 8:
            names = counted(len(plan.methods), "method")
        return (
            f"{counted(len(prompts), 'prompt')} with {counted(n_turns, 'turn')}, "
            f"up to {plan.n_predict} tokens each, {plan.repeat}x {names}"
        )

    def n_measurements(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> int:
        """The number of measurements: runs, unless the suite measures something else."""
        turns = sum(len(prompt.turns) for prompt in prompts)
        return turns * plan.repeat * len(plan.methods)

    def warm_up(self, engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> None:
        """Check that every method runs, and warm up."""
        warm_up(engine, prompts, plan)

    def measure(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        plan: Plan,
        earlier: Results,
        on_run: Callable[..., None],
    ) -> Iterator[list[Run] | Skipped | Curve]:
        """Measure what is missing from ``earlier``, and yield results as they come."""
        yield from measure(engine, prompts, plan, on_run, rounds(earlier.runs))

    def text(self, results: Results) -> str:
        """The tables as text."""
        return "\n\n".join(table.text(MAX_ROWS) for table in self.tables(results))

    def tables(self, results: Results) -> list[Table]:
        """The results as tables."""
        raise NotImplementedError

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        """The results as figures: file name, caption, figure. Needs matplotlib."""
        raise NotImplementedError
