"""Chooses among the drafts of all texts in a batch, by the measured cost of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from batching.clock import now
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.selection import select
from speculation.drafting.cost import Cost
from speculation.sequence import TokenSequence


def choose(texts: Sequence[TokenSequence], prompt_rows: int = 0, max_rows: int = NO_LIMIT) -> None:
    """Keep of the texts' trees the drafts that are worth decoding together, up to ``max_rows``.

    A method with parameters of its own decodes all that it drafted: those rows are given, as are
    ``prompt_rows``.
    """
    chosen = [(t, t.chooser) for t in texts if t.chooser is not None and len(t.tree) > 1]
    if not chosen:
        return
    start = now()
    cost = chosen[0][1].cost
    assert cost is not None
    curve = cost.curve(len(chosen[0][0].tokens) - 1)
    n_drafts = sum([len(text.tree) - 1 for text, _ in chosen])
    plain_rows = prompt_rows + sum([len(text.tree) for text in texts]) - n_drafts
    selected = select(
        [text.tree for text, _ in chosen],
        [text.budget for text, _ in chosen],
        [curve.at(n) for n in range(min(max_rows, plain_rows + n_drafts) + 1)],
        n_texts=len(texts),
        plain_rows=plain_rows,
        last_rows=cost.last_rows,
        change_seconds=cost.change(curve, plain_rows),
        overhead_seconds=cost.overhead.value * len(texts),
    )
    for (text, chooser), nodes in zip(chosen, selected, strict=True):
        with text:
            chooser.keep(text.tree, nodes)
    spent = (now() - start) / len(chosen)
    for text, _ in chosen:
        text.meter.draft_seconds += spent


def give_one_length(texts: Sequence[TokenSequence], cost: Cost) -> None:
    """Give the drafts of a recurrent model's texts one length, and some texts none, so that they
    can be taken back (``rows.rows_back``). Does nothing for other models.

    Such a model decodes the texts without drafts first, then those with drafts. So of all lengths
    the one with the most expected tokens per second is chosen.
    """
    drafted = [text for text in texts if len(text.tree) > 1]
    if not drafted or texts[0].cache.target.n_rewind == NO_LIMIT:
        return
    curve = cost.curve(0)

    def n_drafts(text: TokenSequence) -> int:
        return 0 if text.cache.n_deferred else len(text.tree) - 1

    def expected(tree: TokenTree, n: int) -> float:
        # Sampled drafts must not be chosen by how likely they are: they would be other samples.
        return n if tree.draft_probs else sum(tree.path_probs()[1 : n + 1])

    def rate(n: int) -> float:
        trees = [text.tree for text in texts if n_drafts(text) >= n]
        seconds = curve.at(len(texts) - len(trees)) + curve.at((1 + n) * len(trees))
        return (len(texts) + sum([expected(tree, n) for tree in trees])) / seconds

    n = max(sorted({0, *map(n_drafts, texts)}), key=rate)
    for text in drafted:
        keep = text.tree.keep if text.chooser is None else partial(text.chooser.keep, text.tree)
        with text:
            keep(list(range(1, 1 + n)) if n_drafts(text) >= n else [])


def follow(
    texts: Sequence[TokenSequence], cost: Cost, parts: Sequence[int], n_prompt: int, seconds: float
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
