"""A text among several in one context: its place, and the text while it is read and written."""

from __future__ import annotations

from time import perf_counter

from batching.cache import Reading, SequenceCache
from batching.errors import InvalidParameter
from batching.llama.sampler import SamplerChain
from batching.slots import Slot
from batching.target import Output
from batching.together import Coroutine, Running
from batching.tree import NO_LIMIT
from speculation.continuation import Continuation, Emitted
from speculation.drafter import Requirements
from speculation.generation import Host, check_rewind
from speculation.methods import Method
from speculation.sampling import make_sampler
from speculation.submitted import Submitted


class Place:
    """A slot with its cache, and the text that is there or was there last."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.cache = SequenceCache(slot)
        self.text: ActiveText | None = None
        self.used = 0.0  # when its last text ended


class ActiveText:
    """A generation in a place: reading its prompt, then writing.

    writing   its continuation; None while the prompt is read
    drafting  what drafts its next tree, until that is done
    """

    def __init__(self, engine: Host, generation: Submitted, place: Place, n_slots: int) -> None:
        """Raises what the method raises if it cannot run."""
        self.generation = generation
        self.place = place
        self.writing: Continuation | None = None
        self.drafting: Running | None = None
        self._has_begun = False
        engine.resources.sampling = generation.sampling
        engine.resources.prediction = generation.prediction
        self._resources = engine.resources.of_slot(place.slot.index, n_slots)
        self._drafters = generation.method.drafters(self._resources)
        needed = Requirements.of_all(drafter.requires for drafter in self._drafters)
        if self._drafters:
            check_rewind(engine.context, generation.method, needed)
        if needed.rows > 1 and place.slot.n_rewind == NO_LIMIT:
            _check_branches(generation.method, needed.branches, place.slot)
        self._sampler = make_sampler(generation.sampling, engine.model, engine.context.n_ctx)
        self.reading = Reading(
            place.cache,
            generation.prompt[:-1],
            needed.prompt_reader,
            # If states are read, every row of a step has output; a prompt's rows must not.
            defer=not needed.reads_states,
        )
        generation.stats.n_reused = self.reading.n_reused
        self._tell_progress()

    def _tell_progress(self) -> None:
        if self.generation.request.progress is not None:
            n_read = len(self.place.cache.tokens)
            self.generation.request.progress(n_read, len(self.generation.prompt) - 1)

    def begin(self) -> None:
        """The prompt is read, but for its deferred end: start writing."""
        self.reading.close()
        self.writing = self.generation.continuation(
            self.place.cache, self._drafters, self._sampler, self._resources
        )

    def propose(self) -> Coroutine[None] | None:
        """As ``Continuation.propose``; the first time, the drafters begin."""
        assert self.writing is not None
        if self._has_begun:
            return self.writing.propose()
        self._has_begun = True
        return self._begin(self.writing)

    def _begin(self, writing: Continuation) -> Coroutine[None]:
        yield from writing.begin()
        yield from writing.draft()

    def read(self, output: Output | None) -> None:
        """A chunk of the prompt is decoded; see ``Reading.take``."""
        self.reading.take(output)
        self._tell_progress()

    def take(self, emitted: Emitted, n_texts: int) -> None:
        """Hand out the tokens of a step, one of ``n_texts``."""
        stats = self.generation.stats
        if stats.n_tokens == stats.n_first:
            stats.prefill_seconds = perf_counter() - self.generation.submitted
        self.generation.deliver(emitted, n_texts)

    def end(self) -> None:
        """Leave the text in the cache, and the place to others."""
        try:
            if self.drafting is not None:
                self.drafting.close()
            if self.writing is None:
                self.reading.close()
            else:
                self.writing.end()
        finally:
            self.place.text = None
            self.place.used = perf_counter()
            if isinstance(self._sampler, SamplerChain):
                self._sampler.close()


def _check_branches(method: Method, n_branches: int, slot: Slot) -> None:
    """Raise InvalidParameter if a method with rows of a fixed form needs more sequences than a text
    has. A tree is cut instead."""
    if n_branches >= slot.n_seq_max:
        raise InvalidParameter(
            f"method {method.name} needs {n_branches + 1} sequences, a text has "
            f"{slot.n_seq_max} here; give it fewer branches or guesses, or load the model with a "
            f"lower {{parallel}}",
            settings=("parallel",),
            requested=n_branches + 1,
            available=slot.n_seq_max,
        )
