"""Faults of methods from outside the package: each ends the text that uses it, and no other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import TreeError
from batching.together import Work
from batching.tree import TokenTree
from speculation.auto.source import Source
from speculation.drafter import AsSource, DraftBudget, Drafter, Method, MethodSpec, NoParams
from speculation.engine import Engine
from speculation.methods import METHODS
from speculation.methods.table import parse_method
from tests.support.exact import EXACT, PROMPT, endless

Draft = Callable[[TokenTree, DraftBudget], Any]


class Outsider(Drafter):
    """Drafts with the function it is given."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Any:
        return self._draft(tree, budget)


def outsider(drafter: Drafter) -> Method:
    as_source = AsSource(lambda resources: NoParams())
    spec = MethodSpec("odd", "Odd", lambda *_: drafter, as_source=as_source)
    return Method(spec, NoParams())


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT, parallel=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def settings(engine: Engine) -> dict[str, Any]:
    return {"max_tokens": 30, "sampling": endless(engine)}


@pytest.fixture(scope="module")
def plain(engine: Engine, settings: dict[str, Any]) -> list[int]:
    return engine.generate(PROMPT, method="ar", **settings).run().token_ids


def node(**fields: Any) -> Draft:
    """Drafts two tokens, and sets fields of the second."""

    def draft(tree: TokenTree, budget: DraftBudget) -> None:
        tree.add_chain(0, [5, 6])
        for name, value in fields.items():
            getattr(tree, name)[2] = value

    return draft


def whole(**fields: Any) -> Draft:
    """Drafts two tokens, and sets fields of the tree."""

    def draft(tree: TokenTree, budget: DraftBudget) -> None:
        tree.add_chain(0, [5, 6])
        for name, value in fields.items():
            setattr(tree, name, value)

    return draft


def many(tree: TokenTree, budget: DraftBudget) -> None:
    tree.add_chain(0, [5] * (budget.max_nodes + 1))


def working(*work: Any) -> Draft:
    return lambda tree, budget: iter(work)


UNSOUND: list[tuple[str, Draft]] = [
    ("node 2 is token 305 of a vocabulary of 305", node(tokens=305)),
    ("node 2 is token -1", node(tokens=-1)),
    ("node 2 is token 1099511627776", node(tokens=2**40)),
    ("'float' object cannot be interpreted as an integer", node(tokens=5.5)),
    ("not 'NoneType'", node(probs=None)),
    ("node 2 has probability nan", node(probs=math.nan)),
    ("node 2 has probability 2.0", node(probs=2)),
    ("node 1 is in depth 2 below node 2", whole(parents=[-1, 2, 0], depths=[0, 2, 1])),
    ("node 1 is in depth 1 below node 2", whole(parents=[-1, 2, 1])),
    ("node 2 is in depth 2 below node -1", node(parents=-1)),
    ("node 2 is in depth 7 below node 1", node(depths=7)),
    ("the root is not as it was", whole(tokens=[7, 5, 6])),
    ("the root is not as it was", whole(outputs=[False, True, True])),
    ("zip.. argument 4 is shorter", whole(probs=[1.0])),
    ("9 of 3 nodes are drafts", whole(n_drafted=9)),
    ("in -5 sequences", whole(n_seq=-5)),
    ("needs 1000000 sequences", whole(n_seq=10**6)),
    ("branches end at .99. in 3 nodes", whole(branches=[99])),
    (r"\d+ nodes below the root where \d+ fit", many),
]
RAISED: list[tuple[str, Draft]] = [
    ("division by zero", lambda tree, budget: 1 / 0),
    ("SystemExit", lambda tree, budget: sys.exit()),
    ("SystemExit", lambda tree, budget: (sys.exit() for _ in "a")),
    ("'int' object is not iterable", lambda tree, budget: 5),
    ("'NoneType' object has no attribute 'together'", working(None)),
    ("unhashable", working(Work(lambda parts: parts, 1, []))),  # type: ignore[arg-type]
    ("zip.. argument 2 is shorter", working(Work(lambda parts: [], 1))),
    ("division by zero", working(Work(lambda parts: 1 / 0, 1))),  # type: ignore[arg-type, return-value]
]


@pytest.mark.parametrize("name", ["odd", "auto"])
def test_drafts_that_cannot_be_decoded_end_one_text_with_the_methods_name(
    engine: Engine, settings: dict[str, Any], plain: list[int], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Source, "is_worth_asking", lambda *_: True)
    for message, draft in UNSOUND + RAISED:
        method = outsider(Outsider(draft))
        if name == "auto":
            monkeypatch.setitem(METHODS._specs, "odd", method.spec)
            method = parse_method("auto:sources=odd")
        others = [engine.submit(PROMPT, method=other, **settings) for other in ("ar", "suffix")]
        next(others[0])
        one = engine.submit(PROMPT, method=method, **settings)
        # If the others have ended by then, it is resumed alone, and that is what fails.
        with pytest.raises(Exception, match=f"{message}|'tuple_iterator' object has no") as found:
            one.run()
        if (message, draft) in UNSOUND:
            assert isinstance(found.value, TreeError)
        if isinstance(found.value, TreeError):
            starts = "method odd has a fault: ", "the method needs 1000000 sequences"
            assert str(found.value).startswith(starts)
        assert [other.run().token_ids for other in others] == [plain, plain]


def test_odd_numbers_and_kept_trees_are_harmless(
    engine: Engine, settings: dict[str, Any], plain: list[int]
) -> None:
    def draft(tree: TokenTree, budget: DraftBudget) -> None:
        seen = len(plain) - budget.max_depth - 1
        for _ in range(3):
            tree.add(0, np.array(plain)[seen], prob=np.float32(0.5), merge=False)  # type: ignore[arg-type]

    text = engine.generate(PROMPT, method=outsider(Outsider(draft)), **settings).run()
    assert text.token_ids == plain
    assert text.stats.n_accepted == 15
    assert {type(token) for token in text.token_ids} == {int}
    kept: list[TokenTree] = []

    def changing(tree: TokenTree, budget: DraftBudget) -> None:
        for other in kept:
            other.tokens[:], other.parents[:] = [999], [5]
        kept.append(tree)
        tree.add_chain(0, [5, 6])

    method = outsider(Outsider(changing))  # one drafter for all texts
    texts = [engine.submit(PROMPT, method=method, **settings) for _ in range(3)]
    assert [text.run().token_ids for text in texts] == [plain] * 3
