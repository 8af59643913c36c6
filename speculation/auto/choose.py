"""Chooses among the drafts of all texts in a batch, by the measured cost of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from batching.cache import SequenceCache
from batching.clock import now
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.selection import select
from speculation.drafter import DraftBudget, Drafter
from speculation.drafting.cost import Cost


class Drafted(Protocol):
    """A text with its drafts for a step. Implemented by ``speculation.text.Text``."""

    tokens: list[int]
    cache: SequenceCache
    tree: TokenTree
    budget: DraftBudget
    chooser: Drafter | None
    draft_seconds: float


def choose(texts: Sequence[Drafted], prompt_rows: int = 0, max_rows: int = NO_LIMIT) -> None:
    """Keep of the texts' trees the drafts that are worth decoding together, up to ``max_rows``.

    A method with parameters of its own decodes all that it drafted: those rows are given, as are
    ``prompt_rows``.
    """
    open_texts = [text for text in texts if text.chooser is not None and len(text.tree) > 1]
    if not open_texts:
        return
    start = now()
    choosers = [text.chooser for text in open_texts if text.chooser is not None]
    cost = choosers[0].cost
    assert cost is not None
    curve = cost.curve(len(open_texts[0].tokens) - 1)
    n_rows = prompt_rows + sum([len(text.tree) for text in texts])
    n_open = sum([len(text.tree) for text in open_texts])
    table = curve.table
    if n_rows >= len(table):
        table = table + [curve.at(n) for n in range(len(table), n_rows + 1)]
    chosen = select(
        [text.tree for text in open_texts],
        [text.budget for text in open_texts],
        table[: max_rows + 1],
        other_texts=len(texts) - len(open_texts),
        other_rows=n_rows - n_open,
        last_rows=cost.last_rows,
        change_seconds=cost.change(curve, n_rows - n_open + len(open_texts)),
        overhead_seconds=cost.overhead * len(texts),
    )
    for text, chooser, nodes in zip(open_texts, choosers, chosen, strict=True):
        chooser.keep(text.tree, nodes)
    spent = (now() - start) / len(open_texts)
    for text in open_texts:
        text.draft_seconds += spent


def give_one_length(texts: Sequence[Drafted], cost: Cost) -> None:
    """Give the drafts of a recurrent model's texts one length, and some texts none, so that they
    can be taken back (``rows.rows_back``). Does nothing for other models.

    Such a model decodes the texts without drafts first, then those with drafts. So of all lengths
    the one with the most expected tokens per second is chosen.
    """
    if not texts or texts[0].cache.target.n_rewind == NO_LIMIT:
        return
    curve = cost.curve(0)

    def n_drafts(text: Drafted) -> int:
        return 0 if text.cache.n_deferred else len(text.tree) - 1

    def expected(tree: TokenTree, n: int) -> float:
        # Sampled drafts must not be chosen by how likely they are: they would be other samples.
        return n if tree.draft_probs else sum(tree.path_probs()[1 : n + 1])

    def worth(n: int) -> float:
        drafted = [text.tree for text in texts if n_drafts(text) >= n]
        seconds = curve.at(len(texts) - len(drafted)) + curve.at((1 + n) * len(drafted))
        return (len(texts) + sum([expected(tree, n) for tree in drafted])) / seconds

    if not any(len(text.tree) > 1 for text in texts):
        return
    n = max(sorted({0, *map(n_drafts, texts)}), key=worth)
    for text in texts:
        if len(text.tree) > 1:
            keep = text.tree.keep if text.chooser is None else partial(text.chooser.keep, text.tree)
            keep(list(range(1, 1 + n)) if n_drafts(text) >= n else [])


def follow(
    texts: Sequence[Drafted], cost: Cost, parts: Sequence[int], n_prompt: int, seconds: float
) -> None:
    """Learn what a decode cost: rows of each of its ``parts``, ``n_prompt`` of them of prompts."""
    n_rows = sum(parts)
    chosen = [text for text in texts if text.chooser is not None]
    # Parts of different sizes are several decodes for a recurrent model. A prompt's rows are
    # cheaper, since they have no output.
    is_one = not texts or texts[0].cache.target.n_rewind == NO_LIMIT or len({*parts}) == 1
    if chosen and is_one and not n_prompt:
        cost.follow(n_rows, chosen[0].cache.n_past, seconds)
    else:
        cost.decoded(n_rows)
