"""auto's sources: when one is asked, and what trying it may cost."""

from __future__ import annotations

import pytest

from batching.together import run
from batching.tree import TokenTree
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.source import Gains, Source
from speculation.drafter import DraftBudget, PlainSteps
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.methods.suffix import SuffixParams, spec
from tests.support.fake_sources import Clock, OneToken, take_step, use_clock


def asked(
    monkeypatch: pytest.MonkeyPatch,
    drafter: OneToken,
    n_steps: int,
    *,
    seconds: float,
    reading: float = 0.0,
    steps_of_a_text: int = 0,
    right: bool = False,
) -> list[int]:
    """The steps in which a source is asked that takes ``seconds`` of a step of 1 s."""
    clock = Clock()
    use_clock(monkeypatch, clock)
    drafter.use(clock, seconds, reading)
    cost = Cost(CostCurve.linear(1.0, 0.1))
    auto = Auto(AutoParams(), [Source("source", drafter)], cost)
    steps = []
    for now in range(n_steps):
        if now % (steps_of_a_text or n_steps) == 0:
            run(auto.begin([1] * 100))
            tokens = [1] * 100
        if auto.strength(tokens):
            before = drafter.n_asked
            tokens += take_step(auto, tokens, clock, right=right)
            steps += [now] * (drafter.n_asked - before)
        else:
            auto.observe_plain(PlainSteps([2], [1.0]))
            tokens.append(2)
            clock.now += 1.0
    return steps


@pytest.mark.parametrize("seconds", [0.005, 0.1, 2.0])
def test_trying_a_source_that_never_pays_takes_half_a_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    steps = asked(monkeypatch, OneToken(7, 0.0), 8000, seconds=seconds)
    later = [step for step in steps if step >= 4000]
    assert steps[0] == 0
    assert len(later) * seconds <= 0.006 * 4000
    if seconds < 2.0:
        assert later  # it is still tried now and then


def test_a_source_that_pays_is_asked_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = asked(monkeypatch, OneToken(7, 0.9), 200, seconds=0.1, right=True)
    assert steps == list(range(200))


def test_a_text_is_read_only_when_the_gain_missed_would_have_paid_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = OneToken(7, 0.9)
    steps = asked(
        monkeypatch, drafter, 100, seconds=0.1, reading=0.1, steps_of_a_text=50, right=True
    )
    # The first text shows that reading 100 tokens takes 10 s, and an ask gains 0.7 or more.
    assert steps[:50] == list(range(50))
    assert 10 < steps[50] - 50 < 20
    assert steps[51:] == list(range(steps[50] + 1, 100))


def test_a_source_starts_from_what_it_learnt_in_an_earlier_run() -> None:
    assert Gains((0.1, 0.2)).state() == [0.0, 0.1, 0.2, 0.0, 0.0]
    saved = [0.0, 0.5, -0.2, 0.3, 0.1]
    assert Gains((0.1, 0.2), list(saved)).state() == saved
    for other in (None, [1.0], {"gains": 1}, "x"):
        assert Gains((0.1, 0.2), other).state() == [0.0, 0.1, 0.2, 0.0, 0.0]


def test_every_strength_of_suffix_has_a_gain_and_branches_need_cheap_rows() -> None:
    assert spec.as_source is not None
    assert len(spec.as_source.gains) == 7
    for row, branches in ((0.01, 4), (0.3, 1)):
        resources = Resources(lambda row=row: Cost(CostCurve.linear(1.0, row)))  # type: ignore[misc]
        assert spec.as_source.params(resources) == SuffixParams(branches=branches)


def test_an_ask_gains_what_is_accepted_less_its_rows() -> None:
    for accepted, learnt in ((range(64), 2.49), (range(2), -0.61)):
        source = Source("source", OneToken(7, 0.5))
        source.asked_with, source.nodes = 1, range(1, 64)
        source.learn(accepted, row=0.3, rest=0.0, now=1, plain=1.0, n_texts=1)
        assert source.gains.state()[1] == pytest.approx(learnt)


def test_a_text_is_read_for_the_strength_that_gains_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drafter = Clock(), OneToken(7, 0.9)
    use_clock(monkeypatch, clock)
    drafter.use(clock, 0.0, reading=0.1)
    source = Source("source", drafter, Gains((1.0, -1.0)))
    for _ in range(2):  # the first text shows what reading costs
        run(source.begin([1] * 100, row=0.1, plain=1.0))
    settings = {"now": 1, "plain": 1.0, "left": 0.5, "drafted": 1.0}
    beside = [source.strength([1] * 100, **settings) for _ in range(30)]  # type: ignore[arg-type]
    assert beside.index(1) in (19, 20)  # reading takes 10 steps, and an ask gains half a step


def test_one_text_of_a_step_tries_what_is_not_expected_to_gain() -> None:
    gains, tree = Gains((-0.5,)), TokenTree(1)
    one, other = (Source("source", OneToken(7, 0.9), gains) for _ in range(2))
    for source in (one, other):
        run(source.begin([1], row=1.0, plain=1.0))
    assert [source.strength([1], 1, 1.0) for source in (one, other)] == [1, 1]
    run(one.draft([1], tree, DraftBudget(), strength=1, left=1.0, now=1))
    assert other.strength([1], 1, 1.0) == 0
    one.learn([], row=0.3, rest=0.0, now=2, plain=1.0, n_texts=2)
    assert 2 + 0.5 / 0.01 <= gains.explore_at < 2 + 0.6 / 0.01


def test_short_texts_do_not_decide_what_reading_a_token_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    use_clock(monkeypatch, clock)
    source = Source("source", OneToken(7, 0.9))
    monkeypatch.setattr(
        source.drafter, "begin", lambda prompt: setattr(clock, "now", clock.now + 0.1)
    )
    for n_tokens in (10, 10, 10, 1000):
        run(source.begin([1] * n_tokens, row=10.0, plain=1.0))
    assert 0.004 < source.gains.state()[-1] < 0.006  # 0.01 after the short ones
