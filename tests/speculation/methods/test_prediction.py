"""Predicted outputs: what is drafted while a reply follows its prediction, and after a change."""

from __future__ import annotations

import pytest

from batching.cache import common_prefix
from batching.tree import TokenTree
from speculation.auto.drafter import Auto
from speculation.drafter import DraftBudget, Step
from speculation.drafting.copying import CopyParams
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.methods import parse_method
from speculation.methods.prediction import Prediction
from tests.support.fake_sources import draft
from tests.support.scripted import ScriptedOutput

PROMPT = [1, 2, 3]
NEWLINE, INDENT, BRACE = 4, 5, 6


def line(first: int) -> list[int]:
    """An indented line of eight tokens of its own."""
    return [INDENT, *range(first, first + 8), NEWLINE]


A, B, C, D, E, NEW = (line(first) for first in (100, 110, 120, 130, 140, 150))
BEFORE = [*A, *B, *C, *D, *E]
TREES = DraftBudget(min_path_prob=0.2)  # as auto asks


def accepted(prediction: list[int], reply: list[int], budget: DraftBudget = TREES) -> list[int]:
    """How many drafts are accepted in each step while the target writes ``reply``."""
    drafter = Prediction(CopyParams(), prediction)
    drafter.begin(PROMPT)
    text, left, found = list(PROMPT), list(reply), []
    while left:
        tree = TokenTree(text[-1])
        drafter.draft(text, tree, budget._replace(max_depth=len(left) - 1))
        n = common_prefix(tree.tokens[1:], left)
        drafter.observe(Step(tree, ScriptedOutput(), [*range(n + 1)], left[n]))
        text, left = text + left[: n + 1], left[n + 1 :]
        found.append(n)
    return found


def test_a_reply_equal_to_the_prediction_is_drafted_whole_or_with_growing_drafts() -> None:
    assert accepted(BEFORE, BEFORE) == [49]
    assert accepted(BEFORE, BEFORE, DraftBudget()) == [3, 31, 7, 3, 1]  # without a selection


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        pytest.param([*A, *B, *NEW, *D, *E], [21, *[0] * 8, 1, 17], id="replaced"),
        pytest.param([*A, *B, *NEW, *C, *D, *E], [21, *[0] * 8, 1, 27], id="inserted"),
        pytest.param([*A, *B, *D, *E], [21, 17], id="deleted"),
        pytest.param([*A, *B[:4], 7, *B[5:], *C, *D, *E], [14, 0, 1, 31], id="one token"),
        pytest.param([*A, *B[:4], 7, 8, *B[6:], *C, *D, *E], [14, 0, 0, 1, 30], id="other tokens"),
        pytest.param([*A, *D, *E, *B, *C], [11, 18, 0, 3, 13], id="moved"),
        pytest.param([200, 201, 202, *BEFORE], [0, 0, 0, 0, 1, 46], id="after a preamble"),
    ],
)
def test_a_reply_is_found_again_after_a_change(reply: list[int], expected: list[int]) -> None:
    """Each 0 is a token written without a draft."""
    assert accepted(BEFORE, reply) == expected


def test_of_equal_lines_the_next_one_is_taken() -> None:
    end = [INDENT, BRACE, NEWLINE]
    before = [*A, *end, *B, *end, *C, *end, *D, *end]
    assert accepted(before, [*A, *end, *B, 7, *end, *C, *end, *D, *end]) == [23, 0, 1, 25]


def test_a_prediction_that_has_nothing_to_do_with_the_reply_soon_costs_nothing() -> None:
    drafter = Prediction(CopyParams(), BEFORE)
    drafter.begin(PROMPT)
    assert drafter.promise(PROMPT) == pytest.approx(0.7, abs=0.01)
    text = [*PROMPT, 200]
    for token in range(201, 900):
        text.append(token)
        assert drafter.promise(text) == 0.0
    tree = TokenTree(text[-1])
    drafter.draft(text, tree, TREES)
    assert len(tree) == 1


def auto(prediction: list[int]) -> Auto:
    resources = Resources(lambda: Cost(CostCurve.linear(1.0, 0.003)))
    resources.prediction = tuple(prediction)
    (drafter,) = parse_method("auto:sources=prediction+suffix").drafters(resources)
    assert isinstance(drafter, Auto)
    return drafter


def test_a_prediction_is_drafted_by_itself_or_in_auto_only_if_there_is_one() -> None:
    assert parse_method("prediction").drafters(Resources()) == []
    assert [source.name for source in auto([]).sources] == ["suffix"]
    assert [source.name for source in auto([1]).sources] == ["prediction", "suffix"]


def test_auto_prefers_the_prediction_to_an_equal_match_in_the_prompt() -> None:
    drafter, same = auto([*BEFORE, 300]), BEFORE[:40]
    drafter.begin([*same, 400, 401, 402, 2])
    tree = draft(drafter, [*same, 400, 401, 402, 2, *same])
    assert tree.tokens[1:4] == BEFORE[40:43]
    assert tree.sources[1] == "prediction"
