"""auto without a model: what it drafts from its sources, given what rows and sources cost."""

from __future__ import annotations

import pytest

from batching.tree import TokenTree
from speculation.auto.cost_curve import CostCurve, CostModel
from speculation.auto.drafter import Auto, AutoParams
from speculation.auto.source import Source
from speculation.drafter import DraftBudget, Step
from speculation.drafters.prompt_lookup import PromptLookup, PromptLookupParams
from tests.support.fake_sources import Never, OneToken, set_clock, take_step


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
