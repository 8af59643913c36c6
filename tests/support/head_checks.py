"""Shared by tests of heads over hidden states: started heads, and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batching.draft_context import DraftContext
from batching.llama.context import Context
from batching.llama.model import Model
from batching.together import run
from batching.tree import Floats, TokenTree
from speculation.drafter import DraftBudget, Drafter, Step
from speculation.heads import load
from speculation.methods import METHODS
from tests.support.exact import EXACT
from tests.support.fake_target import FakeOutput, fake_logits

TEXT = (5, 270, 271, 272, 280)


def load_heads(paths: Iterable[Path], model: Model) -> dict[str, Any]:
    """The heads of any method in ``paths``, by method."""
    return load.load_heads(paths, model, METHODS.heads_kinds())


@contextmanager
def started(path: Path, target: Path, method: str) -> Iterator[Any]:
    """The head of a file, ready to draft for ``target``."""
    params = replace(EXACT, n_ctx=256, n_seq_max=8)
    with Model(target) as model, Context(model, params) as context:
        head = load_heads([path], model)[method]
        try:
            head.start(params, context)
            yield head
        finally:
            head.close()


def draft(drafter: Drafter, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
    drafting = drafter.draft(tokens, tree, budget)
    assert drafting is not None, "drafters with heads are coroutines"
    run(drafting)


def check_a_tree(
    head: Any,
    features: Floats,
    after: Callable[[Sequence[int], Floats], Floats],
    atol: float = 1e-4,
) -> tuple[Floats, Floats]:
    """Decode TEXT and a tree of two levels below it; each row must match ``after``.

    ``features``, (len(TEXT), width), are the target's states. ``after(tokens, states)`` is the
    state after the last of the tokens, (n_embd,), by the reference. Returns the state after TEXT,
    and the logits there.
    """
    states = run(head.encode(features))
    levels = DraftContext(head.context)
    levels.keep(0, 3)
    output = run(levels.extend(TEXT, head.inputs(TEXT, states)))
    root = output.hidden(levels.root_row).copy()
    logits = output.logits(levels.root_row).copy()
    np.testing.assert_allclose(root, after(TEXT, states), atol=atol)

    output = run(levels.level([0, 0], [7, 8], head.inputs([7, 8], np.stack([root, root]))))
    first = np.stack([output.hidden(row).copy() for row in range(2)])
    # Encoding between two levels must not disturb the tree.
    run(head.encode(features[:2]))
    output = run(levels.level([1, 0, 1], [9, 10, 11], head.inputs([9, 10, 11], first[[1, 0, 1]])))
    for row, path in enumerate([(8, 9), (7, 10), (8, 11)]):
        above = first[0 if path[0] == 7 else 1]
        expected = after([*TEXT, *path], np.stack([*states, root, above]))
        np.testing.assert_allclose(output.hidden(row), expected, atol=atol)
    return root, logits


def second_tree(drafter: Drafter, bonus: int, min_path_prob: float = 0.0) -> TokenTree:
    """What ``drafter`` drafts in the second step of a text, on the fake target's states.

    In the first step no state is known, so nothing is drafted; ``bonus`` follows.
    """
    text = [1, 2, 3]
    drafter.begin(text)
    tree = TokenTree(3)
    draft(drafter, text, tree, DraftBudget())
    assert len(tree) == 1
    output = FakeOutput([(1, 2, 3)], [True], fake_logits, True)
    drafter.observe(Step(tree, output, [0], bonus))
    tree = TokenTree(bonus)
    draft(drafter, [*text, bonus], tree, DraftBudget(min_path_prob=min_path_prob))
    return tree
