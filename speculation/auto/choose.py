"""Chooses among the drafts of all sequences in a batch, by the measured cost of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batching.clock import now
from batching.rows import Rows
from batching.tree import NO_LIMIT, TokenTree
from speculation.auto.selection import select
from speculation.drafting.cost import Prices
from speculation.sequence import TokenSequence


def choose(
    sequences: Sequence[TokenSequence],
    pieces: Mapping[TokenSequence, Rows],
    prices: Prices | None,
    max_rows: int = NO_LIMIT,
) -> None:
    """Keep of the sequences' trees the drafts that are worth decoding together and beside
    ``pieces`` of prompts: at most ``max_rows`` if there are several sequences."""
    if prices is None:
        return
    if len(sequences) == 1 and not pieces:
        _choose_nodes(sequences, 0, prices, NO_LIMIT)
        return
    n_prompt = sum(map(len, pieces.values())) + sum([one.cache.n_deferred for one in sequences])
    _choose_nodes(sequences, n_prompt, prices, max_rows)
    _give_one_length(sequences, prices)


def _choose_nodes(
    sequences: Sequence[TokenSequence], prompt_rows: int, prices: Prices, max_rows: int
) -> None:
    """Other methods decode all that they drafted: those rows are given, as ``prompt_rows`` are."""
    chosen = [one for one in sequences if one.chooser is not None and len(one.tree) > 1]
    if not chosen:
        return
    start = now()
    n_drafts = sum([len(one.tree) - 1 for one in chosen])
    plain_rows = prompt_rows + sum([len(one.tree) for one in sequences]) - n_drafts
    selected = select(
        [one.tree for one in chosen],
        [one.chooser.budget for one in chosen if one.chooser is not None],
        [prices.curve.at(n) for n in range(min(max_rows, plain_rows + n_drafts) + 1)],
        n_texts=len(sequences),
        plain_rows=plain_rows,
        last_rows=prices.last_rows,
        change_seconds=prices.change_from(plain_rows),
        overhead_seconds=prices.overhead * len(sequences),
    )
    for one, nodes in zip(chosen, selected, strict=True):
        with one:
            one.keep(nodes)
    spent = (now() - start) / len(chosen)
    for one in chosen:
        one.meter.draft_seconds += spent


def _give_one_length(sequences: Sequence[TokenSequence], prices: Prices) -> None:
    """Give the drafts of a recurrent model's sequences one length, and some sequences none, so that
    they can be taken back (``rows.rows_back``). Does nothing for other models.

    Such a model decodes the sequences without drafts first, then those with drafts. So of all
    lengths the one with the most expected tokens per second is chosen.
    """
    drafted = [one for one in sequences if len(one.tree) > 1]
    if not drafted or not sequences[0].cache.is_limited:
        return
    curve = prices.curve

    def n_drafts(one: TokenSequence) -> int:
        return 0 if one.cache.n_deferred else len(one.tree) - 1

    def expected(tree: TokenTree, n: int) -> float:
        # Sampled drafts must not be chosen by how likely they are: they would be other samples.
        return n if tree.draft_probs else sum(tree.path_probs()[1 : n + 1])

    def rate(n: int) -> float:
        trees = [one.tree for one in sequences if n_drafts(one) >= n]
        seconds = curve.at(len(sequences) - len(trees)) + curve.at((1 + n) * len(trees))
        return (len(sequences) + sum([expected(tree, n) for tree in trees])) / seconds

    n = max(sorted({0, *map(n_drafts, sequences)}), key=rate)
    for one in drafted:
        with one:
            one.keep(list(range(1, 1 + n)) if n_drafts(one) >= n else [])


def follow(prices: Prices, rows: Mapping[TokenSequence, Rows], seconds: float) -> None:
    """Learn what a decode of ``rows`` cost."""
    n_rows = sum(map(len, rows.values()))
    chosen = [one for one in rows if one.reading is None and one.chooser is not None]
    # Parts of different sizes are several decodes for a recurrent model. A prompt's rows are
    # cheaper, since they have no output.
    has_prompts = any(one.reading is not None or one.cache.n_deferred for one in rows)
    is_one = len({len(own) for own in rows.values()}) == 1
    if chosen and not has_prompts and (is_one or not chosen[0].cache.is_limited):
        prices.cost.follow(n_rows, prices.n_past, seconds)
    else:
        prices.cost.decoded(n_rows)
