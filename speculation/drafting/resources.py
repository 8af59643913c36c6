"""Resources: what methods share and keep across texts while the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
State = Callable[[], list[float]]


def if_loaded(kind: str, params: T) -> Callable[[Resources], T | None]:
    """A source's parameters, for ``AsSource``: ``params`` if heads of the ``kind`` are loaded."""
    return lambda resources: params if kind in resources.heads else None


@dataclass(kw_only=True, eq=False)
class Resources:
    """The measured cost of a decode, the loaded draft model and heads, and methods' statistics.

    A drafter lives for one text. What outlives it (acceptance statistics, tables) is kept here;
    what it has learnt of the model is also saved from run to run (``to_save``).

    measure_cost  called once, when a method first needs the cost
    model     the target, or None if drafters are tested without one
    n_rewind  drafts that the target can take back, as in ``Target``
    draft     the draft model's context, or None
    draft_share  its time for a row over the target's, as estimated before it is timed
    heads     drafting heads by the method named in their files
    draft_sampler  makes the sampler of a text's drafts, if they are sampled
    memory    the texts read and written before, for suffix decoding
    saved     what an earlier run had ``to_save``

    Of one text, in what ``for_text`` returns:

    sampling  its sampling parameters
    prediction  tokens that it is expected to have for the most part; may be empty
    """

    measure_cost: Callable[[], Cost] | None = field(default=None, kw_only=False)
    model: Model | None = None
    n_rewind: int = NO_LIMIT
    draft: Target | None = None
    draft_share: float = 0.0
    heads: Mapping[str, Any] = field(default_factory=dict)
    draft_sampler: Callable[[SamplingParams], DraftDistribution] | None = None
    memory: SuffixMemory = field(default_factory=SuffixMemory)
    saved: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prediction: tuple[int, ...] = ()
    # Objects by key; what to save of them; clients' memories, least recently used first.
    _kept: dict[Any, Any] = field(default_factory=dict)
    _states: dict[str, State] = field(default_factory=dict)
    _memories: dict[str, SuffixMemory] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """The cost of decoding n rows. The first use measures it, in a second or two."""
        if self.measure_cost is None:
            raise RuntimeError("these resources were made without a way to measure cost")
        return self.keep("cost", self.measure_cost)

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

    def to_save(self, methods: Collection[str]) -> dict[str, Any]:
        """What to save, by name: what was learnt of these methods, now or in an earlier run.

        Those of outside packages and files learn anew in each run, so that the file stays small.
        """
        states = {**self.saved, **{name: state() for name, state in self._states.items()}}
        return {name: state for name, state in states.items() if name.split(" ")[0] in methods}

    def learnt(self, name: str, make: Callable[[object], tuple[T, State]]) -> T:
        """What is kept under ``name`` from text to text and, for built-in methods, run to run.

        ``make`` gets what an earlier run saved, or None, and returns the object and its state.
        ``name`` is a method's, or begins with it and a blank; never a client's own words, since all
        names are kept.
        """

        def made() -> T:
            found, self._states[name] = make(self.saved.get(name))
            return found

        return self.keep(("learnt", name), made)

    def acceptance(self, method: str, priors: Sequence[float] = BY_PROBABILITY) -> Acceptance:
        """How likely a method's drafts are accepted in a text, with whatever parameters.

        What holds for all texts is ``learnt``. ``priors`` as in ``Acceptance``.
        """

        def make(saved: object) -> tuple[Acceptance, State]:
            acceptance = Acceptance(priors, saved)
            return acceptance, lambda: acceptance.log_odds

        return self.learnt(f"{method} acceptance", make).of_text()

    def without_memory(self) -> Resources:
        """The same, but without earlier texts, and without remembering new ones."""
        return replace(self, memory=SuffixMemory.off())

    def trial(self) -> Resources:
        """The same for now: what methods keep or save in it ends with it.

        A cost that is not known is made up: to measure it would empty the cache.
        """
        made_up = Cost(CostCurve.linear(1.0, 0.1))
        return replace(self, _kept=dict(self._kept), _states={}, measure_cost=lambda: made_up)

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
        view = replace(self, sampling=sampling or SamplingParams(), prediction=prediction)
        if memory != "":
            view.memory = SuffixMemory.off() if memory is None else self._memory_of(memory)
        draft = self.draft
        if n_slots > 1:
            view.heads = {
                kind: self.keep(("head of slot", kind, slot), partial(head.of_slot, slot, n_slots))
                for kind, head in self.heads.items()
            }
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
