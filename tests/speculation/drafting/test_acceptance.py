"""Acceptance: probabilities by strength and of a head's candidates, learnt from outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batching.together import Coroutine, done, run
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import (
    Acceptance,
    by_length,
    by_probability,
    of_length,
    of_probability,
)
from speculation.drafting.tree_growth import Growth, TreeDrafter
from tests.support.fake_target import FakeOutput, fake_logits


def test_strengths_grow_with_the_match_and_the_probability() -> None:
    lengths = (0, 1, 2, 3, 4, 5, 8, 31, 32, 300)
    assert [of_length(n) for n in lengths] == [0, 0, 1, 2, 3, 3, 5, 8, 9, 9]
    assert [of_probability(p) for p in (0.0, 0.09, 0.1, 0.95, 1.0)] == [0, 0, 1, 9, 9]


def test_priors_are_a_line_over_the_length_or_the_probability() -> None:
    assert by_length(-1.0, 0.5)[:4] == pytest.approx([-1.0, -0.5, -0.2075, 0.0], abs=1e-4)
    heads = Acceptance(by_probability(0.0, 1.0))
    assert [heads.prob(i) for i in range(10)] == pytest.approx([0.05 + i / 10 for i in range(10)])
    cautious = Acceptance()
    assert [round(cautious.prob(i), 2) for i in (0, 5, 9)] == [0.07, 0.52, 0.92]


def test_a_chain_ends_where_its_path_probability_falls_below_the_floor() -> None:
    acceptance = Acceptance(by_length(0.0, 1.0))
    probs = [0.5, 0.731, 0.83]
    assert acceptance.chain_probs([0, 1, 2, 3], 0.3) == pytest.approx(probs, abs=1e-3)
    assert acceptance.chain_probs([0, 1, 2, 3], 0.3, before=0.7) == pytest.approx([0.5], abs=1e-3)


def test_acceptance_follows_outcomes_and_other_cells_of_the_text_learn_from_them_too() -> None:
    acceptance = Acceptance(by_length(0.0, 1.0))
    text, beside = acceptance.of_text(), acceptance.of_text()
    for _ in range(200):
        text.learn(1, accepted=False)
    assert text.prob(1) < 0.2
    assert text.prob(0) < 0.5
    assert beside.prob(1) < 0.65  # 0.73 before
    assert beside.prob(0) == 0.5
    assert text.prob(0) < acceptance.of_text().prob(0) < 0.5


def test_a_saved_state_is_taken_up_and_another_form_ignored() -> None:
    saved = [0.25] * 10
    assert Acceptance(by_length(0.0, 1.0), saved).log_odds == saved
    for other in (None, [1.0], {"a": 1}, "x"):
        assert Acceptance(by_length(0.0, 1.0), other).log_odds == by_length(0.0, 1.0)


class Fixed(TreeDrafter):
    """The text is followed by 5 (0.75) or 6 (0.15); 5 is followed by 7 (0.35), 6 by 8 (0.45)."""

    def _grow(
        self, growth: Growth, tokens: Sequence[int], budget: DraftBudget
    ) -> Coroutine[Sequence[int]]:
        growth.add_likely(0, [(5, 0.75), (6, 0.15)])
        growth.add_likely(1, [(7, 0.35)])
        growth.add_likely(2, [(8, 0.45)])
        return done([1])


def after(*came: int) -> list[float]:
    """How likely first choices of 0.75, 0.35 and 0.45 are to be accepted after the tokens ``came``.

    The last token is the bonus; the others were accepted in a tree with other drafters' nodes.
    """
    drafter = Fixed(acceptance := Acceptance([0.0] * 10))
    run(drafter.draft([1], own := TokenTree(1), DraftBudget()))
    assert own.tokens == [1, 5]
    tree = TokenTree(1)
    tree.add(0, 9)  # a node of another drafter, so that node numbers shift
    path = [0]
    for token in came[:-1]:
        path.append(tree.add(path[-1], token))
    output = FakeOutput([(1,)], [True], fake_logits)
    drafter.observe(Step(tree, output, path, came[-1]))
    # Cells share some evidence, which is subtracted here.
    return [acceptance.prob(of_probability(p)) - acceptance.prob(0) for p in (0.75, 0.35, 0.45)]


def test_each_token_is_compared_with_the_first_choice_of_its_level() -> None:
    first, second, other = after(5, 7, 4)
    assert first > 0
    assert second > 0
    assert other == 0
    first, second, other = after(5, 4)
    assert first > 0 > second
    assert other == 0


def test_below_an_accepted_second_choice_its_own_first_choice_counts() -> None:
    first, second, other = after(6, 8)
    assert first < 0 < other
    assert second == 0


def test_beyond_the_candidates_nothing_is_learnt() -> None:
    first, second, other = after(4, 7, 8)
    assert first < 0
    assert second == other == 0
