"""Lookahead's batches, literally, and against recorded runs of llama.cpp's own program."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from batching.llama.context import ContextParams
from batching.rows import tree_rows
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.engine import Engine
from speculation.methods.lookahead import Lookahead, LookaheadParams, NgramPool
from tests.support.fake_target import listed
from tests.support.scripted import ScriptedOutput

W5N4G2 = LookaheadParams(window=5, ngram=4, guesses=2)


def table(tree: TokenTree, n_past: int) -> list[str]:
    """Rows as ``token position output | seq_ids``."""
    return [
        f"{row.token} {row.position} {int(row.output)} | {' '.join(map(str, row.seq_ids))}"
        for row in listed(tree_rows(tree, n_past, 8))
    ]


def started(params: LookaheadParams = W5N4G2) -> Lookahead:
    """A drafter whose first step, the prompt's last token alone, is done."""
    lookahead = Lookahead(params)
    lookahead.begin([1, 2, 3])
    tree = TokenTree(3)
    lookahead.draft([1, 2, 3], tree, DraftBudget())
    assert len(tree) == 1
    lookahead.observe(Step(tree, ScriptedOutput(), [0], 40))
    return lookahead


def drafted(lookahead: Lookahead, tokens: Sequence[int]) -> TokenTree:
    tree = TokenTree(tokens[-1])
    lookahead.draft(tokens, tree, DraftBudget())
    return tree


FIRST_BATCH = [
    # token position output | seq_ids
    "40 10 1 | 0 1 2 3 4 5 6 7",  # input token
    "101 11 0 | 2 3 4 5",  # level 0, columns 1 to 4
    "102 12 0 | 3 4 5",
    "103 13 0 | 4 5",
    "104 14 0 | 5",
    "100 11 0 | 1",  # level 1, columns 0 to 4
    "101 12 0 | 2",
    "102 13 0 | 3",
    "103 14 0 | 4",
    "104 15 0 | 5",
    "100 12 1 | 1",  # level 2, the last: its argmax is the next level
    "101 13 1 | 2",
    "102 14 1 | 3",
    "103 15 1 | 4",
    "104 16 1 | 5",
]


def test_the_first_batch_of_w5_n4_g2_has_these_rows() -> None:
    assert table(drafted(started(), [1, 2, 3, 40]), n_past=10) == FIRST_BATCH


def second_step() -> Lookahead:
    """After a step in which nothing was accepted and the last level became 200 to 204."""
    lookahead = started()
    tree = drafted(lookahead, [1, 2, 3, 40])
    last_level = dict(zip(range(10, 15), range(200, 205), strict=True))
    lookahead.observe(Step(tree, ScriptedOutput(last_level), [0], 100))
    return lookahead


def test_the_window_rolls_and_its_columns_become_ngrams_of_the_next_batch() -> None:
    # Column 0 was 100 100 100 and got 200, so after 100 the pool knows 100 100 200.
    assert table(drafted(second_step(), [1, 2, 3, 40, 100]), n_past=11) == [
        "100 11 1 | 0 1 2 3 4 5 6 7",
        "100 12 1 | 6",  # the n-gram, in the first verification sequence
        "100 13 1 | 6",
        "200 14 1 | 6",
        "101 12 0 | 2 3 4 5",
        "102 13 0 | 3 4 5",
        "103 14 0 | 4 5",
        "104 15 0 | 5",
        "100 12 0 | 1",
        "101 13 0 | 2",
        "102 14 0 | 3",
        "103 15 0 | 4",
        "104 16 0 | 5",
        "200 13 1 | 1",
        "201 14 1 | 2",
        "202 15 1 | 3",
        "203 16 1 | 4",
        "204 17 1 | 5",
    ]


def test_ngrams_come_level_by_level_before_the_window() -> None:
    lookahead = second_step()
    lookahead._pool.add(100, (7, 8, 9))
    assert table(drafted(lookahead, [100]), n_past=0)[1:7] == [
        "100 1 1 | 6",
        "7 1 1 | 7",
        "100 2 1 | 6",
        "8 2 1 | 7",
        "200 3 1 | 6",
        "9 3 1 | 7",
    ]


def test_each_further_accepted_token_rolls_the_window_and_repeats_the_new_level() -> None:
    lookahead = second_step()
    tree = drafted(lookahead, [1, 2, 3, 40, 100])
    fresh = dict(zip(range(13, 18), range(300, 305), strict=True))
    lookahead.observe(Step(tree, ScriptedOutput(fresh), [0, 1, 2], 55))
    # Levels were (100.., 100.., 200..); the step made them (100.., 200.., 300..), and each of two
    # accepted tokens dropped the oldest and put the new oldest last.
    assert lookahead._levels == [
        [300, 301, 302, 303, 304],
        [200, 201, 202, 203, 204],
        [300, 301, 302, 303, 304],
    ]


def test_no_window_is_drafted_without_room() -> None:
    tree = TokenTree(40)
    started().draft([40], tree, DraftBudget(max_nodes=13))
    assert len(tree) == 1


def test_the_pool_is_a_ring_buffer_without_duplicates() -> None:
    pool = NgramPool(2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(9, rest)
    assert pool.starting_with(9) == [(3,), (2,)]
    pool.add(9, (4,))
    assert pool.starting_with(9) == [(3,), (4,)]
    assert pool.starting_with(8) == []


PEER_DATA = os.environ.get("SPECULATION_PEER_DATA", "")
STORIES = Path(PEER_DATA) / "models" / "stories260K-F32.gguf"
GOLDEN = Path(PEER_DATA) / "golden"
NEWLINE = 13  # the token of "\n" in that model

Batch = list[list[object]]


@pytest.mark.skipif(
    not PEER_DATA or not STORIES.exists(),
    reason="SPECULATION_PEER_DATA names no directory with the recorded runs",
)
@pytest.mark.parametrize(
    ("recording", "method", "n_batches"),
    [
        ("lookahead-w5n4g2.jsonl", "lookahead:window=5,ngram=4,guesses=2", 143),
        ("lookahead-w15n5g15.jsonl", "lookahead:window=15,ngram=5,guesses=15", 117),
    ],
)
def test_batches_equal_those_of_llama_lookahead_row_for_row(
    recording: str, method: str, n_batches: int, tmp_path: Path
) -> None:
    """Compared from the third line on: we prefill the prompt differently, in one batch fewer.

    The recordings were read from a line-based log in which the text of a newline token breaks its
    line, so they lack the rows of that token. A batch that starts with it was not separated from
    the one before: its line holds that batch, then its own rows twice. ``as_recorded`` does the
    same to ours; everything else must be equal.
    """
    trace = tmp_path / "trace.jsonl"
    params = ContextParams(n_ctx=512, n_threads=1, flash_attn="on")  # as recorded
    with Engine.load(STORIES, params, trace_batches=trace) as engine:
        prompt = "Once upon a time, there was a little girl named Lily."
        engine.generate(prompt, method=method, max_tokens=202).run()
    ours = as_recorded([json.loads(line) for line in trace.read_text().splitlines()])
    theirs = [json.loads(line) for line in (GOLDEN / recording).read_text().splitlines()]
    assert len(ours) + 1 == len(theirs) == n_batches
    for i in range(2, n_batches):
        assert ours[i - 1] == theirs[i], f"batch {i}"


def as_recorded(batches: list[Batch]) -> list[Batch]:
    lines: list[Batch] = []
    for batch in batches:
        rows = [row for row in batch if row[0] != NEWLINE]
        lines.append([*lines[-1], *rows, *rows] if batch[0][0] == NEWLINE else rows)
    return lines
