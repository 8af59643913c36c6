"""The questions that the bench has ready, one file each; ``--suite`` chooses.

A suite is methods, prompts, and how what was measured becomes tables and figures. Measuring,
keeping, going on and reporting are the same for all.
"""

from __future__ import annotations

from speculation.bench.suites.builtin import Builtin
from speculation.bench.suites.context import ContextLength
from speculation.bench.suites.cost import Cost
from speculation.bench.suites.lookup import Lookup
from speculation.bench.suites.scaling import Scaling
from speculation.bench.suites.suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (Builtin(), Scaling(), Cost(), ContextLength(), Lookup())
}
