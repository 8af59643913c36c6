"""Prompt lookup, Jacobi, verification and parsing of methods."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from batching.errors import InvalidParameter
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, MethodSpec, Step
from speculation.drafters.jacobi import Jacobi, JacobiParams
from speculation.drafters.prompt_lookup import PromptLookup, PromptLookupParams
from speculation.drafting.ngram_index import NgramIndex
from speculation.methods import MethodTable, load_method_file, parse_method
from speculation.verify import Match
from tests.support.paths import ROOT
from tests.support.scripted import ScriptedOutput, ScriptedSampler


def looked_up(text: list[int], **params: object) -> TokenTree:
    lookup = PromptLookup(PromptLookupParams(**params))  # type: ignore[arg-type]
    begin_with(lookup, text)
    tree = TokenTree(text[-1])
    lookup.draft(text, tree, DraftBudget())
    return tree


def begin_with(lookup: PromptLookup, text: list[int]) -> None:
    """Begin with the prompt ``text[:1]`` and observe one step."""
    lookup.begin(text[:1])
    tree = TokenTree(text[0])
    lookup.draft(text[:1], tree, DraftBudget())
    lookup.observe(Step(tree, ScriptedOutput(), [0], text[1]))


def test_the_continuation_of_the_longest_earlier_suffix_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 9, 3, 4, 6, 9, 2, 3, 4]
    assert looked_up(text, draft=2, adaptive=False).tokens == [4, 5, 9]


def test_saxenas_rule_takes_the_first_match() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert looked_up(text, order="first", adaptive=False, draft=1).tokens == [2, 7]
    assert looked_up(text, order="recent", adaptive=False, draft=1).tokens == [2, 8]


def test_order_frequent_drafts_the_most_frequent_continuation_first() -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    assert looked_up(text, order="frequent", draft=1, adaptive=False).tokens == [2, 7]


def test_several_continuations_become_branches_of_one_tree() -> None:
    text = [1, 2, 7, 5, 1, 2, 7, 6, 1, 2, 8, 8, 1, 2]
    tree = looked_up(text, branches=3, draft=2, order="recent", adaptive=False)
    assert tree.tokens == [2, 8, 8, 7, 6, 5]
    assert tree.parents == [-1, 0, 1, 0, 3, 3]


def test_a_repetition_shorter_than_the_draft_is_repeated() -> None:
    assert looked_up([9, 1, 2, 1, 2], draft=5, adaptive=False).tokens == [2, 1, 2, 1, 2, 1]


def test_nothing_is_drafted_if_nothing_repeats() -> None:
    assert len(looked_up([1, 2, 3, 4])) == 1


def test_a_match_shorter_than_min_ngram_does_not_count() -> None:
    assert len(looked_up([1, 9, 2, 9], min_ngram=2)) == 1


def test_an_incremental_index_finds_the_same_matches_as_a_scan() -> None:
    rng = random.Random(1)
    for _ in range(200):
        index = NgramIndex(1, 3)
        text = [rng.randrange(4) for _ in range(60)]
        at = 0
        while at < len(text):
            step = rng.randrange(1, 6)
            index.extend(text[at : at + step])
            at += step
            seen = text[:at]
            for n in (1, 2, 3):
                suffix = seen[-n:]
                scan = [p for p in range(n, len(seen)) if seen[p - n : p] == suffix]
                latest = index.latest()
                if len(suffix) < n or not scan:
                    assert len(latest) < n
                else:
                    assert index.matches(n, latest[n - 1], 100) == scan[::-1]
                    assert index.matches(n, latest[n - 1], 2) == scan[::-1][:2]


def test_a_common_context_is_counted_up_to_32_tokens() -> None:
    rng = random.Random(2)
    for _ in range(300):
        index = NgramIndex(1, 3)
        period = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        text = period * 4 + [rng.randrange(3)] + period * rng.randrange(1, 4)
        index.extend(text)
        for n, latest in enumerate(index.latest(), 1):
            for position in index.matches(n, latest, 5):
                backwards = zip(reversed(text[:position]), reversed(text), strict=False)
                alike = [a == b for a, b in backwards] + [False]
                assert index.common_context(position) == min(32, alike.index(False))
                assert index.common_context(position, n) == min(32, alike.index(False))


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


def test_a_draft_continues_while_it_is_likely_to_be_accepted() -> None:
    # By the priors the drafts of a lone match with 3 tokens in common are accepted with 0.77, 0.84,
    # 0.89, 0.89, 0.93, …: together 0.51 after 4 tokens, 0.41 after 7. With the root, batches are
    # powers of two.
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert len(looked_up(text, p_min=0.8)) == 1
    assert len(looked_up(text, p_min=0.7)) == 2
    assert len(looked_up(text, p_min=0.6)) == 2
    assert len(looked_up(text, p_min=0.5)) == 4
    assert len(looked_up(text, p_min=0.4)) == 8
    assert len(looked_up(text, p_min=0.2)) == 16
    assert len(looked_up(text, p_min=0.0, draft_max=31)) == 32
    assert len(looked_up(text, p_min=0.0, draft_max=6)) == 4


def test_a_copy_is_trusted_until_two_matches_diverge() -> None:
    passage = [1, 2, 3, 4, 5, 6, 7, 8]
    alike = [*passage, 90, 80, *passage, 91, 70, 1, 2, 3]
    # Two matches with 3 tokens in common, then alike for 5: 0.86, 0.90, 0.95, 0.97, 0.97, then
    # disputed with a context of 8: 0.60. Their products: 0.86 0.77 0.74 0.71 0.69 0.42.
    probs = looked_up(alike, p_min=0.0).probs[1:8]
    assert probs == pytest.approx([0.86, 0.90, 0.95, 0.97, 0.97, 0.60, 0.935])
    assert len(looked_up(alike, p_min=0.5)) == 4
    parted = [1, 2, 3, 90, 80, 1, 2, 3, 91, 70, 1, 2, 3]
    assert looked_up(parted, p_min=0.0).probs[1] == pytest.approx(0.30)
    assert len(looked_up(parted, p_min=0.5)) == 1


def test_acceptance_is_learnt_separately_for_matches_that_diverge() -> None:
    lookup = PromptLookup(PromptLookupParams(p_min=0.0))
    text = [1, 2, 3, 90, 80, 1, 2, 3, 91, 70, 1, 2, 3]
    lookup.begin(text)
    for i in range(40):  # the last continuation is always rejected
        draft_and_observe(lookup, text, [200 + i, 70, 1, 2, 3])
    tree = TokenTree(text[-1])
    lookup.draft(text, tree, DraftBudget())
    assert tree.tokens[1] == 239
    disputed, alone = tree.probs[1], tree.probs[2]
    assert disputed < 0.15
    assert alone > 0.5


def test_drafts_grow_while_accepted_and_shrink_when_rejected() -> None:
    lookup = PromptLookup(PromptLookupParams())
    passage = list(range(100, 400))
    text = [*passage, 7, *passage[:3]]
    begin_with(lookup, text)
    lengths = []
    while len(text) < 590:
        at = len(text) - 301
        lengths.append(draft_and_observe(lookup, text, passage[at : at + 4]))
    assert lengths[0] == 3
    assert lengths[-1] == 15
    assert lengths == sorted(lengths)

    novel = iter(range(1000, 2000))
    lengths = []
    for i in range(30):
        lengths.append(draft_and_observe(lookup, text, [next(novel), passage[2 * i]]))
    assert lengths[-1] == 0


def test_a_draft_is_no_longer_than_the_text_has_tokens_left() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    for params in ({"p_min": 0.0}, {"p_min": 0.0, "branches": 2}, {"adaptive": False}):
        lookup = PromptLookup(PromptLookupParams(**params))
        lookup.begin(text)
        depths = []
        for most in (5, 3, 1, 0):
            tree = TokenTree(text[-1])
            lookup.draft(text, tree, DraftBudget(max_depth=most))
            depths.append(max(tree.depths))
        assert depths == ([5, 3, 1, 0] if "adaptive" in params else [3, 3, 1, 0])


def test_the_first_token_of_a_text_is_trusted_less() -> None:
    lookup = PromptLookup(PromptLookupParams(p_min=0.0))
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    lookup.begin(text)
    first, later = TokenTree(3), TokenTree(4)
    lookup.draft(text, first, DraftBudget())
    assert first.probs[1:4] == pytest.approx([0.3, 0.84, 0.89])
    lookup.observe(Step(first, ScriptedOutput(), [0], 4))
    lookup.draft([*text, 4], later, DraftBudget())
    assert later.probs[1] == pytest.approx(0.84)


def test_the_probability_of_a_second_branch_assumes_that_the_first_is_rejected() -> None:
    text = [1, 2, 7, 5, 1, 2, 8, 8, 1, 2]
    # The matches disagree: the first token is accepted with 0.25, else the other with 0.3.
    both = looked_up(text, branches=2, p_min=0.0, draft_max=1)
    assert both.tokens == [2, 8, 7]
    assert both.probs[1:] == pytest.approx([0.25, 0.75 * 0.3])
    assert looked_up(text, branches=2, p_min=0.24, draft_max=1).tokens == [2, 8]
    assert looked_up(text, branches=2, p_min=0.22, draft_max=1).tokens == [2, 8, 7]


def test_a_second_branch_shares_the_common_prefix_with_the_first() -> None:
    text = [1, 2, 7, 8, 5, 5, 1, 2, 7, 9, 6, 6, 1, 2]
    tree = looked_up(text, branches=2, p_min=0.0, draft_max=3)
    assert tree.tokens == [2, 7, 9, 6, 8, 5]
    assert tree.parents == [-1, 0, 1, 2, 1, 4]
    assert tree.probs[4] == pytest.approx((1 - tree.probs[2]) * 0.3)


def test_jacobi_reuses_the_targets_argmax_after_the_accepted_path() -> None:
    jacobi = Jacobi(JacobiParams(guesses=4))
    jacobi.begin([5, 6])
    tree = TokenTree(6)
    jacobi.draft([5, 6], tree, DraftBudget())
    assert tree.tokens == [6, 6, 6, 6, 6]
    # One guess is accepted; the bonus is 31; the argmax of nodes 2 to 4 is 32, 33, 34.
    jacobi.observe(Step(tree, ScriptedOutput([6, 31, 32, 33, 34]), [0, 1], 31))
    tree = TokenTree(31)
    jacobi.draft([5, 6, 6, 31], tree, DraftBudget())
    assert tree.tokens == [31, 32, 33, 34, 34]


def test_verification_samples_each_token_once_and_follows_it() -> None:
    tree = TokenTree(1)
    a = tree.add(0, 2)
    tree.add(0, 3)
    b = tree.add(a, 4)
    sampler = ScriptedSampler([2, 4, 9])
    assert Match().verify(tree, ScriptedOutput(), sampler) == ([0, a, b], 9)
    assert sampler.rows == [0, a, b]


def test_verification_follows_all_unmerged_branches_until_only_one_matches() -> None:
    tree = TokenTree(1)
    first = tree.add(0, 2, merge=False)
    second = tree.add(0, 2, merge=False)
    tree.add(first, 5, merge=False)
    end = tree.add(second, 6, merge=False)
    sampler = ScriptedSampler([2, 6, 7])
    assert Match().verify(tree, ScriptedOutput(), sampler) == ([0, second, end], 7)


def test_a_method_is_written_with_parameters_after_a_colon() -> None:
    method = parse_method("lookahead:window=7, ngram=4,merge=on")
    assert (method.params.window, method.params.ngram, method.params.guesses) == (7, 4, 15)
    assert method.params.merge is True
    assert str(method) == "lookahead:window=7,ngram=4,merge=on"
    assert str(parse_method("ar")) == "ar"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lokahead", "no method 'lokahead'; did you mean lookahead"),
        (
            "lookahead:windo=3",
            "lookahead has no parameter 'windo'; did you mean window.*window, ngram",
        ),
        ("lookahead:window", "lookahead: window has no value; write window=value"),
        ("lookahead:window=3,ngram=4,window=5", "lookahead: window is given twice; give it once"),
        ("lookahead:window=many", "window is 'many'; give a value like 15"),
        ("lookahead:merge=perhaps", "merge is 'perhaps'; give on or off"),
        ("lookahead:ngram=2", "ngram is 2; give 3 to 32"),
        ("prompt-lookup:order=best", "order is 'best'; give one of longest, recent"),
        ("prompt-lookup:min_ngram=4", "min_ngram 4 is above max_ngram 3"),
        (
            "auto:sources=all+draft",
            "sources contains 'all'; give all, or some of prediction, suffix",
        ),
        ("jacobi:guesses=0", "guesses is 0; give 1 to 256"),
        ("ar:x=1", "ar has no parameter 'x'; it has none"),
    ],
)
def test_a_malformed_method_is_refused_with_a_correction(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        parse_method(text)


def test_a_method_is_loaded_from_a_file_by_its_path(tmp_path: Path) -> None:
    name = load_method_file(f"{ROOT / 'examples' / 'bigrams.py'}:spec:length=2")
    assert name == "bigrams:length=2"
    method = parse_method(name)
    assert str(method) == "bigrams:length=2"
    (drafter,) = method.drafters()
    tree = TokenTree(1)
    drafter.draft([1, 2, 3, 1], tree, DraftBudget())
    assert tree.tokens == [1, 2, 3]
    assert load_method_file("prompt-lookup:branches=2") == "prompt-lookup:branches=2"
    wrong = tmp_path / "wrong.py"
    wrong.write_text("spec = 1")
    with pytest.raises(InvalidParameter, match=r"wrong.py:spec is not a MethodSpec"):
        load_method_file(f"{wrong}:spec")
    failing = tmp_path / "failing.py"
    failing.write_text("1 / 0")
    with pytest.raises(InvalidParameter, match="failing.py failed: ZeroDivisionError"):
        load_method_file(f"{failing}:spec")
    with pytest.raises(InvalidParameter, match="file not found"):
        load_method_file("nowhere.py:spec")


def test_packages_add_methods_by_entry_points_and_broken_ones_are_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outside = MethodSpec("outside", "Outside", lambda params, resources: None)
    points = [
        SimpleNamespace(name="outside", value="a:spec", load=lambda: outside),
        SimpleNamespace(name="broken", value="b:spec", load=lambda: 1 / 0),
        SimpleNamespace(name="again", value="c:spec", load=lambda: replace(outside)),
    ]
    monkeypatch.setattr("speculation.methods.entry_points", lambda group: points)
    table = MethodTable([])
    assert list(table) == ["outside"]
    left_out = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert left_out == ["broken", "again"]
