"""Resources: what methods share and keep across texts while the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from batching.draft_context import DraftContext
from batching.errors import MissingResource
from batching.slots import Slots
from batching.target import Target
from batching.tree import NO_LIMIT
from speculation.drafting.acceptance import BY_PROBABILITY, Acceptance
from speculation.drafting.cost import Cost, CostCurve
from speculation.drafting.suffix_memory import SuffixMemory
from speculation.sampling import DraftDistribution, SamplingParams

_MOST_CLIENTS = 32  # whose memories are kept: those used last
_CLIENT_TOKENS = 1 << 17  # in the memory of a client: 5 MB with its index
T = TypeVar("T")


@runtime_checkable
class Learnt(Protocol):
    """What is saved from run to run."""

    def state(self) -> list[float]: ...


L = TypeVar("L", bound=Learnt)


def if_loaded(kind: str, params: T) -> Callable[[Resources], T | None]:
    """A source's parameters, for ``AsSource``: ``params`` if heads of the ``kind`` are loaded."""
    return lambda resources: params if kind in resources.seat.heads else None


class Seat:
    """Where the drafts of a slot are made.

    draft  the slot's part of the draft model's context, or None
    heads  its parts of the drafting heads, by the method named in their files
    draft_context, head_contexts  where they draft, by head once a method uses it
    """

    def __init__(self, draft: Target | None = None, heads: Mapping[str, Any] | None = None) -> None:
        self.draft, self.heads = draft, heads or {}
        self.draft_context = DraftContext(draft) if draft is not None else None
        self.head_contexts: dict[Any, Any] = {}

    def share_text(self, other: Seat, n_tokens: int) -> None:
        """Let the draft model start with what it has of ``n_tokens`` of ``other``."""
        own, others = self.draft_context, other.draft_context
        if own is not None and others is not None and own.target.n_rewind == NO_LIMIT:
            own.share(others, n_tokens)

    def forget_text(self) -> None:
        """Free the cells that a text has in the contexts of the draft model and the heads."""
        if self.draft_context is not None:
            self.draft_context.keep(0, 1)
        for context in self.head_contexts.values():
            context.clear()


@dataclass(kw_only=True)
class Kept:
    """What is kept from text to text.

    cost      what a decode costs, once a method needed it
    objects   what methods keep, by name
    memories  those of clients, least recently used first
    seats     by slot
    """

    cost: Cost | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    memories: dict[str, SuffixMemory] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class Resources:
    """The measured cost of a decode, the loaded draft model and heads, and methods' statistics.

    A drafter lives for one text. What outlives it (acceptance statistics, tables) is ``kept``;
    what it has learnt of the model is also saved from run to run (``to_save``).

    measure_cost  called once, when a method first needs the cost
    n_rewind  drafts that the target can take back, as in ``Target``
    seat      the draft model and the heads; in what ``for_text`` returns, the slot's parts of them
    draft_share  a draft model's time for a row over the target's, as estimated before it is timed
    draft_sampler  makes the sampler of a text's drafts, if they are sampled
    memory    the texts read and written before, for suffix decoding
    saved     what an earlier run had ``to_save``

    Of one text, in what ``for_text`` returns:

    sampling  its sampling parameters
    prediction  tokens that it is expected to have for the most part; may be empty
    """

    measure_cost: Callable[[], Cost] | None = field(default=None, kw_only=False)
    n_rewind: int = NO_LIMIT
    seat: Seat = field(default_factory=Seat)
    draft_share: float = 0.0
    draft_sampler: Callable[[SamplingParams], DraftDistribution] | None = None
    memory: SuffixMemory = field(default_factory=SuffixMemory)
    saved: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prediction: tuple[int, ...] = ()
    kept: Kept = field(default_factory=Kept)

    @property
    def cost(self) -> Cost:
        """The cost of decoding n rows. The first use measures it, in a second or two."""
        if self.kept.cost is None:
            assert self.measure_cost is not None, "made without a way to measure the cost"
            self.kept.cost = self.measure_cost()
        return self.kept.cost

    @property
    def rows_are_cheap(self) -> bool:
        """Whether a row costs less than a tenth of a step, so that branches may pay off."""
        return self.cost.curve(0).row_share < 0.1

    def to_save(self, methods: Collection[str]) -> dict[str, Any]:
        """What to save, by name: what was learnt of these methods, now or in an earlier run.

        Those of outside packages and files learn anew in each run, so that the file stays small.
        """
        learnt = {name: one for name, one in self.kept.objects.items() if isinstance(one, Learnt)}
        states = {**self.saved, **{name: one.state() for name, one in learnt.items()}}
        return {name: state for name, state in states.items() if name.split(" ")[0] in methods}

    def learnt(self, name: str, make: Callable[[object], L]) -> L:
        """What is kept under ``name`` from text to text and, for built-in methods, run to run.

        ``make`` gets the state that an earlier run saved, or None. ``name`` is a method's, or
        begins with it and a blank; never a client's own words, since all names are kept.
        """
        return self.keep(name, lambda: make(self.saved.get(name)))

    def acceptance(self, method: str, priors: Sequence[float] = BY_PROBABILITY) -> Acceptance:
        """How likely a method's drafts are accepted in a text, with whatever parameters.

        What holds for all texts is ``learnt``. ``priors`` as in ``Acceptance``.
        """
        name = f"{method} acceptance"
        return self.learnt(name, lambda saved: Acceptance(priors, saved)).of_text()

    def trial(self) -> Resources:
        """The same for now: what methods keep or save in it ends with it.

        A cost that is not known is made up: to measure it would empty the cache.
        """
        made_up = Cost(CostCurve.linear(1.0, 0.1))
        kept = replace(self.kept, objects=dict(self.kept.objects))
        return replace(self, kept=kept, measure_cost=lambda: made_up)

    def for_text(
        self,
        slot: int = 0,
        n_slots: int = 1,
        *,
        sampling: SamplingParams | None = None,
        prediction: tuple[int, ...] = (),
        memory: str | None = "",
    ) -> Resources:
        """The resources for a text in ``slot``: what it needs, its memory (``Settings``), and its
        slots in the contexts of the draft model and the heads."""
        seat, sampling = self.seat_of(slot, n_slots), sampling or SamplingParams()
        view = replace(self, seat=seat, sampling=sampling, prediction=prediction)
        memories = self.kept.memories
        if memory is None:
            view.memory = SuffixMemory.off()
        elif memory:
            found = memories.pop(memory) if memory in memories else SuffixMemory(_CLIENT_TOKENS)
            view.memory = memories[memory] = found
            if len(memories) > _MOST_CLIENTS:
                del memories[next(iter(memories))]
        return view

    def seat_of(self, slot: int, n_slots: int) -> Seat:
        """The parts of a slot."""
        if n_slots == 1:
            return self.seat
        if not self.kept.seats:
            drafts: list[Any] = [None] * n_slots
            if (draft := self.seat.draft) is not None:
                drafts = Slots(draft, n_slots).slots
                for own in drafts:
                    own.n_batch = draft.n_batch // n_slots
            for i, own in enumerate(drafts):
                heads = {kind: head.of_slot(i, n_slots) for kind, head in self.seat.heads.items()}
                self.kept.seats.append(Seat(own, heads))
        return self.kept.seats[slot]

    def require_draft(self, method: str) -> DraftContext:
        """Where the draft model drafts. Raises MissingResource if none is loaded."""
        if self.seat.draft_context is None:
            raise MissingResource(
                f"method {method} needs a draft model; load one with {{draft_model}}",
                settings=("draft_model",),
            )
        return self.seat.draft_context

    def require_heads(self, kind: str, method: str, what: str = "") -> Any:
        """The heads of a kind. Raises MissingResource, naming them ``what``, if none are loaded."""
        if kind not in self.seat.heads:
            raise MissingResource(
                f"method {method} needs {what or f'{kind} heads'}; load them with {{heads}}",
                settings=("heads",),
            )
        return self.seat.heads[kind]

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """What a method keeps under its ``name``; ``make`` creates it on first use."""
        if name not in self.kept.objects:
            self.kept.objects[name] = make()
        found: T = self.kept.objects[name]
        return found
