"""Resources: what methods share and keep across texts while the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

from batching.draft_context import DraftContext
from batching.errors import MissingResource
from batching.llama.model import Model
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


def if_loaded(kind: str, params: T) -> Callable[[Resources], T | None]:
    """A source's parameters, for ``AsSource``: ``params`` if heads of the ``kind`` are loaded."""
    return lambda resources: params if kind in resources.heads else None


class Resources:
    """The measured cost of a decode, the loaded draft model and heads, and methods' statistics.

    A drafter lives for one text. What outlives it (acceptance statistics, tables) is kept here;
    what it has learnt of the model is also saved from run to run (``to_save``).

    model     the target, or None if drafters are tested without one
    n_rewind  drafts that the target can take back, as in ``Target``
    draft     the draft model's context, or None
    draft_share  its time for a row over the target's, as estimated before it is timed
    heads     drafting heads by the method named in their files
    memory    the texts read and written before, for suffix decoding

    Of one text, in what ``for_text`` returns:

    sampling  its sampling parameters
    prediction  tokens that it is expected to have for the most part; may be empty
    """

    def __init__(
        self,
        measure_cost: Callable[[], Cost] | None = None,
        *,
        model: Model | None = None,
        n_rewind: int = NO_LIMIT,
        draft: Target | None = None,
        draft_share: float = 0.0,
        heads: Mapping[str, Any] | None = None,
        draft_sampler: Callable[[SamplingParams], DraftDistribution] | None = None,
        memory: SuffixMemory | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """``measure_cost`` is called once, when a method first needs the cost; ``draft_sampler``
        is called for each text whose drafts are sampled, with its sampling parameters. ``saved``
        is ``to_save`` of an earlier run."""
        self._measure_cost = measure_cost
        self._kept: dict[Any, Any] = {}
        self._saved = dict(saved or {})
        self._states: dict[str, Callable[[], list[float]]] = {}
        self.model = model
        self.n_rewind = n_rewind
        self.draft, self.draft_share = draft, draft_share
        self.heads = dict(heads or {})
        self._draft_sampler = draft_sampler
        self.memory = SuffixMemory() if memory is None else memory
        self._memories: dict[str, SuffixMemory] = {}  # those of clients, least recently used first
        self.sampling = SamplingParams()
        self.prediction: tuple[int, ...] = ()

    @property
    def cost(self) -> Cost:
        """The cost of decoding n rows. The first use measures it, in a second or two."""
        if self._measure_cost is None:
            raise RuntimeError("these resources were made without a way to measure cost")
        return self.keep("cost", self._measure_cost)

    @property
    def known_cost(self) -> Cost | None:
        """The cost if it has been measured, else None."""
        return self._kept.get("cost")

    def step_seconds(self) -> float:
        """The target's time for a plain step."""
        return self.cost.curve(0).at(1)

    @property
    def rows_are_cheap(self) -> bool:
        """Whether a row costs less than a tenth of a step, so that branches may pay off."""
        return self.cost.curve(0).row_share < 0.1

    def saved(self, name: str) -> object:
        """What was saved under ``name`` in an earlier run, or None."""
        return self._saved.get(name)

    def save(self, name: str, state: Callable[[], list[float]]) -> None:
        """Save ``state()`` for later runs when the engine closes.

        ``name`` is a method's, or begins with it and a blank; never a client's own words, since all
        names are kept.
        """
        self._states[name] = state

    def to_save(self, methods: Collection[str]) -> dict[str, Any]:
        """What to save, by name: what was learnt of these methods, now or in an earlier run.

        Those of outside packages and files learn anew in each run, so that the file stays small.
        """
        states = {**self._saved, **{name: state() for name, state in self._states.items()}}
        return {name: state for name, state in states.items() if name.split(" ")[0] in methods}

    def acceptance(self, method: str, priors: Sequence[float] = BY_PROBABILITY) -> Acceptance:
        """How likely a method's drafts are accepted in a text, with whatever parameters.

        What holds for all texts is kept from text to text and, for built-in methods, from run to
        run. ``priors`` as in ``Acceptance``.
        """

        def make() -> Acceptance:
            acceptance = Acceptance(priors, self.saved(f"{method} acceptance"))
            self.save(f"{method} acceptance", lambda: acceptance.log_odds)
            return acceptance

        return self.keep(("acceptance", method), make).of_text()

    def without_memory(self) -> Resources:
        """The same, but without earlier texts, and without remembering new ones."""
        view = copy(self)
        view.memory = SuffixMemory.off()
        return view

    @property
    def draft_sampler(self) -> Callable[[], DraftDistribution] | None:
        """Makes the sampler of drafts for the text."""
        make, sampling = self._draft_sampler, self.sampling
        return None if make is None else lambda: make(sampling)

    def trial(self) -> Resources:
        """The same for now: what methods keep or save in it ends with it.

        A cost that is not known is made up: to measure it would empty the cache.
        """
        view = copy(self)
        view._kept, view._states = dict(self._kept), {}
        view._measure_cost = lambda: Cost(CostCurve.linear(1.0, 0.1))
        return view

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
        view = copy(self)
        view.sampling, view.prediction = sampling or SamplingParams(), prediction
        if memory != "":
            view.memory = SuffixMemory.off() if memory is None else self._memory_of(memory)
        draft = self.draft
        if n_slots > 1:
            view.heads = {kind: self._head_of_slot(kind, slot, n_slots) for kind in self.heads}
        if n_slots > 1 and draft is not None:
            own = self.keep("draft slots", lambda: Slots(draft, n_slots)).slots[slot]
            own.n_batch = draft.n_batch // n_slots
            view.draft = own
        return view

    def _memory_of(self, client: str) -> SuffixMemory:
        memory = self._memories.pop(client, None) or SuffixMemory(_CLIENT_TOKENS)
        self._memories[client] = memory
        if len(self._memories) > _MOST_CLIENTS:
            del self._memories[next(iter(self._memories))]
        return memory

    def _head_of_slot(self, kind: str, index: int, n_slots: int) -> Any:
        head = self.heads[kind]
        return self.keep(("head of slot", kind, index), lambda: head.of_slot(index, n_slots))

    def share_text(self, other: Resources, n_tokens: int) -> None:
        """Let the draft model's slot start with what that of ``other`` has of ``n_tokens``."""
        if self.draft is not None and self.draft.n_rewind == NO_LIMIT:
            self.draft_context.share(other.draft_context, n_tokens)

    def forget_text(self) -> None:
        """Free the cells that a text has in the contexts of the draft model and the heads."""
        if self.draft is not None:
            self.draft_context.keep(0, 1)
        for head in self.heads.values():
            context = self._kept.get(("head context", head))
            if context is not None:
                context.clear()

    @property
    def draft_context(self) -> DraftContext:
        """Where the draft model drafts for a text, in ``draft``."""
        draft = self.draft
        assert draft is not None
        return self.keep(("draft context", draft), lambda: DraftContext(draft))

    def require_draft(self, method: str) -> Target:
        """The draft model's context. Raises MissingResource if no draft model is loaded."""
        if self.draft is None:
            raise MissingResource(
                f"method {method} needs a draft model; load one with {{draft_model}}",
                settings=("draft_model",),
            )
        return self.draft

    def require_heads(self, kind: str, method: str, what: str = "") -> Any:
        """The heads of a kind. Raises MissingResource, naming them ``what``, if none are loaded."""
        if kind not in self.heads:
            raise MissingResource(
                f"method {method} needs {what or f'{kind} heads'}; load them with {{heads}}",
                settings=("heads",),
            )
        return self.heads[kind]

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """The object kept under ``key``; ``make`` creates it on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found
