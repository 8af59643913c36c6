"""Scheduler: the one queue of an engine. It admits requests and cuts prompts into pieces.

Takes sequences from any thread; the engine's thread calls ``step``, which always returns: whatever
a sequence, its drafter or its callbacks raise ends that sequence alone. Short prompts are read
beside the sequences that are written, long ones in a context of their own (``long_prompts``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from batching.cache import check_fits
from batching.clock import now
from batching.errors import MissingResource, SpeculationError
from batching.llama.create import max_tokens
from batching.rows import Rows
from batching.tree import NO_LIMIT
from speculation.drafter import BASELINE, Drafter, Method, Requirements, cannot_rewind
from speculation.drafting.resources import Resources
from speculation.idle.files import TextFiles
from speculation.long_prompts import LongPrompts
from speculation.places import Places
from speculation.runtime import Runtime
from speculation.sampling import make_sampler
from speculation.sequence import FRAME_SECONDS, ROOM, TokenSequence
from speculation.step import MAX_WAIT, Batch, step
from speculation.structure import ForcedTokens

log = logging.getLogger(__name__)

BESIDE_SECONDS = 0.05  # that replies wait for a piece of what is no reply, such as an embedding
MAX_READING = 1.0  # seconds of a step that only reads prompts: a new request waits no longer
# From so many rows on, flash attention on a CPU works on tiles of as many (ggml's GGML_FA_TILE_Q).
# A tile attends to all that any of its rows does: with rows of each text, to all of all texts.
_TILE = 64
_LEAST_ROWS = 16  # of a prompt: fewer cost much more for each row
_RUN_ROOM = 512  # cells for a run of plain steps of one that is alone, which ends after 16 ms


class Scheduler:
    """The sequences of a loaded model: those that wait, and those in its slots."""

    def __init__(self, runtime: Runtime, n_slots: int, files: TextFiles | None = None) -> None:
        """Texts that nobody writes may go to ``files``."""
        self._runtime = runtime
        self.places = Places(runtime, n_slots, files)
        self._batch = self._new_batch()
        self._waiting: list[TokenSequence] = []
        self._lock = threading.Lock()  # held while one joins those that wait
        self._is_closed = False
        n_seq_max = self.places.places[0].slot.n_seq_max
        several = n_slots > 1
        self._long_prompts = LongPrompts.open(runtime, n_seq_max, MAX_WAIT) if several else None

    def _new_batch(self) -> Batch:
        """One for the context as it is now."""
        several = self.places.n_slots > 1
        cost = self._runtime.resources.cost if several else None  # how much of a prompt to read
        return Batch(self.places.slots, cost, self._max_rows)

    @property
    def n_running(self) -> int:
        """How many sequences have a slot."""
        return len(self.places.active())

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def seconds_beside(self) -> float:
        """How long something else may be computed, while replies wait, or one that may come."""
        return BESIDE_SECONDS if self.n_running else MAX_WAIT

    def submit(self, one: TokenSequence) -> bool:
        """Queue it; returns False once the scheduler is closed. From any thread.

        Raises PromptTooLong if the prompt does not fit the context.
        """
        context = self._runtime.context
        longest = max_tokens(context.model)
        check_fits(len(one.request.prompt) - 1, context.text_limit, longest)
        with self._lock:
            if self._is_closed:
                return False
            self._waiting.append(one)
        return True

    def close(self) -> None:
        """End all sequences, and put those in the cache on disk, if that is wanted."""
        with self._lock:
            self._is_closed = True
        self.end_all()
        self.places.close()
        if self._long_prompts is not None:
            self._long_prompts.close()

    def cancel_all(self) -> None:
        """Cancel all sequences. From any thread."""
        for one in [*self._waiting, *self.places.active()]:
            one.reply.cancel()

    def end_all(self) -> None:
        """End all sequences, now."""
        self.cancel_all()
        self._end_cancelled()

    def step(self) -> bool:
        """One decode for all sequences, or a run of plain steps of a sequence that is alone.

        Returns False if there is nothing to do.
        """
        try:
            self._end_cancelled()
            self._admit()
            if sequences := self.places.active():
                self._decode(sequences)
        except BaseException as error:  # a fault of ours: nobody must wait for ever
            log.exception("a step failed")
            for one in self.places.active():
                one.fail(error)
        self.places.leave()
        return bool(self._waiting or self.places.active())

    # The queue

    def _end_cancelled(self) -> None:
        for one in [one for one in self._waiting if one.reply.is_cancelled]:
            self._waiting.remove(one)
            one.end("cancelled")
        for one in self.places.active():
            if one.reply.is_cancelled:
                self._batch.drop(one)
                one.end("cancelled")
                self.places.leave()

    def _admit(self) -> None:
        """Give places to waiting sequences, in order, while the context has room for them.

        One whose beginning is just being read for another one waits for that.
        """
        for one in list(self._waiting):
            if not self.places.has_room(one):
                break
            if not one.request.reads_all and self.places.is_being_read(one):
                continue
            with one:
                if not self._place(one):
                    break
            self._waiting.remove(one)
        for n, one in enumerate(list(self._waiting), 1):
            if one.n_ahead != n:
                with one:
                    one.tell_waiting(n)

    def _place(self, one: TokenSequence) -> bool:
        """Start one that has room; returns whether the batch has its rows, too."""
        places, request, runtime = self.places, one.request, self._runtime
        place = places.find(one)
        resources = runtime.resources.for_text(
            place.slot.index,
            places.n_slots,
            sampling=request.sampling,
            prediction=request.prediction,
            memory=request.memory,
        )
        drafters = request.method.drafters(resources)
        structure = one.structure
        needed = self._checked(request.method.name, drafters)
        n_fixed = sum([one.needed.rows for one in places.active() if one.needed.rows > 1])
        if needed.rows > 1 and needed.rows + n_fixed > self._n_free_rows:
            return False
        # With ``exact``, trees are cut to a path: accepted branches would leave cells out of order.
        is_exact = runtime.context.params.exact
        is_narrow = not is_exact and needed.branches >= runtime.context.n_seq_max
        if places.can_rewind and places.n_slots == 1 and is_narrow:
            try:
                runtime.widen(needed.branches)
            finally:
                places.renew()
                self._batch = self._new_batch()
            place = places.find(one)
        may_draft = request.method.name != BASELINE and runtime.context.n_rewind > 0
        if structure is not None and needed.rows == 1 and may_draft:
            drafters = [ForcedTokens(structure), *drafters]
        sampler = make_sampler(request.sampling, runtime.model, runtime.context.n_ctx, structure)
        place.sequence = one
        place.slot.n_batch = runtime.context.n_batch
        one.tell_waiting(0)
        verifier = request.method.verifier(resources)
        one.start(place.cache, drafters, verifier, sampler)
        # What is cached now begins this one.
        place.n_prompt, place.on_disk = len(request.prompt) - 1, request.on_disk
        return True

    def unavailable(self, methods: Iterable[Method]) -> dict[str, SpeculationError]:
        """Those of the methods that no reply can be written with, by name, and why."""
        resources = self._runtime.resources.trial().for_text(n_slots=self.places.n_slots)
        found = {method.name: self._why_not(method, resources) for method in methods}
        return {name: error for name, error in found.items() if error is not None}

    def _why_not(self, method: Method, resources: Resources) -> SpeculationError | None:
        try:
            self._checked(method.name, method.drafters(resources))
        except MissingResource as error:
            # With a recurrent model, what is missing would not help.
            context = self._runtime.context
            return error if context.n_rewind else cannot_rewind(method.name, context)
        except SpeculationError as error:
            return error
        except Exception:  # of a method from outside: a text that uses it will tell
            log.exception("method %s cannot be made", method.name)
        return None

    @property
    def _n_free_rows(self) -> int:
        """The rows of a batch that a single sequence may have."""
        return self._runtime.context.n_batch - 2 * (self.places.n_slots - 1)

    def _checked(self, method: str, drafters: Sequence[Drafter]) -> Requirements:
        """What the drafters of a method need. Raises InvalidParameter or CannotRewind if nothing
        here can have that."""
        needed = Requirements.of_all(drafter.requires for drafter in drafters)
        if drafters:
            # The context of a sequence that is alone is made anew if it has too few sequences.
            can_widen = self.places.n_slots == 1 or not self.places.can_rewind
            n_seq = NO_LIMIT if can_widen else self.places.places[0].slot.n_seq_max
            needed.check(method, self._runtime.context, self._n_free_rows, n_seq)
        return needed

    # Steps

    def _decode(self, sequences: Sequence[TokenSequence]) -> None:
        """A step: read some prompt, draft for those that are written, decode all of it.

        One that is written alone takes steps until a frame has passed or something comes.
        """
        drafting, first = self._batch.drafting, sequences[0]
        n_past = self._n_past(sequences)
        reading = [one for one in sequences if one.reading is not None]
        is_alone = len(sequences) == 1 and not reading and not drafting
        if reading and len(sequences) > 1:
            for one in sequences:  # a prompt takes longer than a frame
                one.flush()
        pieces = self._pieces(sequences, reading, n_past)
        shares, writing = self._shares(sequences), list[TokenSequence]()
        for place in self.places.places:
            written = place.sequence
            if written is None or written.has_ended or written.reading is not None:
                continue
            if written not in drafting:
                place.slot.n_batch = shares[written] + place.cache.n_deferred
                with written:  # a full context would end it
                    self.places.extend(place, max(written.room + 1, _RUN_ROOM * is_alone))
            if not written.has_ended:
                writing.append(written)
        prompts = {one: len(rows) for one, rows in pieces.items()}
        prompts |= {one: one.cache.n_deferred for one in writing if one.cache.n_deferred}
        watch = partial(self._watch, sequences, prompts)
        start = now()

        def is_wanted() -> bool:
            return bool(self._waiting) or first.reply.is_cancelled

        step(writing, self._batch, pieces, n_past=n_past, watch=watch, is_wanted=is_wanted)
        while is_alone and not (first.has_ended or is_wanted() or now() > start + FRAME_SECONDS):
            with first:
                self.places.extend(self.places.of(first), first.room + 1)
                step(writing, self._batch, n_past=n_past, watch=watch, is_wanted=is_wanted)
        if is_alone:
            self.places.shrink(self.places.of(first), first.room + 1)  # others may need the rest
        n_rows = sum([len(rows) for rows in pieces.values()])
        cost = self._runtime.resources.kept.cost
        if cost is not None and n_rows >= _TILE and not writing:
            cost.has_read(n_rows, now() - start)

    @staticmethod
    def _watch(
        sequences: Sequence[TokenSequence], prompts: Mapping[TokenSequence, int], share: float
    ) -> bool:
        """Called when a ``share`` of a long decode is done: whether nobody wants it any more.

        ``prompts`` are the prompts in it, with their rows. Of several the progress is not known.
        """
        if len(prompts) == 1:
            ((one, n_rows),) = prompts.items()
            with one:
                one.tell_progress(int(share * n_rows))
        return all(one.reply.is_cancelled or one.has_ended for one in sequences)

    def _n_past(self, sequences: Sequence[TokenSequence]) -> int:
        """How many tokens a row attends to, on average.

        Flash attention skips the cells of other sequences, at least on a CPU: 8 rows of SmolLM2
        took 36 ms with 200 tokens in each of 8 sequences, and 80 ms with 1,600 in one. To look at
        a cell costs about a twentieth of attending to it.
        """
        n_cells = sum([place.cache.n_past for place in self.places.places])
        own = sum([one.cache.n_past for one in sequences]) // len(sequences)
        has_flash_attn = self._runtime.context.flash_attn
        return own + (n_cells - own) // 20 if has_flash_attn else n_cells

    def _pieces(
        self, sequences: Sequence[TokenSequence], reading: list[TokenSequence], n_past: int
    ) -> dict[TokenSequence, Rows]:
        """The next prompt rows of those that are ``reading``; those that are read begin."""
        pieces: dict[TokenSequence, Rows] = {}
        if not reading:
            return pieces
        reading.sort(key=lambda one: one.meter.submitted)
        n_writing = len(sequences) - len(reading)
        seconds = self._seconds_to_read(n_writing, n_past)
        if len(sequences) > 1 and self._long_prompts is not None:
            long = [one for one in reading if self._long_prompts.takes(one)]
            self._long_prompts.read(long, seconds)
            reading = [one for one in reading if one not in long]
        n_left = self._n_prompt_rows(sequences, n_writing, seconds)
        n_left -= sum([one.cache.n_deferred for one in self._batch.drafting])
        for one in reading:
            if n_left < 2:
                break
            self.places.of(one).slot.n_batch = n_left  # not what it had for drafts
            with one:
                rows = one.next_piece(n_left)
                if rows is None:
                    n_left -= one.cache.n_deferred
                else:
                    n_left -= len(rows)
                    pieces[one] = rows
        return pieces

    def _shares(self, sequences: Sequence[TokenSequence]) -> dict[TokenSequence, int]:
        """How many rows of a batch the tree of each sequence may have.

        All of them for one that is alone. Among several, a method with a form of its own gets
        what that needs; the others divide up to half of what is left.
        """
        n_batch = self._runtime.context.n_batch
        if len(sequences) == 1:
            return {sequences[0]: n_batch - sequences[0].cache.n_deferred}
        fixed = {one: one.needed.rows for one in sequences if one.needed.rows > 1}
        n_open = max(1, len(sequences) - len(fixed))
        share = max(1, min(ROOM, (n_batch - sum(fixed.values())) // 2 // n_open))
        return dict.fromkeys(sequences, share) | fixed

    @property
    def _max_rows(self) -> int:
        """Rows of a batch with several sequences, beyond which each costs more."""
        context = self._runtime.context
        on_cpu = context.flash_attn and context.model.n_host_layers
        return _TILE - 1 if on_cpu else NO_LIMIT

    def _seconds_to_read(self, n_writing: int, n_past: int) -> float:
        """How long a step may read prompts, beside the rows of ``n_writing``.

        These wait MAX_WAIT at most; twice as long if it reads both a long prompt and short ones.
        """
        cost = self._batch.cost
        own = 0.0 if cost is None else cost.curve(n_past).at(n_writing)
        return (MAX_WAIT if n_writing else MAX_READING) - own

    def _n_prompt_rows(
        self, sequences: Sequence[TokenSequence], n_writing: int, seconds: float
    ) -> int:
        """How many prompt rows to decode in a step of ``sequences``, of which ``n_writing`` wait
        for their tokens, in about so many ``seconds``."""
        n_batch = self._runtime.context.n_batch
        most = n_batch - sum(self._shares(sequences).values()) if len(sequences) > 1 else n_batch
        room = self._max_rows - len(sequences)  # one that has read its prompt has a row, too
        if n_writing and room >= _TILE // 4:  # else prompts would take too many steps
            most = min(most, room)
        cost = self._batch.cost
        if cost is None:  # one slot: nobody could start earlier
            return most
        # Smaller pieces take more time for each row, and would seem to call for still smaller ones.
        least = _LEAST_ROWS if n_writing else _TILE
        return min(max(least, int(seconds / cost.row_seconds)), most)
