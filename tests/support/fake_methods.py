"""Every method on the fake target, and what one writes there.

A method from outside takes part if ``SPECULATION_METHODS`` names it, as ``FILE.py:SPEC``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from batching.cache import SequenceCache
from batching.slots import Slots
from batching.target import Output
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.drafter import DraftBudget, Drafter, Requirements, Step
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.resources import Resources, Seat
from speculation.heads.base import HeadInContext
from speculation.heads.dflash import DFlashHead
from speculation.heads.medusa import N_CHOICES, Choices, MedusaHeads
from speculation.heads.redrafter import Beams, Level, ReDrafterHead
from speculation.meter import Stats
from speculation.methods import load_method_file, parse_method
from speculation.verify import Verifier
from tests.support.fake_target import (
    N_AHEAD,
    N_VOCAB,
    FakeSampler,
    FakeTarget,
    fake_logits,
    plain_text,
    prompt_of,
)
from tests.support.paths import ROOT
from tests.support.written import WrittenText, write

METHODS = (
    *(
        "ar auto auto:sources=draft auto:sources=suffix recycling recycling:nodes=7,depth=2 "
        "draft draft:p_min=0,p_path=0,draft_max=4 draft:width=3,nodes=9,p_min=0.05,draft_max=3 "
        "draft:width=4,nodes=5,p_min=0,draft_max=5 medusa medusa:nodes=40 redrafter "
        "redrafter:beams=1,length=3 auto:sources=medusa auto:sources=medusa+suffix eagle-1 "
        "eagle-1:choices=0.0.0/1.0/2,window=3 eagle-2 eagle-2:depth=3,top_k=3,nodes=7,window=2 "
        "eagle-2:top_k=1,nodes=4,window=0 eagle-3:depth=3,top_k=2,nodes=5 mtp:p_min=0,depth=3 "
        "dflash:top_k=2,nodes=5 auto:sources=eagle auto:sources=eagle+medusa+suffix "
        "auto:sources=redrafter+mtp+dflash prompt-lookup prompt-lookup:max_ngram=2,draft=7 "
        "prediction prediction:p_min=0.02,draft_max=5 auto:sources=prediction+suffix suffix "
        "suffix:memory=off,p_min=0.1,branches=4 suffix:p_min=0.02,branches=6,draft_max=5 "
        "jacobi:guesses=5 lookahead:window=5,ngram=4,guesses=2 "
        "lookahead:window=4,ngram=5,guesses=6 lookahead:window=1,ngram=3,guesses=1"
    ).split(),
    f"{ROOT / 'examples' / 'bigrams.py'}:spec",
    f"{ROOT / 'examples' / 'forks.py'}:spec",
    *os.environ.get("SPECULATION_METHODS", "").split(),
)


class RandomTrees(Drafter):
    """Grows any tree: random shape, merged or not, often along the likely continuation."""

    requires = Requirements(branches=30)

    def __init__(self, seed: int, *, orders_branches: bool = True) -> None:
        self._random = random.Random(seed)
        self._orders_branches = orders_branches

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        rng = self._random
        texts: dict[int, tuple[int, ...]] = {0: tuple(tokens)}
        parent = 0
        for _ in range(min(rng.randrange(16), budget.room(tree))):
            parent = rng.choice([parent, rng.choice(list(texts))])
            if rng.random() < 0.7:
                token = int(fake_logits(texts[parent]).argmax())
            else:
                token = rng.randrange(N_VOCAB)
            before = len(tree)
            node = tree.add(parent, token, merge=rng.random() < 0.7)
            if len(tree) > before:
                texts[node] = (*texts[parent], token)
            parent = node
        if self._orders_branches and rng.random() < 0.3:
            tree.branches = rng.sample(range(len(tree)), k=min(2, len(tree)))

    def observe(self, step: Step) -> None:
        assert step.path[0] == 0
        assert all(step.tree.parents[b] == a for a, b in pairwise(step.path))


class FakeHeads(MedusaHeads):
    """Medusa heads that read the next tokens from a fake state. The correct token is often the
    first choice, otherwise the second or third."""

    def __init__(self) -> None:
        pass

    def top(self, parts: Sequence[Floats]) -> list[list[Choices]]:
        return [[self._choices(hidden, head) for head in range(N_AHEAD - 1)] for hidden in parts]

    def _choices(self, hidden: Floats, head: int) -> Choices:
        correct, rank = int(hidden[head + 1]), (0, 0, 1, 2)[int(hidden.sum() + head) % 4]
        others = [token for token in range(N_VOCAB) if token != correct]
        probs = [0.5, 0.3, 0.15, *[0.05 / 9] * 9]
        found = list(zip([*others[:rank], correct, *others[rank:]], probs, strict=False))
        return found[:N_CHOICES]


class FakeReDrafterHead(ReDrafterHead):
    """Logits that depend on the path from the text's last token, mostly for the correct token."""

    tokens = None

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def after(self, hidden: Floats, path: Sequence[int]) -> Floats:
        rng = np.random.default_rng([self._seed, *path])
        logits: Floats = rng.normal(0, 2, N_VOCAB).astype(np.float32)
        logits[hidden[len(path) : len(path) + 1].astype(int)] += 3
        return logits

    def advance(self, parts: Sequence[Beams]) -> list[Level]:
        return [self._advance(*part) for part in parts]

    def _advance(self, hidden: Floats, tokens: Sequence[int], above: Any) -> Level:
        paths = np.empty(len(tokens), object)  # the state: the path from the root
        for i, token in enumerate(tokens):
            paths[i] = (token,) if above is None else (*above[i], token)
        return Level(np.stack([self.after(hidden, path) for path in paths]), paths, hidden)


class FakeEagleHead(HeadInContext):
    """A head whose context predicts by ``logits``; its rows hold token and state, (n, 1 + 5)."""

    needs_hidden = True

    def __init__(
        self, logits: Callable[[tuple[int, ...]], Floats] = fake_logits, n_ctx: int = 512
    ) -> None:
        self._context = FakeTarget(logits=logits, n_ctx=n_ctx)
        self.context.want_hidden(True)

    def states_of(self, output: Output, row: int) -> Floats:
        return output.hidden(row)

    def of_slot(self, index: int, n_slots: int) -> FakeEagleHead:
        return self

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        return np.column_stack([np.array(tokens, np.float32), states])


class FakeBlockHead(FakeEagleHead, DFlashHead):
    """A head that drafts blocks of four tokens, any."""

    mask, n_drafts = 0, 4


@cache
def draft_logits(prefix: tuple[int, ...]) -> Floats:
    return fake_logits(prefix) + 0.5 * fake_logits((*prefix, 0))


def resources(
    method: str = "", n_rewind: int = NO_LIMIT, draft_rewind: int = NO_LIMIT, n_ctx: int = 512
) -> Resources:
    """Nearly free rows, so that auto tries everything, a draft model whose drafts are mostly
    accepted, and the heads that ``method`` names; ``n_ctx`` is of their own contexts."""
    heads: dict[str, Callable[[], Any]] = {
        "medusa": FakeHeads,
        "redrafter": FakeReDrafterHead,
        "eagle-3": lambda: FakeEagleHead(draft_logits, n_ctx),
        "eagle": lambda: FakeEagleHead(draft_logits, n_ctx),
        "mtp": lambda: FakeEagleHead(draft_logits, n_ctx),
        "dflash": lambda: FakeBlockHead(draft_logits, n_ctx),
    }
    named = "medusa+eagle" if method == "auto" else method
    return Resources(
        lambda: Cost(CostCurve.linear(1.0, 0.003)),
        n_rewind=n_rewind,
        seat=Seat(
            FakeTarget(logits=draft_logits, n_rewind=draft_rewind, n_ctx=n_ctx),
            {kind: make() for kind, make in heads.items() if kind in named},
        ),
    )


def drafters_of(
    method: str, seed: int, n_rewind: int = NO_LIMIT, shared: Resources | None = None
) -> list[Drafter]:
    if method == "random-trees":
        return [RandomTrees(seed)]
    if method == "unnamed-trees":
        return [RandomTrees(seed, orders_branches=False)]
    if method == "all-in-one-tree":
        copying = ("suffix:branches=3,p_min=0.1", "jacobi:guesses=3")
        return [RandomTrees(seed), *[one for of in copying for one in parse_method(of).drafters()]]
    shared = shared or resources(method, n_rewind)
    if "prediction" in method:
        shared = shared.for_text(prediction=edited(plain_text(seed), seed))
    return parse_method(load_method_file(method)).drafters(shared)


def edited(text: list[int], seed: int) -> tuple[int, ...]:
    """``text`` with some tokens left out, and others in between."""
    rng = random.Random(seed)
    kept = [token for token in text if rng.random() < 0.9]
    return tuple(t for token in kept for t in ((token, token // 2) if token == 3 else (token,)))


def run(
    method: str,
    seed: int,
    temperature: float = 0.0,
    penalty: float = 0.0,
    n_ctx: int = 400,
    n_tokens: int = 32,
    n_rewind: int = NO_LIMIT,
    drafters: list[Drafter] | None = None,
    verifier: Verifier | None = None,
) -> tuple[list[int], Stats, SequenceCache]:
    """The text of ``method``, or with ``drafters``, for the prompt and sampler that ``seed`` stands
    for."""
    prompt = prompt_of(seed)
    drafters = drafters_of(method, seed, n_rewind) if drafters is None else drafters
    target = FakeTarget(n_ctx=n_ctx, n_rewind=n_rewind)
    slots = Slots(target, 1)
    text = WrittenText(
        prompt,
        slots.slots[0],
        drafters,
        sampler=FakeSampler(temperature, seed, penalty),
        n_tokens=n_tokens,
        verifier=verifier,
    )
    steps, cache, found = list(write(text, slots)), text.cache, text.reply.token_ids
    assert [token for step in steps for token in step.tokens] == found
    assert [step.finish_reason is not None for step in steps] == [False] * (len(steps) - 1) + [True]
    # Whatever was drafted, each sequence now holds exactly the text without its last token.
    assert cache.tokens == (prompt + found)[: cache.n_past]
    assert cache.n_past == len(prompt) + len(found) - 1
    assert all(target.tokens_of(s) == cache.tokens for s in range(cache.n_seq))
    if not (text.needed.hidden or text.needed.layers or n_rewind < NO_LIMIT):
        assert len(target.decoded) == text.reply.stats.n_steps
        assert len(target.decoded[0]) >= len(prompt)
    return found, text.reply.stats, cache
