"""Prompt lookup: Saxena's rule to the letter, and drafts that adapt to what is accepted."""

from __future__ import annotations

import random

import pytest

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.methods.prompt_lookup import PromptLookup, PromptLookupParams
from tests.support.scripted import ScriptedOutput

PASSAGE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


FREE = DraftBudget()


def drafted(text: list[int], budget: DraftBudget = FREE, **params: int | bool) -> list[int]:
    """The drafts after ``text``, which came token by token after a prompt of one."""
    lookup = PromptLookup(PromptLookupParams(**params))  # type: ignore[arg-type]
    lookup.begin(text[:1])
    for end in range(1, len(text)):
        lookup.promise(text[:end])
    tree = TokenTree(text[-1])
    lookup.draft(text, tree, budget)
    return tree.tokens[1:]


def saxenas(text: list[int], max_ngram: int, draft: int) -> list[int]:
    """``find_candidate_pred_tokens`` of the original, with lists in place of tensors."""
    for n in range(min(max_ngram, len(text)), 0, -1):
        for i in range(len(text) - n + 1):
            start = i + n
            end = start + draft
            if text[i:start] == text[-n:] and end <= len(text) and start < len(text) - n:
                return text[start:end]
    return []


def test_saxenas_rule_copies_from_the_first_match_of_the_longest_ngram() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert drafted(text, draft=3, adaptive=False) == [7, 1, 2]
    text = [1, 2, 3, 4, 5, 9, 3, 4, 6, 9, 2, 3, 4]
    assert drafted(text, draft=2, adaptive=False) == [5, 9]
    assert drafted(text, draft=2, max_ngram=2, adaptive=False) == [5, 9]
    assert drafted([3, 4, 8, 8, *text], draft=2, max_ngram=2, adaptive=False) == [8, 8]


def test_saxenas_rule_takes_a_shorter_ngram_if_the_text_ends_too_soon() -> None:
    text = [2, 5, 5, 5, 5, 5, 1, 2, 7, 1, 2]
    assert drafted(text, draft=3, adaptive=False) == [7, 1, 2]
    assert drafted(text, draft=4, adaptive=False) == [5, 5, 5, 5]
    assert drafted(text, draft=4, min_ngram=2, adaptive=False) == []


@pytest.mark.parametrize(("max_ngram", "draft"), [(3, 10), (2, 3), (4, 2), (3, 1)])
def test_without_adapting_every_draft_is_saxenas(max_ngram: int, draft: int) -> None:
    rng, n_found = random.Random(1), 0
    for _ in range(150):
        text = [rng.randrange(4) for _ in range(rng.randrange(2, 40))]
        expected = saxenas(text, max_ngram, draft)
        assert drafted(text, max_ngram=max_ngram, draft=draft, adaptive=False) == expected
        n_found += bool(expected)
    assert n_found > 30


def test_ten_tokens_are_copied_unless_the_draft_adapts_or_another_number_is_given() -> None:
    text = [*range(200), 1, 2, 3]
    assert drafted(text, adaptive=False) == [*range(4, 14)]
    assert len(drafted(text, adaptive=False, draft=12)) == 12
    certain = DraftBudget(min_path_prob=1e-9)
    assert len(drafted(text, certain)) == 63
    assert len(drafted(text, certain, draft=12)) == 12


def test_an_adapting_draft_begins_as_the_latest_match_of_the_longest_ngram_goes_on() -> None:
    rng, certain = random.Random(2), DraftBudget(min_path_prob=1e-9)
    for _ in range(150):
        text = [rng.randrange(4) for _ in range(rng.randrange(2, 40))]
        found = [
            text[start]
            for n in (3, 2, 1)
            for start in range(len(text) - 1, n - 1, -1)
            if text[start - n : start] == text[-n:]
        ]
        assert drafted(text, certain)[:1] == found[:1]


def test_a_copy_that_reaches_the_end_is_repeated_and_nothing_is_drafted_if_nothing_repeats() -> (
    None
):
    assert drafted([9, *[1, 2] * 10])[:7] == [1, 2, 1, 2, 1, 2, 1]
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1, 9, 2, 9], min_ngram=2) == []


def test_a_longer_match_is_trusted_for_more_tokens() -> None:
    # With the root, batches are powers of two.
    lengths = [len(drafted([*PASSAGE, *PASSAGE[:n]])) for n in (1, 2, 4, 6, 9)]
    assert lengths == [1, 1, 3, 7, 7]
    assert len(drafted([*PASSAGE * 4, *PASSAGE[:3]])) == 31
    assert len(drafted([*PASSAGE * 4, *PASSAGE[:3]], draft=20)) == 15


def draft_and_observe(lookup: PromptLookup, text: list[int], new: list[int]) -> int:
    """One step that adds the tokens ``new``. Returns the length of the draft."""
    tree = TokenTree(text[-1])
    lookup.draft(text, tree, DraftBudget())
    path = [0]
    for token in new[:-1]:
        path += tree.children(path[-1], token)
    lookup.observe(Step(tree, ScriptedOutput(), path, new[-1]))
    text += new
    return len(tree) - 1


def test_drafts_grow_while_accepted_and_shrink_when_rejected() -> None:
    lookup = PromptLookup(PromptLookupParams())
    passage = list(range(100, 400))
    text = [*passage, 7, *passage[:3]]
    lookup.begin(text)
    lengths = []
    while len(text) < 590:
        at = len(text) - 301
        lengths.append(draft_and_observe(lookup, text, passage[at : at + 4]))
    assert lengths[0] == 3
    assert lengths[-1] >= 31
    assert lengths == sorted(lengths)

    novel = iter(range(1000, 2000))
    lengths = [draft_and_observe(lookup, text, [next(novel), passage[2 * i]]) for i in range(60)]
    assert lengths[-1] == 0


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_budget_is_honoured(adaptive: bool) -> None:
    text = [*PASSAGE * 4, *PASSAGE[:3]]
    for most in (5, 3, 1, 0):
        for budget in (DraftBudget(max_depth=most), DraftBudget(max_nodes=most)):
            n = len(drafted(text, budget._replace(min_path_prob=0.1), adaptive=adaptive, draft=8))
            assert n == most


def test_min_ngram_above_max_ngram_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="min_ngram 4 is above max_ngram 3; lower it"):
        PromptLookupParams(min_ngram=4)
