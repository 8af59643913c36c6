"""The interface of a method: what it is, what it needs, what it drafts and what it sees.

A method is a ``MethodSpec``, which makes a ``Drafter`` for each text. In every step the decode loop
asks the drafter to grow the step's token tree within a ``DraftBudget``, and shows it the ``Step``
that came of it. ``docs/method.md`` builds one from nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batching.cache import StateReader
from batching.target import Output
from batching.tree import NO_LIMIT, TokenTree
from speculation.resources import Resources
from speculation.verify import Match, Verifier


class DraftBudget(NamedTuple):
    """What a drafter may add to the tree of one step.

    max_nodes      drafts in the whole tree, at most
    max_depth      longest path from the root, in drafts
    max_leaves     ends of branches, at most
    min_path_prob  path probability below which a node does not pay. 0 means that nobody selects
                   among the drafts afterwards, so the drafter's own parameters decide how many
    chain_only     only one path will be decoded, because the target has a single sequence
    """

    max_nodes: int = NO_LIMIT
    max_depth: int = NO_LIMIT
    max_leaves: int = NO_LIMIT
    min_path_prob: float = 0.0
    chain_only: bool = False

    def room(self, tree: TokenTree) -> int:
        """How many nodes may still be added to ``tree``."""
        return self.max_nodes + 1 - len(tree.tokens)


class Step:
    """What one decode led to.

    tree    the tree that was decoded
    output  its logits, by node; valid until the next decode
    path    accepted nodes, the root first, so ``path[0] == 0``
    bonus   the token sampled after the path's last node: the root of the next tree
    decode_seconds  wall-clock time of the tree's decode
    tokens  what was added to the text: the accepted drafts, then the bonus token
    """

    __slots__ = ("bonus", "decode_seconds", "output", "path", "tokens", "tree")

    def __init__(
        self,
        tree: TokenTree,
        output: Output,
        path: list[int],
        bonus: int,
        decode_seconds: float = 0.0,
    ) -> None:
        self.tree = tree
        self.output = output
        self.path = path
        self.bonus = bonus
        self.decode_seconds = decode_seconds
        self.tokens = [tree.tokens[node] for node in path[1:]]
        self.tokens.append(bonus)


class IdleHint(NamedTuple):
    """A drafter's word that it will draft nothing for some steps, so that they may be plain steps.

    until    ask again after any of these tokens, or after a token already seen in these steps;
             None = after no token
    n_steps  ask again after so many steps at the latest
    """

    until: Container[int] | None
    n_steps: int


class PlainSteps(NamedTuple):
    """Steps that were decoded without drafts, one token each.

    tokens   the tokens they made
    seconds  wall-clock time of each decode
    """

    tokens: list[int]
    seconds: list[float]


@dataclass(frozen=True)
class Requirements:
    """What a drafter needs of the target and its context.

    hidden         final hidden states of every row, ``step.output.hidden``. The prompt is read
                   without them, so the first states seen are those of the first step
    layers         layers whose inputs (auxiliary hidden states) are read from
                   ``step.output.aux_hidden_states``
    prompt_reader  what reads the target's states of the prompt, if anything does
    rows           rows that one step must be able to have; above 1 they are branches side by side
    branches       branches it may draft at most; 0 for chains
    """

    hidden: bool = False
    layers: tuple[int, ...] = ()
    prompt_reader: StateReader | None = None
    rows: int = 1
    branches: int = 0

    @property
    def reads_states(self) -> bool:
        """Whether any states of the target are read, so that every row has output."""
        return self.hidden or bool(self.layers)

    @staticmethod
    def of_all(some: Iterable[Requirements]) -> Requirements:
        """What several drafters need together."""
        every = list(some)
        readers = [one.prompt_reader for one in every if one.prompt_reader is not None]
        return Requirements(
            hidden=any(one.hidden for one in every),
            layers=_union(one.layers for one in every),
            prompt_reader=_Readers(readers) if len(readers) > 1 else next(iter(readers), None),
            rows=max((one.rows for one in every), default=1),
            branches=sum(one.branches for one in every),
        )


class Drafter:
    """Drafts for one text. A method subclasses it and overrides what it needs.

    requires  what it needs of the target, known when it is made
    """

    requires: Requirements = Requirements()

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts with ``prompt``, whose last token is the first tree's root."""

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        """Add drafts to ``tree``, within ``budget``.

        ``tokens`` is the whole text so far, prompt included; its last token is the root.
        """

    def observe(self, step: Step) -> None:
        """See what became of a step, whether this drafter drafted in it or not."""

    def idle(self, tokens: Sequence[int]) -> IdleHint | None:
        """Whether it has nothing to draft after ``tokens``, the whole text, and for how long."""
        return None

    def observe_plain(self, steps: PlainSteps) -> None:
        """See plain steps that followed its idle hint; ``observe`` does not see them."""

    def explore(self, tree: TokenTree, budget: DraftBudget) -> None:
        """Add rows that are only looked at, after the drafts of a shared tree were selected."""

    @property
    def explored_rows(self) -> int:
        """Rows that ``explore`` adds; 0 for a drafter that only drafts."""
        return 0

    @property
    def explored_branches(self) -> int:
        """Branches that those rows end."""
        return 0


@dataclass(frozen=True)
class AsSource:
    """How a method joins ``auto``.

    params  the parameters it has there, or None where it stays out: nothing that it needs is
            loaded, or it cannot pay at the costs measured here
    name    what ``auto:sources=`` calls it; the method's own name by default
    """

    params: Callable[[Resources], Any]
    name: str = ""


@dataclass(frozen=True)
class NoParams:
    """Nothing to set."""


@dataclass(frozen=True)
class MethodSpec:
    """All there is to know of a method. One per method, in the drafter's own file.

    name       what users write, followed by ``:parameter=value,…`` if need be
    title      what the page shows
    make       the drafter for a text, from parameters and the engine's resources; None for a method
               that drafts nothing there. Raises InvalidParameter, MissingResource
    params     a frozen dataclass; its docstring describes each field on a line of its own
    verifier   how drafts are verified, from the same two
    as_source  how the method joins ``auto``; None = not at all
    check      raises InvalidParameter for parameters that only the finished table can judge
    """

    name: str
    title: str
    make: Callable[[Any, Resources], Drafter | None]
    params: type[Any] = NoParams
    verifier: Callable[[Any, Resources], Verifier] = lambda params, resources: Match()
    as_source: AsSource | None = None
    check: Callable[[Any], None] = lambda params: None

    @property
    def summary(self) -> str:
        """What the method does: the first line of the docstring of the module that makes it."""
        module = inspect.getmodule(inspect.unwrap(getattr(self.make, "func", self.make)))
        return (inspect.getdoc(module) or self.title).splitlines()[0]

    @property
    def source_name(self) -> str:
        """What ``auto:sources=`` calls it."""
        return (self.as_source.name if self.as_source is not None else "") or self.name


class _Readers:
    """Several readers of a prompt's states as one."""

    def __init__(self, readers: Sequence[StateReader]) -> None:
        self._readers = readers
        self.needs_hidden = any(reader.needs_hidden for reader in readers)
        self.needs_layers = _union(reader.needs_layers for reader in readers)

    def begin(self, tokens: Sequence[int]) -> int:
        return min([reader.begin(tokens) for reader in self._readers])

    def read(self, first: int, n: int, output: Output) -> None:
        for reader in self._readers:
            reader.read(first, n, output)


def _union(some: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({layer for layers in some for layer in layers}))
