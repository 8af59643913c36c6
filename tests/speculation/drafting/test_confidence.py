"""Confidence: what a head's probabilities turn out to be worth."""

from __future__ import annotations

from batching.tree import TokenTree
from speculation.drafter import Step
from speculation.drafting.confidence import Confidence
from speculation.drafting.estimates import Estimates
from speculation.drafting.tree_growth import Candidate
from tests.support.fake_target import FakeOutput, fake_logits

# After the text 5 (0.75) or 6 (0.15); after 5 comes 7 (0.35), after 6 comes 8 (0.45).
NODES = (
    Candidate(-1, 5, 0.75, 0.75),
    Candidate(-1, 6, 0.15, 0.15),
    Candidate(0, 7, 0.35, 0.26),
    Candidate(1, 8, 0.45, 0.07),
)


def after(*came: int) -> list[float]:
    """How likely first choices of 0.75, 0.35 and 0.45 are to hold once ``came`` has come.

    Only the last token is the bonus; all before it were decoded, in a tree that others grew too.
    """
    confidence = Confidence(Estimates((0.5,) * 10))
    confidence.set_candidates(NODES)
    tree = TokenTree(1)
    tree.add(0, 9)  # another drafter's, and the policy took the others' numbers
    path = [0]
    for token in came[:-1]:
        path.append(tree.add(path[-1], token))
    output = FakeOutput([(1,)], [True], fake_logits)
    confidence.learn(Step(tree, output, path, came[-1]))
    # What is learnt of one kind moves the others a little: shared evidence, taken out here.
    shared = confidence.estimates.of(0)
    return [confidence.acceptance_prob(Candidate(-1, 0, p, p)) - shared for p in (0.75, 0.35, 0.45)]


def test_what_came_is_compared_with_the_first_choice_of_each_level() -> None:
    first, second, other = after(5, 7, 4)
    assert first > 0
    assert second > 0
    assert other == 0
    first, second, other = after(5, 4)
    assert first > 0 > second
    assert other == 0


def test_below_a_second_choice_its_own_first_choice_counts() -> None:
    first, second, other = after(6, 8)
    assert first < 0 < other
    assert second == 0


def test_beyond_the_candidates_nothing_is_learnt() -> None:
    first, second, other = after(4, 7, 8)
    assert first < 0
    assert second == other == 0
