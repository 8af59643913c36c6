"""Confidence: calibrating a head's probabilities by what is accepted."""

from __future__ import annotations

from batching.tree import TokenTree
from speculation.drafter import Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.confidence import Confidence
from speculation.drafting.tree_growth import Candidate
from tests.support.fake_target import FakeOutput, fake_logits

# The text is followed by 5 (0.75) or 6 (0.15); 5 is followed by 7 (0.35), 6 by 8 (0.45).
NODES = (
    Candidate(-1, 5, 0.75, 0.75),
    Candidate(-1, 6, 0.15, 0.15),
    Candidate(0, 7, 0.35, 0.26),
    Candidate(1, 8, 0.45, 0.07),
)


def after(*came: int) -> list[float]:
    """How likely first choices of 0.75, 0.35 and 0.45 are to be accepted after the tokens ``came``.

    The last token is the bonus; the others were accepted in a tree with other drafters' nodes.
    """
    confidence = Confidence(Acceptance([0.0] * 10))
    confidence.set_candidates(NODES)
    tree = TokenTree(1)
    tree.add(0, 9)  # a node of another drafter, so that node numbers shift
    path = [0]
    for token in came[:-1]:
        path.append(tree.add(path[-1], token))
    output = FakeOutput([(1,)], [True], fake_logits)
    confidence.learn(Step(tree, output, path, came[-1]))
    # Cells share some evidence, which is subtracted here.
    shared = confidence.acceptance.prob(0)
    return [confidence.acceptance_prob(Candidate(-1, 0, p, p)) - shared for p in (0.75, 0.35, 0.45)]


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
