"""The base class of suites, which is the default one: methods on prompts, with their speed-ups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from speculation.bench.prompt_file import MEMORY, Prompt
from speculation.bench.report import Table, counted, tables
from speculation.bench.results import Curve, Results, Run, Skipped
from speculation.bench.run import Plan, measure, warm_up
from speculation.bench.summary import summarise
from speculation.drafter import BASELINE
from speculation.engine import Engine
from speculation.settings import DEFAULT_METHOD

MAX_NAMED = 8  # methods


class Suite:
    """A benchmark suite. Subclasses override what differs.

    name      as given to ``--suite``
    title     what it measures, on one line
    methods   as on the command line; plain decoding is added
    defaults  defaults of flags that differ from the usual ones, by their names in Options
    refused   flags that do not apply, by their names in Options
    """

    name = "builtin"
    title = "comparison of methods on the prompts"
    methods: Sequence[str] = (BASELINE, DEFAULT_METHOD, "prompt-lookup")
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
        self, engine: Engine, prompts: Sequence[Prompt], plan: Plan
    ) -> Iterator[list[Run] | Skipped | Curve]:
        """Warm up, measure, and yield results as they come."""
        warm_up(engine, prompts, plan)
        yield from measure(engine, prompts, plan)

    def tables(self, results: Results) -> list[Table]:
        """The results as tables."""
        return tables(summarise(results.runs))


class Memory(Suite):
    """The prompts twice, in the same order. In the second pass the memory has all of the first."""

    name = "memory"
    title = "drafts from earlier texts, with a cold and then a warm memory"
    methods = (BASELINE, "prompt-lookup", "suffix:memory=off", "suffix")
    defaults = MappingProxyType({"prompts": MEMORY, "n_predict": 256})

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        return [
            replace(prompt, id=f"{prompt.id}-{state}", category=f"{prompt.category}, {state}")
            for state in ("cold", "warm")
            for prompt in given
        ]
