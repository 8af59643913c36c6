"""The Drafter protocol: how a method proposes tokens and learns what came of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple, Protocol, cast

from batching.cache import StateReader
from batching.target import Output
from batching.tree import TokenTree


class Step:
    """What one decode led to.

    tree    the tree that was decoded
    output  its logits, by node; valid until the next decode
    path    accepted nodes, the root first, so ``path[0] == 0``
    bonus   the token sampled after the path's last node: the root of the next tree
    decode_seconds  what the decode of the tree took, wall-clock
    tokens  what the text became: the drafts of the path, then the bonus
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


class Silence(NamedTuple):
    """Steps in which a drafter has nothing to propose: they may be plain, many in a run.

    until    tokens after which it wants to be asked, as after one that came since it last was;
             None = after none
    n_steps  so many steps at most
    """

    until: Container[int] | None
    n_steps: int


class Run(NamedTuple):
    """Plain steps that were done in a run.

    tokens   what they made, one each
    seconds  what their decodes took, wall-clock
    """

    tokens: list[int]
    seconds: list[float]


class Drafter(Protocol):
    """Grows the tree of a step, and sees every step whether its drafts were accepted or not.

    One that reads ``step.output.hidden`` says so by an attribute ``needs_hidden``, which is true.
    The prompt was read without hidden states by then, so that its rows cost no output each: the
    first state seen is that of the first step. One that needs states of the prompt has an attribute
    ``reader``, which says of which tokens. ``needs_layers`` names the layers of the target whose
    inputs are read from ``step.output.layer_inputs``. One that needs many rows to work at all says
    how many by ``n_rows``. One that knows beforehand when it has nothing to propose is a
    ``Listener``.
    """

    @property
    def n_branches(self) -> int:
        """The most branches it will ask for; 0 for chains alone."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts with ``prompt``, whose last token is the first tree's root."""
        ...

    def draft(self, tokens: Sequence[int], tree: TokenTree) -> None:
        """Add drafts to ``tree``, at most ``tree.room`` nodes.

        ``tokens`` is the whole text so far, prompt included; its last token is the root.
        """
        ...

    def observe(self, step: Step) -> None:
        """See what became of the step, whether it was asked for drafts in it or not."""
        ...


class Listener(Drafter, Protocol):
    """A drafter that need not be asked in every step."""

    def silence(self, tokens: Sequence[int]) -> Silence | None:
        """Whether it has nothing to propose after ``tokens``, the whole text, and for how long."""
        ...

    def observe_run(self, run: Run) -> None:
        """See plain steps that were done without asking it; ``observe`` does not see them."""
        ...


def listener_of(drafters: Sequence[Drafter]) -> Listener | None:
    """The only drafter, if it is a listener."""
    if len(drafters) == 1 and hasattr(drafters[0], "silence"):
        return cast("Listener", drafters[0])
    return None


def reader_of(drafters: Iterable[Drafter]) -> StateReader | None:
    """What is to read the target's states of a prompt, by the drafters' attributes ``reader``."""
    readers = [getattr(drafter, "reader", None) for drafter in drafters]
    found = [reader for reader in readers if reader is not None]
    return _Readers(found) if len(found) > 1 else found[0] if found else None


class _Readers:
    """Several readers as one."""

    def __init__(self, readers: Sequence[StateReader]) -> None:
        self._readers = readers
        self.needs_hidden = any(reader.needs_hidden for reader in readers)
        self.needs_layers = _all_layers(reader.needs_layers for reader in readers)

    def begin(self, tokens: Sequence[int]) -> int:
        return min([reader.begin(tokens) for reader in self._readers])

    def read(self, first: int, n: int, output: Output) -> None:
        for reader in self._readers:
            reader.read(first, n, output)


def needs_layers(drafters: Iterable[Drafter]) -> tuple[int, ...]:
    """The layers whose inputs are read, by whichever of the drafters."""
    return _all_layers(getattr(drafter, "needs_layers", ()) for drafter in drafters)


def _all_layers(some: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({layer for layers in some for layer in layers}))


def needs_hidden(drafter: Drafter) -> bool:
    """Whether the drafter reads hidden states."""
    return bool(getattr(drafter, "needs_hidden", False))


def reads_states(drafters: Iterable[Drafter]) -> bool:
    """Whether one of them reads any states of the target."""
    drafters = list(drafters)
    return bool(needs_layers(drafters)) or any(map(needs_hidden, drafters))
