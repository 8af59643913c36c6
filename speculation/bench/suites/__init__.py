"""The benchmark suites; ``--suite`` chooses one.

A suite defines methods, prompts and tables. Measuring, saving and reporting are the same for all.
"""

from __future__ import annotations

from speculation.bench.suites.cost import Cost
from speculation.bench.suites.scaling import Scaling
from speculation.bench.suites.suite import Memory, Suite

SUITES: dict[str, Suite] = {suite.name: suite for suite in (Suite(), Scaling(), Cost(), Memory())}
