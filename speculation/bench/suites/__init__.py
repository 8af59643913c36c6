"""The benchmark suites, one file each; ``--suite`` chooses one.

A suite defines methods, prompts, tables and figures. Measuring, saving and reporting are the same
for all.
"""

from __future__ import annotations

from speculation.bench.suites.builtin import Builtin
from speculation.bench.suites.cost import Cost
from speculation.bench.suites.memory import Memory
from speculation.bench.suites.scaling import Scaling
from speculation.bench.suites.suite import Suite

SUITES: dict[str, Suite] = {suite.name: suite for suite in (Builtin(), Scaling(), Cost(), Memory())}
