"""Prompt lookup: the place that is copied from, and the length of a copy."""

from __future__ import annotations

import random

from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.methods.prompt_lookup import PromptLookup, PromptLookupParams
from tests.support.scripted import ScriptedOutput

PASSAGE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


FREE = DraftBudget()


def drafted(text: list[int], budget: DraftBudget = FREE, **params: int) -> list[int]:
    """The drafts after ``text``, all of it but the last token the prompt."""
    lookup = PromptLookup(PromptLookupParams(**params))
    lookup.begin(text[:-1])
    tree = TokenTree(text[-1])
    lookup.draft(text, tree, budget)
    return tree.tokens[1:]


def test_a_draft_begins_as_the_latest_match_of_the_longest_ngram_goes_on() -> None:
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


def test_a_longer_match_is_trusted_for_more_tokens() -> None:
    # With the root, batches are powers of two.
    lengths = [len(drafted([*PASSAGE, *PASSAGE[:n]])) for n in (1, 2, 4, 6, 9)]
    assert lengths == [1, 1, 3, 7, 7]
    assert len(drafted([*PASSAGE * 4, *PASSAGE[:3]])) == 31
    assert len(drafted([*PASSAGE * 4, *PASSAGE[:3]], draft=20)) == 15


def test_no_more_than_the_given_number_is_copied() -> None:
    text, certain = [*range(200), 1, 2, 3], DraftBudget(min_path_prob=1e-9)
    assert len(drafted(text, certain)) == 63
    assert drafted(text, certain, draft=12) == [*range(4, 16)]


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
