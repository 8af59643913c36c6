"""Scheduler: the one queue of an engine. It admits requests and cuts prompts into pieces.

Takes requests from any thread; the engine's thread calls ``step``, which always returns: whatever a
text, its drafter or its callbacks raise ends that text alone. Short prompts are read beside the
texts that are written, long ones in a context of their own (``long_prompts``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from time import perf_counter

from batching.cache import check_fits
from batching.errors import (
    CannotRewind,
    InvalidParameter,
    MissingResource,
    SpeculationError,
)
from batching.llama.create import max_tokens
from batching.rows import Rows
from batching.tree import NO_LIMIT
from speculation.decode import MAX_WAIT, Batch, step
from speculation.drafter import BASELINE, Drafter, Method, Requirements
from speculation.drafting.cost import Cost
from speculation.drafting.resources import Resources
from speculation.idle.files import TextFiles
from speculation.long_prompts import LongPrompts
from speculation.places import Place, Places
from speculation.request import Request
from speculation.runtime import Runtime
from speculation.sampling import make_sampler
from speculation.structure import ForcedTokens
from speculation.text import FRAME_SECONDS, ROOM, Text, failing

log = logging.getLogger(__name__)

BESIDE_SECONDS = 0.05  # that texts wait for a piece of what is no text, such as an embedding
MAX_READING = 1.0  # seconds of a step that only reads prompts: a new request waits no longer
# From so many rows on, flash attention on a CPU works on tiles of as many (ggml's GGML_FA_TILE_Q).
# A tile attends to all that any of its rows does: with rows of each text, to all of all texts.
_TILE = 64
_LEAST_ROWS = 16  # of a prompt: fewer cost much more for each row
_RUN_ROOM = 512  # cells for a run of plain steps of a text that is alone, which ends after 16 ms


class Scheduler:
    """The texts of a loaded model: those that wait, and those in its slots."""

    def __init__(self, runtime: Runtime, n_slots: int, files: TextFiles | None = None) -> None:
        """Texts that nobody writes may go to ``files``."""
        self._runtime = runtime
        self.places = Places(runtime, n_slots, files)
        self._batch = Batch(self.places.slots)
        self._waiting: list[Text] = []
        self._lock = threading.Lock()  # held while a text joins those that wait
        self._is_closed = False
        self._decoding: Sequence[Text] = ()  # in the present step
        self._piece: tuple[Text, int] | None = None  # the only prompt in it, and its rows
        self._long_prompts: LongPrompts | None = None
        if n_slots > 1:
            _ = runtime.resources.cost  # how much of a prompt to read beside other texts
            n_seq_max = self.places.places[0].slot.n_seq_max
            self._long_prompts = LongPrompts.open(runtime, n_seq_max, MAX_WAIT)

    @property
    def n_running(self) -> int:
        """How many texts have a slot."""
        return len(self.places.active())

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def seconds_beside(self) -> float:
        """How long something else may be computed, while texts wait, or one that may come."""
        return BESIDE_SECONDS if self.n_running else MAX_WAIT

    def submit(self, text: Text) -> bool:
        """Queue a text; returns False once the scheduler is closed. From any thread.

        Raises PromptTooLong if the prompt does not fit the context.
        """
        context = self._runtime.context
        longest = max_tokens(context.model)
        check_fits(len(text.request.prompt) - 1, context.text_limit, longest)
        with self._lock:
            if self._is_closed:
                return False
            self._waiting.append(text)
        return True

    def close(self) -> None:
        """End all texts, and put those in the cache on disk, if that is wanted."""
        with self._lock:
            self._is_closed = True
        self.end_all()
        self.places.close()
        if self._long_prompts is not None:
            self._long_prompts.close()

    def cancel_all(self) -> None:
        """Cancel all texts. From any thread."""
        for text in [*self._waiting, *self.places.active()]:
            text.cancel()

    def end_all(self) -> None:
        """End all texts, now."""
        self.cancel_all()
        self._end_cancelled()

    def step(self) -> bool:
        """One decode for all texts, or a run of plain steps of a text that is alone.

        Returns False if there is nothing to do.
        """
        try:
            self._step()
        except BaseException as error:  # a fault of ours: nobody must wait for ever
            log.exception("a step failed")
            for text in self.places.active():
                text.fail(error)
        self.places.leave()
        return bool(self._waiting or self.places.active())

    def _step(self) -> None:
        self._end_cancelled()
        self._admit()
        texts = self.places.active()
        is_alone = len(texts) == 1 and not self._batch.drafting
        if is_alone and texts[0].is_writing and texts[0].stats.n_steps:
            self._decode_alone(texts[0])
        elif texts:
            self._decode(texts)

    # The queue

    def _end_cancelled(self) -> None:
        for text in [text for text in self._waiting if text.is_cancelled]:
            self._waiting.remove(text)
            text.end("cancelled")
        for text in self.places.active():
            if text.is_cancelled:
                self._batch.drop(text)
                text.end("cancelled")
                self.places.leave()

    def _admit(self) -> None:
        """Give places to waiting texts, in order, while the context has room for them.

        One whose beginning is just being read for another text waits for that.
        """
        for text in list(self._waiting):
            if not self.places.has_room(text):
                break
            if not text.request.reads_all and self.places.is_being_read(text):
                continue
            with failing(text):
                if not self._place(text):
                    break
            self._waiting.remove(text)
        for n, text in enumerate(list(self._waiting), 1):
            if text.n_ahead != n:
                with failing(text):
                    text.tell_waiting(n)

    def _place(self, text: Text) -> bool:
        """Start a text that has room; returns whether the batch has its rows, too."""
        places, request, runtime = self.places, text.request, self._runtime
        place = places.find(text)
        resources = places.resources_of(place, text)
        drafters = request.method.drafters(resources)
        structure = text.structure
        needed = self._checked(request.method.name, drafters)
        if needed.rows > 1 and needed.rows + _fixed_rows(self.places.active()) > self._n_free_rows:
            return False
        # With ``exact``, trees are cut to a path: accepted branches would leave cells out of order.
        is_exact = runtime.context.params.exact
        is_narrow = not is_exact and needed.branches >= runtime.context.n_seq_max
        if places.can_rewind and places.n_slots == 1 and is_narrow:
            try:
                runtime.widen(needed.branches)
            finally:
                places.renew()
                self._batch = Batch(places.slots)
            place = places.find(text)
        if structure is not None and needed.rows == 1 and self._may_draft(request):
            drafters = [ForcedTokens(structure), *drafters]
        sampler = make_sampler(request.sampling, runtime.model, runtime.context.n_ctx, structure)
        place.text = text
        place.slot.n_batch = runtime.context.n_batch
        text.tell_waiting(0)
        verifier = request.method.verifier(resources)
        text.start(place.cache, drafters, verifier, sampler)
        # What is cached now begins this text.
        place.n_prompt, place.on_disk = len(request.prompt) - 1, request.on_disk
        return True

    def _may_draft(self, request: Request) -> bool:
        return request.method.name != BASELINE and self._runtime.context.n_rewind > 0

    def unavailable(self, methods: Iterable[Method]) -> dict[str, SpeculationError]:
        """Those of the methods that no text can be written with, by name, and why."""
        resources = self._runtime.resources.trial().for_text(n_slots=self.places.n_slots)
        found = {method.name: self._why_not(method, resources) for method in methods}
        return {name: error for name, error in found.items() if error is not None}

    def _why_not(self, method: Method, resources: Resources) -> SpeculationError | None:
        try:
            self._checked(method.name, method.drafters(resources))
        except MissingResource as error:
            # With a recurrent model, what is missing would not help.
            return error if self._runtime.context.n_rewind else self._cannot_rewind(method.name)
        except SpeculationError as error:
            return error
        except Exception:  # of a method from outside: a text that uses it will tell
            log.exception("method %s cannot be made", method.name)
        return None

    @property
    def _n_free_rows(self) -> int:
        """The rows of a batch that a single text may have."""
        return self._runtime.context.n_batch - 2 * (self.places.n_slots - 1)

    def _checked(self, name: str, drafters: Sequence[Drafter]) -> Requirements:
        """What the drafters of method ``name`` need. Raises InvalidParameter or CannotRewind if no
        text can have that here."""
        needed = Requirements.of_all(drafter.requires for drafter in drafters)
        if drafters:
            self._check_rewind(name, needed)
        if needed.rows > 1:
            self._check_rows(name, needed)
        # The context of a text that is alone is made anew if it has too few sequences.
        if needed.rows > 1 and self._runtime.context.params.exact:
            raise InvalidParameter(
                f"method {name} needs several branches, and with {{exact}} a text has one; load "
                f"the model without it, or use another method",
                settings=("exact",),
            )
        if needed.rows > 1 and self.places.can_rewind and self.places.n_slots > 1:
            _check_branches(name, needed.branches, self.places.places[0].slot.n_seq_max)
        return needed

    def _check_rows(self, name: str, needed: Requirements) -> None:
        """Raise InvalidParameter if no batch has the rows that every step of a text needs."""
        context, n_free = self._runtime.context, self._n_free_rows
        if needed.rows > n_free:
            # A batch is never larger than the context.
            setting = "n_ctx" if context.n_batch < context.params.n_batch else "n_batch"
            raise InvalidParameter(
                f"method {name} with these parameters decodes {needed.rows} rows at a "
                f"time, but a batch has at most {n_free} here; lower window, ngram or guesses, or "
                f"raise {{{setting}}}",
                settings=(setting,),
                requested=needed.rows,
                available=n_free,
            )

    def _check_rewind(self, name: str, needed: Requirements) -> None:
        """Raise CannotRewind if a method needs what a recurrent or hybrid model cannot do."""
        n_rewind = self._runtime.context.n_rewind
        if not n_rewind or (n_rewind < NO_LIMIT and needed.rows > 1):
            raise self._cannot_rewind(name)

    def _cannot_rewind(self, name: str) -> CannotRewind:
        model, n_rewind = self._runtime.model, self._runtime.context.n_rewind
        what = f"{model.path} ({model.description}) is recurrent or hybrid: its memory"
        if not n_rewind:
            return CannotRewind(
                f"{what} cannot drop rejected drafts, so method {name} cannot run; use method ar"
            )
        return CannotRewind(
            f"{what} allows only one path of at most {n_rewind} drafts, but method {name} needs "
            f"several branches; use auto or another method"
        )

    # Steps

    def _decode_alone(self, text: Text) -> None:
        """Steps of a text that is written alone, until a frame has passed or something comes."""

        def is_wanted() -> bool:
            return bool(self._waiting) or text.is_cancelled

        place, end = self._place_of(text), perf_counter() + FRAME_SECONDS
        self._decoding, self._piece = [text], None
        self._tell_cost([text])
        place.slot.n_batch = self._runtime.context.n_batch
        with failing(text):
            self.places.extend(place, _RUN_ROOM)
            while True:  # one step at least: what waits may have to wait for this text's end
                self.places.extend(place, text.room + 1)
                step([text], self._batch, watch=self._watch, is_wanted=is_wanted)
                if text.has_ended or is_wanted() or perf_counter() > end:
                    break
        self.places.shrink(place, text.room + 1)  # others may need the rest

    def _decode(self, texts: Sequence[Text]) -> None:
        """A step: read some prompt, draft for the texts that are written, decode all of it."""
        self._tell_cost(texts)
        reading = [text for text in texts if not text.is_writing]
        if reading and len(texts) > 1:
            for text in texts:  # a prompt takes longer than a frame
                text.flush()
        pieces = self._pieces(texts, reading)
        shares, drafting, writing = self._shares(texts), self._batch.drafting, []
        for place in self.places.places:
            written = place.text
            if written is None or written.has_ended or not written.is_writing:
                continue
            if written not in drafting:
                place.slot.n_batch = shares[written] + place.cache.n_deferred
                with failing(written):  # a full context would end the text
                    self.places.extend(place, written.room + 1)
            if not written.has_ended:
                writing.append(written)
        self._decoding = texts
        prompts = [(text, len(rows)) for text, rows in pieces.items()]
        prompts += [(text, text.cache.n_deferred) for text in writing if text.cache.n_deferred]
        self._piece = prompts[0] if len(prompts) == 1 else None
        max_rows = self._max_rows if len(writing) > 1 else NO_LIMIT
        start = perf_counter()
        step(writing, self._batch, pieces, max_rows=max_rows, watch=self._watch)
        n_rows = sum([len(rows) for rows in pieces.values()])
        if self._batch.cost is not None and n_rows >= _TILE and not writing:
            self._batch.cost.has_read(n_rows, perf_counter() - start)

    def _watch(self, share: float) -> bool:
        """Called during a long decode: whether nobody wants it any more."""
        if self._piece is not None:
            text, n_rows = self._piece
            with failing(text):
                text.tell_progress(int(share * n_rows))
        return all(text.is_cancelled or text.has_ended for text in self._decoding)

    def _tell_cost(self, texts: Sequence[Text]) -> None:
        """Tell the cost what a row attends to.

        Flash attention skips the cells of other texts, at least on a CPU: 8 rows of SmolLM2 took 36
        ms with 200 tokens in each of 8 texts, and 80 ms with 1,600 in one. To look at a cell costs
        about a twentieth of attending to it.
        """
        cost = self._batch.cost = self._runtime.resources.known_cost
        if cost is not None:
            n_cells = sum([len(place.cache.tokens) for place in self.places.places])
            own = sum([len(text.cache.tokens) for text in texts]) // len(texts)
            has_flash_attn = self._runtime.context.flash_attn
            cost.n_past = own + (n_cells - own) // 20 if has_flash_attn else n_cells
            if self.places.n_slots == 1:
                cost.n_past = 0  # the text's own count

    def _pieces(self, texts: Sequence[Text], reading: list[Text]) -> dict[Text, Rows]:
        """The next prompt rows of the ``reading`` among ``texts``. Those that are read begin."""
        pieces: dict[Text, Rows] = {}
        if not reading:
            return pieces
        reading.sort(key=lambda text: text.submitted)
        n_writing = len(texts) - len(reading)
        if len(texts) > 1 and self._long_prompts is not None:
            long = [text for text in reading if self._long_prompts.takes(text)]
            self._long_prompts.read(long, n_writing, _wait(n_writing))
            reading = [text for text in reading if text not in long]
        n_left = self._chunk(texts, n_writing)
        n_left -= sum([text.cache.n_deferred for text in self._batch.drafting])
        for text in reading:
            if n_left < 2:
                break
            self._place_of(text).slot.n_batch = n_left  # not what it had for drafts
            with failing(text):
                rows = text.next_piece(n_left)
                if rows is None:
                    n_left -= text.cache.n_deferred
                else:
                    n_left -= len(rows)
                    pieces[text] = rows
        return pieces

    def _shares(self, texts: Sequence[Text]) -> dict[Text, int]:
        """How many rows of a batch the tree of each text may have.

        All of them for a text that is alone. Among several, a method with a form of its own gets
        what that needs; the others divide up to half of what is left.
        """
        n_batch = self._runtime.context.n_batch
        if len(texts) == 1:
            return {texts[0]: n_batch - texts[0].cache.n_deferred}
        fixed = {text: text.needed.rows for text in texts if text.needed.rows > 1}
        n_open = max(1, len(texts) - len(fixed))
        share = max(1, min(ROOM, (n_batch - sum(fixed.values())) // 2 // n_open))
        return dict.fromkeys(texts, share) | fixed

    @property
    def _max_rows(self) -> int:
        """Rows of a batch with several texts, beyond which each costs more."""
        context = self._runtime.context
        on_cpu = context.flash_attn and context.model.n_host_layers
        return _TILE - 1 if on_cpu else NO_LIMIT

    def _chunk(self, texts: Sequence[Text], n_writing: int) -> int:
        """How many prompt rows to decode in a step of ``texts``, of which some are written."""
        n_texts, n_batch = len(texts), self._runtime.context.n_batch
        most = n_batch if n_texts == 1 else n_batch - sum(self._shares(texts).values())
        room = self._max_rows - n_texts  # one that has read its prompt has a row, too
        if n_writing and room >= _TILE // 4:  # else prompts would take too many steps
            most = min(most, room)
        # In a single slot, nobody could start earlier if the pieces were small.
        cost = self._runtime.resources.known_cost if self.places.n_slots > 1 else None
        return _in_time(cost, most, n_writing)

    def _place_of(self, text: Text) -> Place:
        return next(place for place in self.places.places if place.text is text)


def _in_time(cost: Cost | None, most: int, n_writing: int) -> int:
    """How many prompt rows to decode beside ``n_writing`` texts, which wait for their tokens."""
    if cost is None:
        return most
    seconds = _wait(n_writing) - cost.curve(0).at(n_writing)
    # Smaller pieces take more time for each row, and would seem to call for still smaller ones.
    least = _LEAST_ROWS if n_writing else _TILE
    return min(max(least, int(seconds / cost.row_seconds)), most)


def _wait(n_writing: int) -> float:
    """Seconds that a step with prompts may take.

    Texts that are written wait MAX_WAIT at most; twice as long if a step reads both a long prompt
    and short ones.
    """
    return MAX_WAIT if n_writing else MAX_READING


def _fixed_rows(texts: Sequence[Text]) -> int:
    """Rows that the texts' methods need in every step."""
    return sum([text.needed.rows for text in texts if text.needed.rows > 1])


def _check_branches(name: str, n_branches: int, n_seq_max: int) -> None:
    """Raise InvalidParameter if a method with rows of a fixed form needs more sequences than a text
    has. A tree is cut instead."""
    if n_branches >= n_seq_max:
        raise InvalidParameter(
            f"method {name} needs {n_branches + 1} sequences, a text has "
            f"{n_seq_max} here; give it fewer branches or guesses, or load the model with a "
            f"lower {{parallel}}",
            settings=("parallel",),
            requested=n_branches + 1,
            available=n_seq_max,
        )
