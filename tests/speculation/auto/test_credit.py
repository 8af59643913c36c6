"""Credit of auto's sources: when a source is enabled, and how its cost is charged."""

from __future__ import annotations

from itertools import pairwise

import pytest

from batching.tree import TokenTree
from speculation.auto.cost_curve import CostCurve, CostModel
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.source import Source
from speculation.drafter import DraftBudget, Step
from tests.support.fake_sources import Never, OneToken, set_clock, take_step


def steps_enabled(
    monkeypatch: pytest.MonkeyPatch, seconds: float, n_steps: int, n_per_text: int | None = None
) -> list[bool]:
    """Whether a source is enabled at each step when drafting takes ``seconds`` and a step 1 s.

    Texts have ``n_per_text`` steps; by default there is one text.
    """
    clock = [0.0]

    def tick() -> float:
        clock[0] += seconds / 2  # draft and observe each read it twice
        return clock[0]

    set_clock(monkeypatch, tick)
    source = Source("never", Never())
    auto = Auto(AutoParams(), [source], CostModel({0: CostCurve((1, 64), (1.0, 1.5))}))
    enabled = []
    for now in range(n_steps):
        if now % (n_per_text or n_steps) == 0:
            auto.begin([1])
        enabled.append(source.enabled_at <= now)
        take_step(auto)
    return enabled


def test_a_source_that_never_pays_takes_about_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds in (0.005, 0.1, 2.0):
        enabled = steps_enabled(monkeypatch, seconds, 4000)
        assert enabled[0]
        assert sum(enabled) * seconds <= 0.016 * 4000


def test_short_replies_enable_an_unhelpful_source_every_time_only_if_it_is_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(steps_enabled(monkeypatch, 0.05, 600, 6))
    enabled = steps_enabled(monkeypatch, 0.2, 600, 6)
    assert enabled[0]
    assert sum(enabled) * 0.2 <= 0.016 * 600


def test_a_source_that_never_pays_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled = steps_enabled(monkeypatch, 1.0, 8000)
    tries = [now for now, is_enabled in enumerate(enabled) if is_enabled]
    cooldowns = [b - a for a, b in pairwise(tries)]
    assert cooldowns[:5] == [126, 301, 601, 601, 601]


def test_the_gains_of_a_lone_source_are_credited_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 0.01
        return clock[0]

    set_clock(monkeypatch, tick)
    source = Source("one-token", OneToken(7, 0.9))
    auto = Auto(AutoParams(), [source], CostModel({0: CostCurve((1, 64), (1.0, 1.63))}))
    auto.begin([1])
    credit_after = []
    for _ in range(9):
        take_step(auto, [0, 1])
        credit_after.append(source.credit)
    # An accepted draft saves 0.99 of a step, and drafting takes 0.02.
    assert credit_after[:8] == pytest.approx([0.97] * 8)
    assert credit_after[8] == pytest.approx(min(9 * 0.97, 8.0))


def test_an_expensive_source_pays_for_reading_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Reader(Never):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def begin(self, prompt: object) -> None:
            clock[0] += 8.0

        def draft(self, tokens: object, tree: object, budget: object) -> None:
            clock[0] += self.seconds

    set_clock(monkeypatch, lambda: clock[0])
    for seconds, cooldown in ((0.1, 0.0), (0.15, 8.3 / 0.008)):
        source = Source("reader", Reader(seconds))
        auto = Auto(AutoParams(), [source], CostModel({0: CostCurve((1, 64), (1.0, 1.5))}))
        for _ in range(2):  # the source's cost is known after the first text
            auto.begin([1])
            take_step(auto)
        assert source.enabled_at == pytest.approx(2 + cooldown if cooldown else 0.0)


def test_a_disabled_expensive_source_does_not_read_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds, began in ((0.1, 2), (0.5, 1)):
        clock = [0.0]

        def tick(clock: list[float] = clock, seconds: float = seconds) -> float:
            clock[0] += seconds / 2
            return clock[0]

        set_clock(monkeypatch, tick)
        drafter = Never()
        source = Source("never", drafter)
        source.begin([1], 0)
        tree = TokenTree(1)
        step = Step(tree, None, [0], 9, 1.0)  # type: ignore[arg-type]
        for now in range(30):
            if source.enabled_at <= now:
                source.draft([1], tree, DraftBudget())
                source.observe(step, gain=0.0, plain=1.0, now=now + 1)
        assert source.enabled_at > 30
        source.begin([2], 30)
        assert drafter.began == began
