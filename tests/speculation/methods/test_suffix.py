"""Suffix decoding: what is drafted from this text and from earlier ones."""

from __future__ import annotations

import pytest

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, PlainSteps
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.methods.suffix import PRIORS, Suffix, SuffixParams

ALONE = DraftBudget()
IN_MEMORY = len(PRIORS) // 2  # the first cell of a draft from the memory
TREES = DraftBudget(min_path_prob=0.02)  # as auto asks


def remembered(*texts: list[int]) -> SuffixMemory:
    memory = SuffixMemory()
    for text in texts:
        memory.remember(text)
    return memory


def drafted(drafter: Suffix, text: list[int], budget: DraftBudget = ALONE) -> TokenTree:
    """The draft after ``text``, whose last token is the first of the reply."""
    drafter.begin(text[:-1])
    drafter.observe_plain(PlainSteps(text[-1:], [0.0]))
    tree = TokenTree(text[-1])
    drafter.draft(text, tree, budget)
    return tree


def test_the_longest_match_is_copied_from_this_text() -> None:
    text = [1, 2, 3, 4, 10, 11, 12, 9, 3, 4, 20, 21, 22, 9, 1, 2, 3, 4]
    assert drafted(Suffix(SuffixParams()), text).tokens[:4] == [4, 10, 11, 12]


def test_a_match_in_this_text_is_preferred_to_all_but_a_much_longer_one_in_the_memory() -> None:
    text = [7, 8, 60, 61, 1, 2, 3, 4, 5, 6, 7, 8]
    slightly, much = [5, 6, 7, 8, 70, 71], [1, 2, 3, 4, 5, 6, 7, 8, 70, 71]
    assert drafted(Suffix(SuffixParams(), remembered(slightly)), text).tokens == [8, 60]
    assert drafted(Suffix(SuffixParams(), remembered(much)), text).tokens == [8, 70]
    assert drafted(Suffix(SuffixParams(memory=False), remembered(much)), text).tokens == [8, 60]


def test_a_text_is_remembered_when_it_ends_unless_memory_is_off() -> None:
    memory, text = SuffixMemory(), [1, *range(10, 26)]
    Suffix(SuffixParams(), memory).end([*range(10, 30)])
    assert drafted(Suffix(SuffixParams(), memory), text).tokens == [25, 26, 27, 28]
    off = Suffix(SuffixParams(memory=False), memory)
    assert len(drafted(off, text)) == 1
    off.end([*range(40, 60)])
    assert memory.index.tokens.tolist() == [*range(10, 30), -1]


def test_frequent_continuations_lead_and_a_branch_assumes_that_the_lead_is_rejected() -> None:
    prefix = [1, 2, 3, 4]
    texts = [[*prefix, token] for token in (50, 50, 60, 70)]
    tree = drafted(Suffix(SuffixParams(branches=3), remembered(*texts)), [9, *prefix], TREES)
    assert (tree.tokens, tree.parents) == ([4, 50, 70, 60], [-1, 0, 0, 0])
    lead, branch = tree.probs[1], Acceptance(PRIORS).prob(IN_MEMORY + 10 * 4 + 3)
    assert tree.probs[2] == pytest.approx((1 - lead) * branch)
    assert tree.probs[3] == pytest.approx((1 - lead - tree.probs[2]) * branch)
    assert 1.0 > lead > tree.probs[2] > tree.probs[3]


def test_a_token_is_trusted_by_how_many_occurrences_agree() -> None:
    prefix = [1, 2, 3, 4]
    a, b, c = ([*prefix, token, token + 1] for token in (50, 60, 70))
    probs = [
        drafted(Suffix(SuffixParams(), remembered(*texts)), [9, *prefix], TREES).probs[1]
        for texts in ([a, b, c], [b, a, [8, *a]], [a], [a, [8, *a]])
    ]
    assert probs == sorted(set(probs))


def test_a_replys_first_token_is_trusted_less() -> None:
    drafter = Suffix(SuffixParams())
    drafter.begin([1, 2, 3, 4, 50, 51, 1, 2, 3, 4])
    tree = TokenTree(4)
    drafter.draft([1, 2, 3, 4, 50, 51, 1, 2, 3, 4], tree, TREES)
    later = drafted(drafter, [1, 2, 3, 4, 50, 51, 1, 2, 3, 4], TREES)
    assert tree.tokens == later.tokens
    assert tree.probs[1] < 0.5 < later.probs[1]
    assert tree.probs[2] == later.probs[2]


def test_branches_part_where_the_occurrences_do() -> None:
    prefix = [1, 2, 3, 4]
    memory = remembered([*prefix, 50, 51, 52], [*prefix, 50, 61, 62], [*prefix, 50, 51, 53])
    tree = drafted(Suffix(SuffixParams(branches=4), memory), [9, *prefix], TREES)
    assert [tree.tokens[node] for node in tree.path_to(tree.tokens.index(62))] == [4, 50, 61, 62]
    assert tree.tokens.count(50) == 1
    assert {52, 53} <= set(tree.tokens)


def test_a_chain_has_no_branches() -> None:
    memory = remembered([1, 2, 3, 4, 50], [1, 2, 3, 4, 60])
    drafter = Suffix(SuffixParams(branches=2), memory)
    assert len(drafted(drafter, [1, 2, 3, 4], TREES)) == 3
    assert drafted(drafter, [1, 2, 3, 4], TREES._replace(chain_only=True)).is_chain


def test_it_promises_more_the_longer_the_match_and_less_if_that_is_in_the_memory() -> None:
    drafter = Suffix(SuffixParams(), SuffixMemory())
    drafter.begin(text := [1, 2, 3])
    assert drafter.promise(text) == 0.0
    promises = [drafter.promise(text := [*text, token]) for token in (1, 2)]
    assert promises == pytest.approx([0.5, 0.80], abs=0.01)
    memory = SuffixMemory()
    memory.remember([5, 6, 7, 8, 9])
    drafter = Suffix(SuffixParams(), memory)
    drafter.begin([4, 5])
    assert drafter.promise([4, 5, 6]) == pytest.approx(0.54, abs=0.01)


@pytest.mark.parametrize(("token", "is_foreseen"), [(2, True), (9, False)])
def test_it_learns_from_where_a_text_goes_though_it_is_not_asked(
    token: int, is_foreseen: bool
) -> None:
    acceptance = Acceptance(PRIORS)
    drafter = Suffix(SuffixParams(), SuffixMemory(), acceptance)
    drafter.begin(text := [1, 2, 3, 4, 1])
    assert drafter.promise(text) == 0.5
    drafter.promise([*text, token])
    assert (acceptance.prob(0) > 0.5) is is_foreseen
    assert acceptance.prob(0) != 0.5
