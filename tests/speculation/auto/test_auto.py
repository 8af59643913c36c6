"""auto without a model: its sources, what trying one may cost, and the drafts that pay for rows."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from batching.together import run
from batching.tree import TokenTree
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.fusion import fuse
from speculation.auto.selection import select as select_of_trees
from speculation.auto.source import Asks, Source
from speculation.average import Average
from speculation.drafter import DraftBudget, PlainSteps
from speculation.drafting.cost import Cost, CostCurve, Prices
from speculation.drafting.resources import Resources, Seat
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.methods import parse_method
from speculation.methods.suffix import SuffixParams, spec
from tests.support.fake_sources import Clock, OneToken, draft, take_step, use_clock
from tests.support.fake_target import FakeTarget


def auto_of(*drafters: OneToken, row: float = 0.1, switch: float = 0.0) -> Auto:
    sources = [Source(f"{i}", drafter) for i, drafter in enumerate(drafters)]
    return Auto(AutoParams(), sources, Cost(CostCurve.linear(1.0, row, switch)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    use_clock(monkeypatch, clock)
    return clock


def test_drafts_pay_for_leaving_plain_steps_and_the_way_back(clock: Clock) -> None:
    drafter = OneToken(7, 0.3)
    auto = auto_of(drafter, row=0.01, switch=0.1)
    n_rows = []
    auto.begin([1])
    for prob in (0.15, 0.3, 0.15, 0.0, 0.15):
        drafter.prob = prob
        n_rows.append(len(draft(auto, [1])))
        auto.cost.follow(n_rows[-1], 0, 1.0)
    # To leave and come back costs 0.2 of a step; in between, a draft costs its row.
    assert n_rows == [1, 2, 2, 1, 1]


def test_an_expensive_source_is_asked_only_if_the_others_leave_enough_to_gain(clock: Clock) -> None:
    cheap, expensive = OneToken(5, 0.0), OneToken(6, 0.8)
    expensive.use(clock, 0.3)
    auto = auto_of(cheap, expensive)
    auto.begin([1])
    for _ in range(40):  # alone it is accepted and saves 0.9 of a step in 0.3
        take_step(auto, [1], clock, right=True)
    assert expensive.n_asked == 40
    cheap.prob = 0.9
    for _ in range(10):
        take_step(auto, [1], clock, right=True)
    assert expensive.n_asked == 40


@pytest.mark.parametrize(("method", "helps"), [("auto", True), ("auto:memory=off", False)])
def test_this_text_and_the_memory_are_drafted_from(method: str, helps: bool) -> None:
    known, memory = [*range(10, 30)], SuffixMemory()
    memory.remember(known)
    resources = Resources(lambda: Cost(CostCurve.linear(1.0, 0.01)), memory=memory)
    (auto,) = parse_method(method).drafters(resources)
    assert isinstance(auto, Auto)
    text = [1, *known[:9]]
    auto.begin(text)
    assert (len(draft(auto, text)) > 1) is helps
    auto.end([*range(40, 60)])
    assert (len(memory.index.tokens) > len(known) + 1) is helps
    auto.begin(text := [65, 66, 67, 68, 69] * 4)
    tree = draft(auto, text)
    assert tree.tokens[1:6] == [65, 66, 67, 68, 69]
    assert set(tree.sources.values()) == {"suffix"}


def tree_of(**probs: float) -> TokenTree:
    """A tree of siblings; ``a`` stands for token 1, ``b`` for 2."""
    tree = TokenTree(0)
    for name, prob in probs.items():
        tree.add(0, "_ab".index(name), prob=prob)
    return tree


def test_sources_that_agree_make_a_draft_likelier_and_others_keep_theirs() -> None:
    agreed = tree_of(a=0.6)
    assert fuse(agreed, tree_of(a=0.7)) == [1]
    assert agreed.probs[1] == pytest.approx(0.42 / (0.42 + 0.4 * 0.3))
    disputed = tree_of(a=0.6)
    assert fuse(disputed, tree_of(b=0.9)) == [2]
    assert disputed.tokens == [0, 1, 2]
    # 0.6 · 0.1 · 0.3 against 0.4 · 0.3 · 0.9, and 0.4 · 0.1 that both are wrong
    assert disputed.probs[1:] == pytest.approx([0.018 / 0.166, 0.108 / 0.166])
    tree, other = tree_of(a=0.6), tree_of(a=0.7)
    below = other.add(1, 2, prob=0.4)
    assert fuse(tree, other) == [1, 2]
    assert tree.parents == [-1, 0, 1]
    assert tree.probs[below] == 0.4


def asked(
    clock: Clock, prob: float, n_steps: int, seconds: float, *, right: bool = True,
    reading: float = 0.0, known: list[float] | None = None,
) -> list[int]:  # fmt: skip
    """The steps in which a source is asked that takes ``seconds`` of a step of 1 s.

    ``known`` is what was learnt of it before.
    """
    drafter = OneToken(7, prob)
    drafter.use(clock, seconds, reading)
    cost = Cost(CostCurve.linear(1.0, 0.1))
    auto = Auto(AutoParams(), [Source("source", drafter, Asks(known))], cost)
    steps, tokens = [], [1] * 100
    auto.begin([*tokens])
    for now in range(n_steps):
        if auto.promise(tokens):
            before = drafter.n_asked
            tokens += take_step(auto, tokens, clock, right=right)
            steps += [now] * (drafter.n_asked - before)
        else:
            auto.observe_plain(PlainSteps([2], [1.0]))
            tokens.append(2)
            clock.now += 1.0
    return steps


@pytest.mark.parametrize("seconds", [0.005, 0.1, 2.0])
def test_trying_what_never_pays_takes_half_a_percent(clock: Clock, seconds: float) -> None:
    steps = asked(clock, 0.0, 16_000, seconds, right=False)
    later = [step for step in steps if step >= 8000]
    assert steps[0] == 0
    assert len(later) * seconds <= 0.006 * 8000
    assert later  # it is still tried now and then


@pytest.mark.parametrize(("worth", "first"), [(0.0, 33), (30.0, 1)])
def test_a_text_is_read_once_that_will_pay(clock: Clock, worth: float, first: int) -> None:
    assert asked(clock, 0.9, 200, 0.1) == list(range(200))  # what pays without reading
    steps = asked(clock, 0.9, 50, 0.1, reading=0.1, known=[1.0, 0.2, 0.1, worth])
    # To read 99 tokens takes 9.9 s, each more 0.1 s. An ask gains 0.8 s, and brings two tokens.
    assert steps == list(range(first, 50))


def test_a_try_takes_no_more_than_the_drafts_of_its_text_have_saved(clock: Clock) -> None:
    copies, slow = OneToken(5, 0.4), OneToken(6, 0.9)
    slow.use(clock, 2.0, reading=0.1)
    asks = Asks([1.0, 2.0, 0.1, 0.0])
    asks.credit = 9.0
    sources = [Source("copies", copies), Source("slow", slow, asks)]
    auto, tokens = Auto(AutoParams(), sources, Cost(CostCurve.linear(1.0, 0.1))), [1] * 31
    auto.begin(tokens)
    n_steps = 0
    while not slow.n_asked:  # a right draft saves 0.9 s; a try takes 2 s, and 3 s to read
        take_step(auto, tokens, clock, right=True)
        n_steps += 1
    assert n_steps == 7
    assert asks.credit == pytest.approx(9.0 - 5.0, abs=0.1)
    auto.begin(tokens)  # a text that has saved nothing yet
    asks.credit = 9.0
    take_step(auto, tokens, clock, right=True)
    assert slow.n_asked == 1


@pytest.mark.parametrize(("share", "is_asked"), [(0.1, True), (0.4, False)])
def test_a_draft_model_is_asked_if_its_size_promises(share: float, is_asked: bool) -> None:
    draft_model: Any = FakeTarget()
    cost = Cost(CostCurve.linear(1.0, 0.25))
    resources = Resources(lambda: cost, seat=Seat(draft_model), draft_share=share)
    (auto,) = parse_method("auto:sources=draft").drafters(resources)
    auto.begin(text := [1, 2, 3, 4])
    assert auto.promise(text) == 0.0  # the prompt is not read before the first token
    assert bool(auto.promise([*text, 5])) is is_asked
    assert draft_model.decoded == []


@pytest.mark.parametrize(("promise", "is_asked"), [(0.0, False), (0.1, False), (0.3, True)])
def test_a_source_that_tells_what_its_draft_promises_is_asked_if_that_pays(
    monkeypatch: pytest.MonkeyPatch, promise: float, is_asked: bool
) -> None:
    drafter = OneToken(7, promise)
    monkeypatch.setattr(drafter, "promise", lambda tokens: promise)
    auto = auto_of(drafter, row=0.2)
    auto.begin([1])
    four = auto.cost.prices(0, n_texts=4)  # share the step, so that a row costs half a token
    assert auto.promise([1], four) == 0.0
    assert auto.promise([1]) == is_asked  # a row costs 0.2 of a step
    assert (len(draft(auto, [1])) > 1) == is_asked


def test_drafts_pay_if_they_save_what_their_rows_cost() -> None:
    def pays_from(prices: Prices) -> float:
        return next(p / 100 for p in range(301) if p == 300 or prices.pay(p / 100))

    cost = Cost(CostCurve.linear(1.0, 0.2))
    # A chain of p, p², p³, … must save 0.2 of a step a row.
    assert pays_from(cost.prices(0)) == pytest.approx(0.2, abs=0.011)
    # 0.52 + 0.27 + 0.14 against 0.6 and 0.3 more.
    cost.overhead = Average(0.05, 0.3)
    assert pays_from(cost.prices(0)) == pytest.approx(0.51, abs=0.011)
    # For one of four texts, a token saves a fourth of the batch.
    cost.overhead = Average(0.05, 0.0)
    assert pays_from(cost.prices(0, n_texts=4)) == pytest.approx(0.5, abs=0.011)
    assert pays_from(Cost(CostCurve.linear(1.0, 2.0)).prices(0)) > 1.0


def test_branches_are_drafted_where_rows_are_cheap() -> None:
    assert spec.as_source is not None
    for row, branches in ((0.01, 4), (0.3, 1)):
        resources = Resources(lambda row=row: Cost(CostCurve.linear(1.0, row)))  # type: ignore[misc]
        assert spec.as_source.params(resources) == SuffixParams(branches=branches)


def test_an_ask_gains_what_is_accepted_less_its_rows_and_time() -> None:
    for accepted, gain in ((range(64), 1.0 + 0.05 * 62 - 20.0), (range(2), 1.0 - 20.0)):
        source = Source("source", OneToken(7, 0.5))
        source.nodes, source.seconds = range(1, 64), 1.0
        source.learn(accepted, row=0.3, rest=0.1)
        assert source.asks.gain(1.0) == pytest.approx(gain)
    # Beside drafts of which one is expected to be accepted, and half of the time none is.
    asks = Asks([3.0, 0.5, 0.0, 0.0])
    assert asks.gain(1.0, left=0.5, drafted=1.0) == 1.5
    assert asks.gain(1.0, left=0.1, drafted=2.9) == pytest.approx(-0.2)


def test_one_text_of_a_step_tries_what_is_not_expected_to_gain() -> None:
    asks, prices = Asks([0.1, 0.5, 0.0, 0.0]), Cost(CostCurve.linear(1.0, 0.1)).prices(0)
    one, other = (Source("source", OneToken(7, 0.9), asks) for _ in range(2))
    asks.credit = 0.9
    for source in (one, other):
        source.begin([1])
        assert not source.is_worth_asking([1], prices, spare=0.4)
        assert source.is_worth_asking([1], prices, spare=0.5)
    run(one.draft([1], TokenTree(1), DraftBudget()))
    assert not other.is_worth_asking([1], prices, spare=9.0)
    # Another number of rows must pay, too: 0.6 s there and back.
    prices = Cost(CostCurve.linear(1.0, 0.1, switch=0.3)).prices(0)
    source = Source("source", OneToken(7, 0.9), Asks([1.0, 0.5, 0.0, 0.0]))
    source.begin([1])
    assert not source.is_worth_asking([1], prices, spare=0.0)
    assert source.is_worth_asking([1], prices, 0.0, left=1.0, drafted=0.4)


def test_a_source_starts_from_what_it_learnt_and_measures_what_reading_takes() -> None:
    assert Asks([0.5, 0.2, 0.1, 3.0], seconds=9.0).state() == [0.5, 0.2, 0.1, 3.0]
    for other in (None, [1.0], {"asks": 1}, "x"):
        assert Asks(other, seconds=0.3, reading=0.1).state() == [1.0, 0.3, 0.1, 0.0]
    asks = Asks(seconds=0.01, reading=0.5)
    readings = []
    for n_tokens, seconds in ((100, 0.11), (300, 0.61), (1000, 0.51), (1000, 3.01)):
        asks.learn(1, seconds, n_tokens)
        readings.append(round(asks.reading, 5))
    assert readings == [0.001, 0.00175, 0.0005, 0.003]
    assert asks.seconds == 0.01
    asks.learn(1, 0.05, 10)  # of a few tokens, the rest is the ask's
    assert asks.seconds == pytest.approx(0.01 + 0.05 * 0.01)


def select(tree: TokenTree, budget: DraftBudget, cost: list[float], **settings: Any) -> list[int]:
    (chosen,) = select_of_trees([tree], [budget], cost, **settings)
    return chosen


FLAT = [0.0] + [1.0] * 64
LINEAR = [float(n) for n in range(65)]


def random_tree(rng: random.Random, n: int) -> TokenTree:
    tree = TokenTree(0)
    for token in range(1, n + 1):
        tree.add(rng.randrange(len(tree)), token, prob=rng.random())
    return tree


def expected_rate(tree: TokenTree, nodes: tuple[int, ...], cost: list[float]) -> float:
    probs = tree.path_probs()
    return (1.0 + sum(probs[node] for node in nodes)) / cost[len(nodes) + 1]


@pytest.mark.parametrize("seed", range(40))
def test_selection_finds_the_same_tree_as_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 8)
    cost = [0.0, 1.0]
    for _ in range(8):
        cost.append(cost[-1] + rng.choice((0.0, 0.05, 0.3, 1.0)) * rng.random())
    nodes = range(1, len(tree))
    rooted = [
        some
        for n in range(len(tree))
        for some in combinations(nodes, n)
        if all(tree.parents[node] in (0, *some) for node in some)
    ]
    best = max(expected_rate(tree, some, cost) for some in rooted)
    chosen = select(tree, DraftBudget(), cost)
    assert all(tree.parents[node] in (0, *chosen) for node in chosen)
    assert expected_rate(tree, tuple(chosen), cost) == pytest.approx(best, abs=1e-12)


def test_free_rows_fill_the_batch_but_no_limit_of_the_budget_is_exceeded() -> None:
    wide, chain, flat = random_tree(random.Random(1), 63), TokenTree(0), TokenTree(0)
    chain.add_chain(0, range(1, 20))
    for token in range(1, 9):
        flat.add(0, token, prob=0.125 - token / 1000)
    short = DraftBudget(max_depth=2)  # the end of the text
    assert select(wide, DraftBudget(), FLAT) == list(range(1, 64))
    assert len(select(wide, DraftBudget(max_nodes=10), FLAT)) == 10
    assert select(wide, short, FLAT) == [n for n in range(1, 64) if wide.depths[n] <= 2]
    assert select(chain, short, FLAT) == [1, 2]
    assert select(flat, DraftBudget(max_leaves=3), FLAT) == [1, 2, 3]


def test_rows_and_changes_of_size_must_pay() -> None:
    tree = TokenTree(0)
    node = tree.add(0, 1, prob=1.0)
    node = tree.add(node, 2, prob=1.0)
    tree.add(node, 3, prob=0.9)
    tree.add(0, 4, prob=0.5)
    assert select(tree, DraftBudget(), LINEAR) == []
    nearly = [0.0] + [1.0 + 0.95 * n for n in range(64)]
    assert select(tree, DraftBudget(), nearly) == [1, 2]
    tree, unlikely, cost = tree_of(a=0.6), tree_of(a=0.4), [0.0, 1.0, 1.5]
    assert select(tree, DraftBudget(), cost) == [1]
    assert select(tree, DraftBudget(), cost, last_rows=1, change_seconds=0.2) == []
    assert select(tree, DraftBudget(), cost, last_rows=2, change_seconds=0.2) == [1]
    assert select(unlikely, DraftBudget(), cost) == []
    assert select(unlikely, DraftBudget(), cost, overhead_seconds=1.0) == [1]


def test_a_chain_budget_keeps_the_likeliest_path_or_the_first_of_sampled_drafts() -> None:
    tree = TokenTree(1)
    first = tree.add(0, 2, prob=0.3)
    second = tree.add(0, 3, prob=0.5)
    tree.add(first, 4, prob=0.9)
    below = tree.add(second, 5, prob=0.9)
    tree.add(second, 6, prob=0.1)
    assert tree.likeliest_path() == [second, below]  # 0.5 + 0.45 against 0.3 + 0.27
    assert select(tree, DraftBudget(chain_only=True), [0.0, *[1.0] * 10]) == [second, below]
    # Choosing sampled drafts by their probability would bias the sample.
    tree.draft_probs = {node: np.full(8, 0.125, np.float32) for node in range(1, 6)}
    assert tree.likeliest_path() == [first, first + 2]


@pytest.mark.parametrize("seed", range(20))
def test_among_several_trees_the_likeliest_nodes_of_all_are_chosen(seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, 4) for _ in range(3)]
    cost = [0.0, 1.0]
    for _ in range(15):
        cost.append(cost[-1] + rng.choice((0.0, 0.05, 0.3)) * rng.random())
    chosen = select_of_trees(trees, [DraftBudget()] * 3, cost, n_texts=3, plain_rows=3)
    for tree, nodes in zip(trees, chosen, strict=True):
        assert all(tree.parents[node] in (0, *nodes) for node in nodes)
    probs = sorted((prob for tree in trees for prob in tree.path_probs()[1:]), reverse=True)
    rates = [(3 + sum(probs[:n])) / cost[3 + n] for n in range(len(probs) + 1)]
    n = sum(map(len, chosen))
    kept = sum(
        tree.path_probs()[node] for tree, nodes in zip(trees, chosen, strict=True) for node in nodes
    )
    assert (3 + kept) / cost[3 + n] == pytest.approx(max(rates), abs=1e-12)
