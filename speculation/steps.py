"""The steps of a text, for whoever wants to see how its tokens came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batching.tree import TokenTree
from speculation.stats import STRUCTURE


class Draft(NamedTuple):
    """A draft of a step.

    parent  the number of the draft before it, or -1 for the root, the text's last token
    source  who drafted it: a source of ``auto``, ``structure``, or the method
    """

    parent: int
    token: int
    source: str


class RecordedStep(NamedTuple):
    """A step of a text. Seconds are wall-clock, without the loop's own: some microseconds.

    draft_seconds   drafting and building the batch's rows
    decode_seconds  the decode, of all rows in the batch
    accept_seconds  verifying, committing, and what the drafters learn
    n_rows          rows of this text's tree; the first decode has those of the prompt's end, too
    n_texts         texts with rows in the batch, including those whose prompts are read
    drafts          in the order of their rows
    path            numbers of the drafts that became text
    bonus           the token that the model added; None if the text ended before it

    In a run of plain steps, each decode is timed; drafting and accepting are the run's average.
    """

    draft_seconds: float
    decode_seconds: float
    accept_seconds: float
    n_rows: int
    n_texts: int = 1
    drafts: Sequence[Draft] = ()
    path: Sequence[int] = ()
    bonus: int | None = None


def drafts_of(tree: TokenTree, method: str, forced: Sequence[int] = ()) -> list[Draft]:
    """The drafts of ``tree``, which a text's ``method`` made.

    ``forced`` are the tokens that the text's structure forces. Drafts of them are its own, unless
    ``auto`` has said otherwise.
    """
    names = dict.fromkeys(tree.follow(0, forced), STRUCTURE) | tree.sources
    return [
        Draft(tree.parents[node] - 1, tree.tokens[node], names.get(node, method))
        for node in range(1, tree.n_drafted + 1)
    ]
