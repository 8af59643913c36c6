"""The interface for methods: MethodSpec, Drafter, DraftBudget, Step and Requirements.

A method is a ``MethodSpec``, which makes a ``Drafter`` for each text. In every step the drafter
adds drafts to the step's token tree within a ``DraftBudget``, and then observes the resulting
``Step``. ``examples/README.md`` builds a method from scratch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from batching.cache import StateReader
from batching.errors import CannotRewind, InvalidParameter, TreeError
from batching.llama.context import Context
from batching.target import Output
from batching.together import Coroutine
from batching.tree import NO_LIMIT, TokenTree
from speculation.drafting.cost import Cost, Prices
from speculation.drafting.resources import Resources
from speculation.heads.file import HeadsKind
from speculation.verify import Match, Verifier

BASELINE = "ar"  # plain decoding, which the other methods are compared with


class DraftBudget(NamedTuple):
    """Limits on the tree of one step.

    max_nodes      maximum drafts in the whole tree
    max_depth      maximum length of a path from the root, in drafts
    max_leaves     maximum number of branches
    min_path_prob  path probability below which a node is not worth its cost. 0 means that no
                   selection follows, so the drafter's own parameters decide how much to draft
    chain_only     only one path will be decoded, because the target has a single sequence
    n_vocab        tokens of the vocabulary
    prices         what the step costs, if that is known
    """

    max_nodes: int = NO_LIMIT
    max_depth: int = NO_LIMIT
    max_leaves: int = NO_LIMIT
    min_path_prob: float = 0.0
    chain_only: bool = False
    n_vocab: int = NO_LIMIT
    prices: Prices | None = None

    def room(self, tree: TokenTree) -> int:
        """How many nodes may still be added to ``tree``."""
        return self.max_nodes + 1 - len(tree.tokens)


@dataclass(slots=True)
class Step:
    """The result of one step.

    tree            the tree that was decoded
    output          its logits by node; valid until the next decode
    path            accepted nodes, starting with the root: ``path[0] == 0``
    bonus           the token sampled after the path's last node; the root of the next tree
    decode_seconds  wall-clock time of the decode
    own_seconds     the step's other time for this text up to here: drafting, verifying, committing
    tokens          the tokens added to the text: the accepted drafts, then the bonus token
    """

    tree: TokenTree
    output: Output
    path: list[int]
    bonus: int
    decode_seconds: float = 0.0
    own_seconds: float = 0.0
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [self.tree.tokens[node] for node in self.path[1:]]
        self.tokens.append(self.bonus)


class PlainSteps(NamedTuple):
    """A run of steps without drafts, one token each.

    tokens   one per step
    seconds  wall-clock time of each decode
    """

    tokens: list[int]
    seconds: list[float]


@dataclass(frozen=True)
class Requirements:
    """What a drafter needs from the target and its context.

    hidden         whether it reads the final hidden states of every row, ``step.output.hidden``.
                   The prefill has none, so the first states are those of the first step
    layers         layers whose inputs it reads, ``step.output.aux_hidden_states``
    logits         whether it reads the logits of rows, ``step.output.logits``
    prompt_reader  reads the target's states during the prefill, or None
    rows           rows that a step must have room for; more than 1 means parallel branches
    branches       maximum number of branches; 0 for chains
    """

    hidden: bool = False
    layers: tuple[int, ...] = ()
    logits: bool = False
    prompt_reader: StateReader | None = None
    rows: int = 1
    branches: int = 0

    @staticmethod
    def of_all(requirements: Iterable[Requirements]) -> Requirements:
        """The combined requirements of several drafters."""
        every = list(requirements)
        readers = [one.prompt_reader for one in every if one.prompt_reader is not None]
        return Requirements(
            hidden=any(one.hidden for one in every),
            layers=_union(one.layers for one in every),
            logits=any(one.logits for one in every),
            prompt_reader=_CombinedReader(readers)
            if len(readers) > 1
            else next(iter(readers), None),
            rows=max((one.rows for one in every), default=1),
            branches=sum(one.branches for one in every),
        )

    def check(self, method: str, context: Context, n_rows: int, n_seq: int) -> None:
        """Raise InvalidParameter or CannotRewind if no text can have this in ``context``.

        ``n_rows`` of a batch and ``n_seq`` sequences are what one text may use.
        """
        n_rewind, rows, branches = context.n_rewind, self.rows, self.branches
        if not n_rewind or (n_rewind < NO_LIMIT and rows > 1):
            raise cannot_rewind(method, context)
        if rows == 1:
            return  # a tree is cut instead
        if rows > n_rows:
            # A batch is never larger than the context.
            setting = "n_ctx" if context.n_batch < context.params.n_batch else "n_batch"
            raise InvalidParameter(
                f"method {method} with these parameters decodes {rows} rows at a time, but a batch "
                f"has at most {n_rows} here; lower window, ngram or guesses, or raise "
                f"{{{setting}}}",
                settings=(setting,),
                requested=rows,
                available=n_rows,
            )
        if context.params.exact:
            raise InvalidParameter(
                f"method {method} needs several branches, and with {{exact}} a text has one; load "
                f"the model without it, or use another method",
                settings=("exact",),
            )
        if branches >= n_seq:
            raise InvalidParameter(
                f"method {method} needs {branches + 1} sequences, a text has {n_seq} here; give it "
                f"fewer branches or guesses, or load the model with a lower {{parallel}}",
                settings=("parallel",),
                requested=branches + 1,
                available=n_seq,
            )


def cannot_rewind(method: str, context: Context) -> CannotRewind:
    """Why ``method`` cannot run with a recurrent or hybrid model."""
    what = f"{context.model.path} ({context.model.description}) is recurrent or hybrid: its memory"
    if not context.n_rewind:
        return CannotRewind(
            f"{what} cannot drop rejected drafts, so method {method} cannot run; use method ar"
        )
    return CannotRewind(
        f"{what} allows only one path of at most {context.n_rewind} drafts, but method {method} "
        f"needs several branches; use auto or another method"
    )


class Drafter:
    """Drafts for one text. A method subclasses it and overrides what it needs.

    requires  what it needs from the target, fixed at construction
    share     a row of its own context over one of the target's, as estimated before it is timed
    """

    requires: Requirements = Requirements()
    share: float = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts with ``prompt``, whose last token is the root of the first tree.

        Must be fast: a drafter with a context of its own reads the prompt when it first drafts.
        """

    def draft(
        self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
    ) -> Coroutine[None] | None:
        """Add drafts to ``tree`` within ``budget``.

        ``tokens`` is the whole text so far, including the prompt; its last token is the root. A
        coroutine (``batching.together``) if drafting takes decodes or forward passes that are done
        together with those of other texts.
        """

    def observe(self, step: Step) -> None:
        """Learn from a step, whether or not this drafter drafted in it."""

    def promise(self, tokens: Sequence[int]) -> float | None:
        """How likely its next draft is accepted, after ``tokens``, the whole text.

        0 = it would draft nothing, so the step can be a plain one; None = only drafting tells.
        Called before every step, so it must be fast.
        """
        return None

    def n_unread(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, the whole text, its own context would read before it drafts."""
        return 0

    def observe_plain(self, steps: PlainSteps) -> None:
        """Learn from steps in which it was not asked; ``observe`` is not called for those."""

    def end(self, tokens: Sequence[int]) -> None:
        """The text has ended, or was abandoned. ``tokens`` is all of it, including the prompt."""


class Chooser(Drafter):
    """A drafter among whose drafts the loop chooses by their cost.

    cost    what a decode costs
    budget  limits on what is chosen in the present step
    """

    cost: Cost
    budget: DraftBudget = DraftBudget()

    def promise(self, tokens: Sequence[int], prices: Prices | None = None) -> float | None:
        """As of any drafter, at the ``prices`` of the coming step; None = those of a text alone."""
        return None

    def keep(self, tree: TokenTree, nodes: list[int]) -> None:
        """Drop all drafts of ``tree`` but the chosen ``nodes``, ascending."""
        tree.keep(nodes)


def drafted(
    method: str, drafter: Drafter, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget
) -> Coroutine[None]:
    """Let the drafter of ``method`` add drafts to ``tree``.

    One from outside the package may do anything: it gets a tree of its own, and TreeError is raised
    before drafts that cannot be decoded meet those of other texts.
    """
    is_ours = type(drafter).__module__.startswith("speculation.")
    own = tree
    if not is_ours:
        own = TokenTree(tree.tokens[0])
        own.take(tree, budget.n_vocab, NO_LIMIT)
    drafting = drafter.draft(tokens, own, budget)
    if drafting is not None:
        yield from drafting
    if not is_ours:
        try:
            tree.take(own, budget.n_vocab, budget.max_nodes)
        except TreeError as error:
            raise TreeError(f"method {method} has a fault: {error}; use another method") from None


@dataclass(frozen=True)
class AsSource:
    """How a method becomes a source of ``auto``.

    params  its parameters as a source, or None to stay out: what it needs is not loaded, or it
            cannot pay off at the measured costs
    name    its name in ``auto:sources=``; default: the method's name
    """

    params: Callable[[Resources], Any]
    name: str = ""


@dataclass(frozen=True)
class NoParams:
    """No parameters."""


@dataclass(frozen=True)
class MethodSpec:
    """The definition of a method, one per method, in the file of its drafter.

    name       what users write, optionally followed by ``:parameter=value,…``
    title      the name on the page
    make       makes the drafter for a text from the parameters and the engine's resources; returns
               None if the method would draft nothing. Raises InvalidParameter, MissingResource
    params     a frozen dataclass; fields that are ``system.params.param`` have a help and a range
    verifier   makes the verifier from the same two arguments
    as_source  how the method becomes a source of ``auto``; None = not at all
    heads      the kinds of heads files that it drafts with
    check      raises InvalidParameter for parameters that depend on the complete method table
    """

    name: str
    title: str
    make: Callable[[Any, Resources], Drafter | None]
    params: type[Any] = NoParams
    verifier: Callable[[Any, Resources], Verifier] = lambda params, resources: Match()
    as_source: AsSource | None = None
    heads: tuple[HeadsKind, ...] = ()
    check: Callable[[Any], None] = lambda params: None

    @property
    def summary(self) -> str:
        """What the method does: the first line of its module's docstring."""
        module = inspect.getmodule(inspect.unwrap(getattr(self.make, "func", self.make)))
        return (inspect.getdoc(module) or self.title).splitlines()[0]

    @property
    def source_name(self) -> str:
        """Its name in ``auto:sources=``."""
        return (self.as_source.name if self.as_source is not None else "") or self.name


@dataclass(frozen=True)
class Method:
    """A method with its parameters, ready to run."""

    spec: MethodSpec
    params: Any

    @property
    def name(self) -> str:
        return self.spec.name

    def __str__(self) -> str:
        """The method as on the command line, without defaults."""
        changed = [
            f"{one.name}={shown(getattr(self.params, one.name))}"
            for one in fields(self.params)
            if getattr(self.params, one.name) != one.default
        ]
        return f"{self.name}:{','.join(changed)}" if changed else self.name

    def drafters(self, resources: Resources | None = None) -> list[Drafter]:
        """The method's drafter for one text, or an empty list; ``resources`` are the engine's."""
        drafter = self.spec.make(self.params, resources or Resources())
        return [] if drafter is None else [drafter]

    def verifier(self, resources: Resources | None = None) -> Verifier:
        return self.spec.verifier(self.params, resources or Resources())


class _CombinedReader:
    """Combines several prompt readers into one."""

    def __init__(self, readers: Sequence[StateReader]) -> None:
        self._readers = readers
        self.needs_hidden = any(reader.needs_hidden for reader in readers)
        self.needs_layers = _union(reader.needs_layers for reader in readers)

    def begin(self, tokens: Sequence[int]) -> int:
        return min([reader.begin(tokens) for reader in self._readers])

    def read(self, first: int, n: int, output: Output) -> None:
        for reader in self._readers:
            reader.read(first, n, output)


def _union(lists: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({layer for layers in lists for layer in layers}))


def shown(value: Any) -> str:
    """A parameter's value as it is written on the command line."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
