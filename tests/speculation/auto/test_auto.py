"""auto without a model: which candidates it decodes for a given cost, and when sources draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from batching.tree import TokenTree
from speculation.auto.cost_curve import CostCurve, CostModel
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.selection import max_useful_rows, select
from speculation.auto.source import Source
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.drafters.prompt_lookup import PromptLookup, PromptLookupParams
from speculation.drafting.estimates import Estimates

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


def test_free_rows_fill_the_batch() -> None:
    tree = random_tree(random.Random(1), 63)
    assert select(tree, DraftBudget(), FLAT) == list(range(1, 64))
    assert len(select(tree, DraftBudget(max_nodes=10), FLAT)) == 10


def test_no_node_is_selected_beyond_the_end_of_the_text() -> None:
    wide, chain = random_tree(random.Random(1), 63), TokenTree(0)
    chain.add_chain(0, range(1, 20))
    short = DraftBudget(max_depth=2)
    assert select(wide, short, FLAT) == [n for n in range(1, 64) if wide.depths[n] <= 2]
    assert select(chain, short, FLAT) == [1, 2]


def test_rows_as_expensive_as_a_step_are_spent_only_on_certain_drafts() -> None:
    tree = TokenTree(0)
    node = tree.add(0, 1, prob=1.0)
    node = tree.add(node, 2, prob=1.0)
    tree.add(node, 3, prob=0.9)
    tree.add(0, 4, prob=0.5)
    assert select(tree, DraftBudget(), LINEAR) == []
    nearly = [0.0] + [1.0 + 0.95 * n for n in range(64)]
    assert select(tree, DraftBudget(), nearly) == [1, 2]


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


def test_a_change_of_batch_size_must_pay_for_itself() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, prob=0.6)
    cost = [0.0, 1.0, 1.5]
    assert select(tree, DraftBudget(), cost) == [1]
    assert select(tree, DraftBudget(), cost, last_rows=1, switch_seconds=0.2) == []
    assert select(tree, DraftBudget(), cost, last_rows=2, switch_seconds=0.2) == [1]


def test_a_fixed_overhead_per_step_makes_longer_drafts_worthwhile() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, prob=0.4)
    cost = [0.0, 1.0, 1.5]
    assert select(tree, DraftBudget(), cost) == []
    assert select(tree, DraftBudget(), cost, overhead_seconds=1.0) == [1]


def test_drafts_must_beat_plain_decoding_by_the_margin() -> None:
    tree = TokenTree(0)
    tree.add(0, 1, prob=0.6)  # 1.6 tokens for the time of 1.4 steps: 14% more a second
    assert select(tree, DraftBudget(), [0.0, 1.0, 1.4]) == [1]
    assert select(tree, DraftBudget(), [0.0, 1.0, 1.4], margin=0.13) == [1]
    assert select(tree, DraftBudget(), [0.0, 1.0, 1.4], margin=0.15) == []


def test_a_cost_curve_is_linear_between_its_sizes_and_never_falls() -> None:
    curve = CostCurve((1, 2, 4), (1.0, 2.0, 1.5))
    assert [curve.at(n) for n in (1, 2, 3, 4)] == [
        1.0,
        1.5,
        1.5,
        1.5,
    ]  # 2.0 was a disturbed measurement
    curve = CostCurve((1, 3), (1.0, 2.0))
    assert [curve.at(n) for n in (1, 2, 3, 4, 5, 100)] == pytest.approx([1, 1.5, 2, 2.5, 3, 50.5])
    assert curve.row_share == pytest.approx(0.5)


def test_the_most_useful_rows_depend_on_what_a_row_costs() -> None:
    flat, steep, between = (CostCurve((1, 64), (1.0, c)).table for c in (1.0, 64.0, 22.0))
    assert max_useful_rows(flat) == 63  # 98% of 64 tokens a step
    assert max_useful_rows(steep) == 1
    assert max_useful_rows(steep, overhead_seconds=0.5) == 18  # 18 / 18.5 of 64 / 64.5
    assert max_useful_rows(between) == 39  # 39 / 13.67 of 64 / 22


def test_a_cost_curve_follows_the_measured_steps() -> None:
    curve = CostCurve((1, 2, 4, 8), (1.0, 1.5, 2.0, 3.0))
    for _ in range(320):
        curve.follow(4, 4.0)
    assert curve.at(4) == pytest.approx(4.0, rel=0.05)
    assert curve.at(8) >= curve.at(4) >= curve.at(2) > 1.5


def test_the_shape_of_a_curve_follows_only_many_steps() -> None:
    curve = CostCurve((1, 8), (1.0, 2.0))
    shapes: list[float] = []
    for n_steps in (16, 640, 16):
        for _ in range(n_steps // 2):
            curve.follow(1, 1.0)
            curve.follow(8, 3.0 if n_steps == 640 else 2.0 if not shapes else 6.0)
        shapes.append(curve.at(8) / curve.at(1))
    assert shapes[0] == pytest.approx(2.0)
    assert shapes[1] == pytest.approx(3.0, rel=0.1)
    assert shapes[2] < 3.4  # a few steps no longer count for much


def test_each_region_of_the_context_has_its_own_curve() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0))})
    for _ in range(640):
        cost.follow([(1, 3000, 2.0)])
    assert cost.curve(3000).at(1) == pytest.approx(2.0, rel=0.05)
    assert cost.curve(100).at(1) == 1.0


def test_short_replies_do_not_make_single_rows_look_expensive() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0), 0.5)})
    for _ in range(500):  # replies
        cost.begin()
        for seconds in (30.0, 3.0, 2.0, 1.3):
            cost.follow([(1, 100, seconds)])
    assert (cost.curve(100).at(1), cost.curve(100).switch_seconds) == (1.0, 0.5)


def test_the_cost_between_measured_regions_grows_with_n_past() -> None:
    cost = CostModel({0: CostCurve((1, 8), (1.0, 2.0)), 1024: CostCurve((1, 8), (2.0, 5.0))})
    # Regions are centred at n_past 128, 384, 768, 1536, 3072; 768 is 640 of the 1408 tokens on.
    assert cost.curve(600).at(8) == pytest.approx(2 + 3 * 640 / 1408)
    assert cost.curve(3000).at(1) == pytest.approx(1 + 2944 / 1408)


def test_estimates_learn_from_accepted_and_rejected_drafts() -> None:
    estimates = Estimates((0.5, 0.7))
    assert estimates.chain_probs(range(10), 1.0, 0.2) == pytest.approx([0.5, 0.7, 0.7])
    for _ in range(200):
        estimates.learn(1, accepted=False)
    assert estimates.of(1) < 0.2
    assert estimates.of(0) < 0.5  # evidence is shared between kinds


def auto_on(row_share: float) -> Auto:
    curve = CostCurve((1, 64), (1.0, 1 + 63 * row_share))
    lookup = Source("prompt-lookup", PromptLookup(PromptLookupParams(branches=2)))
    return Auto(AutoParams(), [lookup], CostModel({0: curve}))


def test_auto_drafts_a_repetition_and_records_its_source() -> None:
    auto = auto_on(0.01)
    text = [5, 6, 7, 8, 9] * 4
    auto.begin(text)
    tree = TokenTree(text[-1])
    auto.draft(text, tree, DraftBudget())
    assert tree.tokens[1:6] == [5, 6, 7, 8, 9]
    assert set(tree.sources.values()) == {"prompt-lookup"}


class Never(Drafter):
    """Drafts nothing."""

    def __init__(self) -> None:
        self.began = 0

    def begin(self, prompt: object) -> None:
        self.began += 1

    def draft(self, tokens: object, tree: object, budget: object) -> None:
        pass

    def observe(self, step: object) -> None:
        pass


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    for module in ("drafter", "source"):
        monkeypatch.setattr(f"speculation.auto.{module}.perf_counter", clock)


def take_step(auto: Auto, path: Sequence[int] = (0,)) -> int:
    """Let auto draft and observe a step of one second. Returns how many rows it had."""
    tree = TokenTree(1)
    auto.draft([1], tree, DraftBudget())
    auto.observe(Step(tree, None, list(path), 9, 1.0))  # type: ignore[arg-type]
    return len(tree)


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


def test_every_batch_size_counts_as_a_change_after_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_clock(monkeypatch, lambda: 0.0)
    drafter = OneToken(7, 0.3)
    cost = CostModel({0: CostCurve((1, 64), (1.0, 1.63), 0.5)})
    auto = Auto(AutoParams(), [Source("one-token", drafter)], cost)
    n_rows = []
    for _ in range(2):
        auto.begin([1])
        for prob in (0.3, 0.0, 0.3, 0.3):
            drafter.prob = prob
            n_rows.append(take_step(auto))
    # A draft is worth 0.3 of a step, and a change from a single row costs half a step.
    assert n_rows == [2, 1, 1, 1] * 2


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


class OneToken(Drafter):
    """Drafts one token with a given probability."""

    def __init__(self, token: int, prob: float) -> None:
        self.token, self.prob = token, prob
        self.asked = 0

    def begin(self, prompt: object) -> None:
        pass

    def draft(self, tokens: object, tree: TokenTree, budget: DraftBudget) -> None:
        self.asked += 1
        if self.prob:
            tree.add(0, self.token, prob=self.prob)

    def observe(self, step: object) -> None:
        pass


def two_sources(
    monkeypatch: pytest.MonkeyPatch, cheap: OneToken, expensive: OneToken, seconds: float
) -> tuple[Auto, list[Source]]:
    """auto with a source that takes no time and one that takes ``seconds``; a step takes 1 s."""
    clock = [0.0]

    class Timed(OneToken):
        def draft(self, tokens: object, tree: TokenTree, budget: DraftBudget) -> None:
            expensive.draft(tokens, tree, DraftBudget())
            clock[0] += seconds

    set_clock(monkeypatch, lambda: clock[0])
    sources = [Source("cheap", cheap), Source("expensive", Timed(0, 0.0))]
    auto = Auto(AutoParams(), sources, CostModel({0: CostCurve((1, 64), (1.0, 7.3))}))
    auto.begin([1])
    return auto, sources


def run_step(auto: Auto, came: int) -> TokenTree:
    """A step after which token ``came`` follows."""
    tree = TokenTree(1)
    auto.draft([1], tree, DraftBudget())
    found = tree.children(0, came)
    path, bonus = ([0, found[0]], 9) if found else ([0], came)
    auto.observe(Step(tree, None, path, bonus, 1.0))  # type: ignore[arg-type]
    return tree


def test_an_expensive_source_drafts_only_if_the_others_leave_enough_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cheap, expensive = OneToken(5, 0.0), OneToken(6, 0.8)
    auto, _ = two_sources(monkeypatch, cheap, expensive, 0.3)
    for _ in range(40):  # alone it is accepted and saves 0.9 of a step in 0.3
        run_step(auto, came=6)
    assert expensive.asked == 40
    cheap.prob = 0.9
    for _ in range(20):
        run_step(auto, came=5)
    assert expensive.asked == 40
    cheap.prob = 0.3
    run_step(auto, came=6)
    assert expensive.asked == 41


def test_two_sources_share_the_probability_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, _ = two_sources(monkeypatch, OneToken(5, 0.6), OneToken(6, 0.5), 0.0)
    tree = run_step(auto, came=5)
    assert tree.tokens[1:] == [5, 6]
    assert tree.probs[1:] == pytest.approx([0.6, 0.2])


def test_an_overconfident_source_is_calibrated_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    auto, sources = two_sources(monkeypatch, OneToken(5, 0.0), OneToken(6, 0.7), 0.0)
    first = run_step(auto, came=7)
    for _ in range(50):
        run_step(auto, came=7)
    assert first.probs[1] == pytest.approx(0.7)
    assert sources[1].calibrated(0.7) < 0.4  # below that it is not worth its row
    assert sources[0].calibrated(0.7) == pytest.approx(0.7)


class Windowed(Never):
    explored_rows = 3
    explored_branches = 1

    def explore(self, tree: TokenTree, budget: DraftBudget) -> None:
        tree.add_nodes([0, 1, 2], [1, 2, 3], [7, 7, 7], [False, False, True], draft=False)


def test_a_lookahead_window_is_decoded_only_while_it_pays() -> None:
    drafter = Windowed()
    source = Source("lookahead", drafter)
    auto = Auto(AutoParams(), [source], CostModel({0: CostCurve((1, 64), (1.0, 7.3))}))
    auto.begin([1])
    rows = [take_step(auto) for _ in range(20)]
    assert rows[0] == 4
    assert rows[-1] == 1  # nothing was accepted, and every window cost a third of a step


def test_branches_beyond_the_number_of_sequences_are_left_out() -> None:
    tree = TokenTree(0)
    for token in range(1, 9):
        tree.add(0, token, prob=0.125 - token / 1000)
    assert select(tree, DraftBudget(max_leaves=3), FLAT) == [1, 2, 3]
