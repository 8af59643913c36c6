"""The suite ``memory``: what methods gain from earlier texts, with a cold and a warm memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from speculation.bench.prompt_file import MEMORY, Prompt
from speculation.bench.run import Plan
from speculation.bench.suites.builtin import Builtin
from speculation.drafter import BASELINE
from speculation.engine import Engine


class Memory(Builtin):
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
