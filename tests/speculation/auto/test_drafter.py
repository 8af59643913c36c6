"""auto without a model: what it drafts from its sources, given what rows and sources cost."""

from __future__ import annotations

import pytest

from batching.together import run
from batching.tree import TokenTree
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.fusion import fuse
from speculation.auto.source import Gains, Source
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.methods import parse_method
from speculation.methods.suffix import Suffix, SuffixParams
from tests.support.fake_sources import Clock, OneToken, draft, take_step, use_clock


def auto_of(*drafters: OneToken, row: float = 0.1, switch: float = 0.0) -> Auto:
    sources = [Source(f"{i}", drafter) for i, drafter in enumerate(drafters)]
    return Auto(AutoParams(), sources, Cost(CostCurve.linear(1.0, row, switch)))


def test_auto_drafts_a_repetition_and_records_its_source() -> None:
    source = Source("suffix", Suffix(SuffixParams(), SuffixMemory()), Gains((0.1, 0.3, 1.0, 2.0)))
    auto = Auto(AutoParams(), [source], Cost(CostCurve.linear(1.0, 0.01)))
    text = [5, 6, 7, 8, 9] * 4
    run(auto.begin(text))
    tree = draft(auto, text)
    assert tree.tokens[1:6] == [5, 6, 7, 8, 9]
    assert set(tree.sources.values()) == {"suffix"}


def test_every_batch_size_counts_as_a_change_after_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_clock(monkeypatch, Clock())
    drafter = OneToken(7, 0.3)
    auto = auto_of(drafter, row=0.01, switch=0.5)
    n_rows = []
    for _ in range(2):
        run(auto.begin([1]))
        for prob in (0.3, 0.3, 0.0, 0.3):
            drafter.prob = prob
            n_rows.append(len(draft(auto, [1])))
            auto.cost.follow(n_rows[-1] if len(n_rows) % 4 != 1 else 40, 0, 1.0)  # with a prompt
    # A draft is worth 0.3 of a step, and a change from a single row costs half a step.
    assert n_rows == [2, 2, 1, 1] * 2


def test_an_expensive_source_is_asked_only_if_the_others_leave_enough_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    use_clock(monkeypatch, clock)
    cheap, expensive = OneToken(5, 0.0), OneToken(6, 0.8)
    expensive.use(clock, 0.3)
    auto = auto_of(cheap, expensive)
    run(auto.begin([1]))
    for _ in range(40):  # alone it is accepted and saves 0.9 of a step in 0.3
        take_step(auto, [1], clock, right=True)
    assert expensive.n_asked == 40
    cheap.prob = 0.9
    for _ in range(10):
        take_step(auto, [1], clock, right=True)
    assert expensive.n_asked == 40


@pytest.mark.parametrize(("method", "helps"), [("auto", True), ("auto:memory=off", False)])
def test_without_the_memory_earlier_texts_neither_help_nor_take_in_this_one(
    method: str, helps: bool
) -> None:
    known, memory = [*range(10, 30)], SuffixMemory()
    memory.remember(known)
    resources = Resources(lambda: Cost(CostCurve.linear(1.0, 0.01)), memory=memory)
    (auto,) = parse_method(method).drafters(resources)
    assert isinstance(auto, Auto)
    text = [1, *known[:9]]
    run(auto.begin(text))
    assert (len(draft(auto, text)) > 1) is helps
    auto.end([*range(40, 60)])
    assert (memory.index.n_tokens > len(known) + 1) is helps


def tree_of(**probs: float) -> TokenTree:
    """A tree of siblings; ``a`` stands for token 1, ``b`` for 2."""
    tree = TokenTree(0)
    for name, prob in probs.items():
        tree.add(0, "_ab".index(name), prob=prob)
    return tree


def test_sources_that_agree_make_a_draft_likelier_and_the_surer_one_wins() -> None:
    agreed = tree_of(a=0.6)
    assert fuse(agreed, tree_of(a=0.7)) == [1]
    assert agreed.probs[1] == pytest.approx(0.42 / (0.42 + 0.4 * 0.3))
    disputed = tree_of(a=0.6)
    assert fuse(disputed, tree_of(b=0.9)) == [2]
    assert disputed.tokens == [0, 1, 2]
    # 0.6 · 0.1 · 0.3 against 0.4 · 0.3 · 0.9, and 0.4 · 0.1 that both are wrong
    assert disputed.probs[1:] == pytest.approx([0.018 / 0.166, 0.108 / 0.166])


def test_a_tree_below_another_keeps_its_own_probabilities() -> None:
    tree, other = tree_of(a=0.6), tree_of(a=0.7)
    below = other.add(1, 2, prob=0.4)
    assert fuse(tree, other) == [1, 2]
    assert tree.parents == [-1, 0, 1]
    assert tree.probs[below] == 0.4
