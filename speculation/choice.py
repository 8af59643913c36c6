"""Chooses among the drafts of all texts in a batch, by the measured cost of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.cost import CostCurve
from speculation.auto.selection import select
from speculation.continuation import Continuation


def choose(texts: Sequence[Continuation], prompt_rows: int = 0, max_rows: int = NO_LIMIT) -> None:
    """Keep of the texts' trees the drafts that are worth decoding together, up to ``max_rows``.

    A method with parameters of its own decodes all that it drafted: those rows are given, as are
    ``prompt_rows``.
    """
    open_texts = [text for text in texts if text.chooser is not None and len(text.tree) > 1]
    if not open_texts:
        return
    start = perf_counter()
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
        extra_seconds=cost.extra(curve),
        overhead_seconds=cost.overhead * len(texts),
    )
    for text, chooser, nodes in zip(open_texts, choosers, chosen, strict=True):
        chooser.keep(text.tree, nodes)
    spent = (perf_counter() - start) / len(open_texts)
    for text in open_texts:
        text.draft_seconds += spent


def level(texts: Sequence[Continuation], curve: CostCurve) -> None:
    """Give the drafts of a recurrent model's texts one length, and some texts none, so that they
    can be taken back (``rows.rows_back``).

    Such a model decodes the texts without drafts first, then those with drafts. So of all lengths
    the one with the most expected tokens per second is chosen.
    """

    def n_drafts(text: Continuation) -> int:
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


def follow(texts: Sequence[Continuation], n_rows: int, seconds: float, n_steps: int = 1) -> None:
    """Learn what a decode cost, or each of ``n_steps`` plain ones: ``n_rows`` in ``seconds``."""
    for text in texts:
        if text.chooser is not None and text.chooser.cost is not None:
            text.chooser.cost.follow(n_rows, text.cache.n_past, seconds, n_steps)
            return
