"""Runs several generations at once: in every step, one decode for all of them.

The two halves of a step are those of a single text (``continuation``). In between, the drafts worth
their rows are chosen among all texts together (``choice``), and all rows go into one batch.
Prompts are read in chunks: short ones beside the texts that are written, long ones in a context of
their own (``long_prompts``). What drafts with a model of its own does so for all texts in one batch
(``batching.together``). A text is what it would be alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter

from batching.cache import common_prefix
from batching.rows import Rows
from batching.slots import Slots
from batching.together import Running, advance
from batching.tree import NO_LIMIT
from speculation.active_text import ActiveText, Place
from speculation.choice import choose, follow, level
from speculation.continuation import Continuation, Emitted
from speculation.fast_path import plain_steps
from speculation.generation import Host
from speculation.long_prompts import LongPrompts
from speculation.shelf import Shelf
from speculation.submitted import Requests, Submitted
from speculation.text_files import TextFiles

log = logging.getLogger(__name__)

# A running text waits about this long for its next token while a prompt is read beside it, seconds;
# twice as long if a step reads both a long prompt and short ones.
MAX_WAIT = 0.2
MAX_READING = 1.0  # seconds of a step that only reads prompts: a new request waits no longer
_WORTH_WAITING = 32  # tokens of a prompt: as many as are worth a copy of an idle text
_TREE_ROOM = 64  # cells for drafts beyond a text's last token
# From so many rows on, flash attention on a CPU works on tiles of as many (ggml's GGML_FA_TILE_Q).
# A tile attends to all that any of its rows does: with rows of each text, to all of all texts.
_TILE = 64
_RUN_ROOM = 512  # cells for a run of plain steps, which ends after 16 ms


class _Failing:
    """An error inside of it ends one text alone. A class, since a generator takes 1.5 µs more."""

    __slots__ = ("_scheduler", "_text")

    def __init__(self, scheduler: Scheduler, text: ActiveText) -> None:
        self._scheduler, self._text = scheduler, text

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._scheduler.fail(self._text, error)
        return True


class Scheduler:
    """Takes requests from any thread; a worker calls ``step``."""

    def __init__(
        self,
        engine: Host,
        n_slots: int,
        wake: Callable[[], None],
        files: TextFiles | None = None,
    ) -> None:
        """``wake`` is called when there is something to do; idle texts may go to ``files``."""
        self._engine = engine
        self._shared = Slots(engine.context, n_slots)
        self.places = [Place(slot) for slot in self._shared.slots]
        self._shelf = Shelf(files=files, read_seconds=_read_seconds(engine))
        self.requests = Requests(engine, wake)
        n_seq_max = self._shared.slots[0].n_seq_max
        self._long_prompts = LongPrompts.open(engine, n_seq_max, MAX_WAIT)

    @property
    def n_running(self) -> int:
        return len(self._active())

    @property
    def _can_rewind(self) -> bool:
        return self._engine.context.n_rewind == NO_LIMIT

    def end(self) -> None:
        """End all generations."""
        self.requests.end()
        for text in self._active():
            self._end(text, "cancelled")

    def close(self) -> None:
        """End all generations, and put all texts on disk, if that is wanted."""
        self.end()
        if self._shelf.files is not None:
            for place in sorted(self.places, key=lambda place: place.used):
                self._drop(place)
            self._shelf.close()
        if self._long_prompts is not None:
            self._long_prompts.close()

    def _active(self) -> list[ActiveText]:
        return [place.text for place in self.places if place.text is not None]

    def step(self) -> bool:
        """One decode for all active texts, or a run of plain steps of a text that is alone.

        Returns False if there is nothing to do.
        """
        try:
            self._end_cancelled()
            self._admit()
            texts = self._active()
            writing = texts[0].writing if len(texts) == 1 else None
            if writing is not None and texts[0].drafting is None and writing.is_plain():
                self._run_plain(texts[0], writing)
            elif texts:
                self._decode(texts)
        except Exception as error:  # nobody must wait for ever
            log.exception("a step failed")
            for text in self._active():
                self.fail(text, error)
        return bool(self.requests.waiting or self._active())

    # Requests and places

    def _end_cancelled(self) -> None:
        for text in self._active():
            if text.generation.is_cancelled:
                self._end(text, "cancelled")
        self.requests.end_cancelled()

    def _admit(self) -> None:
        """Give waiting requests free places, in order, while the context has room for them.

        One whose beginning is just being read for another text waits for that.
        """
        for generation in list(self.requests.waiting):
            if self._is_being_read(generation.prompt[:-1]):
                continue
            try:
                place = self._place_for(generation)
                if place is None:
                    return
                place.text = ActiveText(self._engine, generation, place, len(self.places))
            except Exception as error:
                generation.fail(error)
            self.requests.waiting.remove(generation)

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether another text is reading much that ``prompt`` begins with."""
        reading = [text for text in self._active() if text.writing is None]
        if not reading or not self._can_rewind:
            return False
        known = max([place.cache.n_kept(prompt) for place in self.places])
        coming = max([common_prefix(text.generation.prompt[:-1], prompt) for text in reading])
        return coming - known >= _WORTH_WAITING

    def _place_for(self, generation: Submitted) -> Place | None:
        """A free place with room for a text, and as much of its prompt as is kept anywhere.

        None while all places are taken, or too few cells are free.
        """
        free = [place for place in self.places if place.text is None]
        n_cells, n_ctx = self._cells_for(generation), self._engine.context.n_ctx
        if not free or n_cells + self._n_reserved() > n_ctx:
            return None
        prompt, resources = generation.prompt[:-1], self._engine.resources
        common = {place: place.cache.n_kept(prompt) for place in self.places}
        chosen = max(free, key=common.__getitem__)
        if 2 * common[chosen] < len(chosen.cache.tokens):  # it would lose a long text
            chosen = min(free, key=lambda place: (bool(place.cache.tokens), place.used))
        # A recurrent state is not shared: it is that of a whole text, which goes on elsewhere.
        best = max(self.places if self._can_rewind else [chosen], key=common.__getitem__)
        chosen.cache.reserve(1)
        shelved, n_shelved = self._shelf.best(prompt, common[best])
        if shelved is not None:
            self._drop(chosen)
            self._make_room(max(n_cells, len(shelved.tokens)), free)
            if self._engine.context.copy_in(chosen.slot.first, shelved.state):
                chosen.cache.tokens = list(shelved.tokens)
                chosen.cache.saved = list(shelved.saved or ())
                self._shelf.use(shelved, whole=n_shelved == len(shelved.tokens))
        elif common[chosen] < common[best]:
            self._drop(chosen)
            chosen.slot.share(best.slot, common[best])
            n_slots = len(self.places)
            theirs, own = (resources.of_slot(place.slot.index, n_slots) for place in (best, chosen))
            own.share_text(theirs, common[best])
            chosen.cache.tokens = list(prompt[: common[best]])
        chosen.slot.n_ctx = n_cells
        others = [place for place in free if place is not chosen]
        reads_again = resources.draft is not None or resources.heads  # what drafts, that is
        if self._shelf.pays and not reads_again:
            for place in others:
                self._drop(place)
        self._make_room(n_cells, others)
        return chosen

    def _n_reserved(self) -> int:
        """Cells that running texts may use."""
        return sum([place.slot.n_ctx for place in self.places if place.text is not None])

    def _make_room(self, n_more: int, idle: Sequence[Place]) -> None:
        """Drop idle texts, least recently used first, until ``n_more`` cells can be reserved."""
        n_used = n_more + self._n_reserved() + sum([len(place.cache.tokens) for place in idle])
        for place in sorted(idle, key=lambda place: place.used):
            if n_used > self._engine.context.n_ctx:
                n_used -= len(place.cache.tokens)
                self._drop(place)

    def _drop(self, place: Place) -> None:
        """Empty a place; a text worth it is kept outside of the cache."""
        cache = place.cache
        cache.truncate(cache.n_past)  # to a state that no failed decode has spoiled
        if self._is_copied_whole(len(cache.tokens)):
            saved = None if self._can_rewind else list(cache.saved)
            copy = partial(self._engine.context.copy_out, place.slot.first)
            self._shelf.put(cache.tokens, copy, saved)
        cache.truncate(0)
        resources = self._engine.resources
        resources.of_slot(place.slot.index, len(self.places)).forget_text()

    def _is_copied_whole(self, n_tokens: int) -> bool:
        """Whether another text can start with any part of a copy: of layers with a sliding window,
        llama.cpp copies no more than the window."""
        n_window = self._engine.context.model.n_window
        return not n_window or n_tokens <= n_window

    def _cells_for(self, generation: Submitted) -> int:
        """Cells for a text at first: up to its end, or a share of the context."""
        n_ctx, n_prompt = self._engine.context.n_ctx, len(generation.prompt)
        share = n_ctx // len(self.places)
        most = max(share - n_prompt - _TREE_ROOM, share // 2)
        n_tokens = min(generation.request.max_tokens or most, most)
        return min(n_ctx, n_prompt + n_tokens + _TREE_ROOM)

    def _extend(self, text: ActiveText, n_tokens: int) -> None:
        """Give a text cells for ``n_tokens`` more, or as many as there are."""
        slot, n_ctx = text.place.slot, self._engine.context.n_ctx
        n_missing = len(text.place.cache.tokens) + n_tokens - slot.n_ctx
        if n_missing <= 0:
            return
        n_more = min(n_missing, n_ctx - self._n_reserved())
        if n_more > 0:
            self._make_room(n_more, [place for place in self.places if place.text is None])
            slot.n_ctx += n_more

    # Steps

    def _run_plain(self, text: ActiveText, writing: Continuation) -> None:
        def is_wanted() -> bool:
            return bool(self.requests.waiting) or text.generation.is_cancelled

        slot = text.place.slot
        n_before = slot.n_ctx
        with self._failing(text):
            self._extend(text, _RUN_ROOM)
            for emitted in plain_steps(writing, is_wanted):
                self._take(text, emitted)
        slot.n_ctx = max(n_before, len(text.place.cache.tokens) + 1)  # others may need the rest

    def _decode(self, texts: Sequence[ActiveText]) -> None:
        """A step: read some prompt, draft for the texts that are written, decode all of it."""
        start = perf_counter()
        self._know_place(texts)
        if any(text.writing is None for text in texts):  # a prompt takes longer than a frame
            for text in texts:
                text.generation.flush()
        chunks = self._read(texts)
        written = self._draft(texts, start)
        continuations = list(written.values())
        n_prompt = sum([len(rows) for rows in chunks.values()])
        n_prompt += sum([c.cache.n_deferred for c in continuations])
        choose(continuations, n_prompt, self._max_rows if len(written) > 1 else NO_LIMIT)
        cost = self._engine.resources.known_cost
        if not self._can_rewind and cost is not None and len(written) + len(chunks) > 1:
            level(continuations, cost.curve(0))
        # Trees precede prompts: only their rows have output, so that these are found quickly.
        rows = {text: one.rows() for text, one in written.items()} | chunks
        if not rows:
            return
        order = list(rows)
        if not self._can_rewind:  # texts with drafts come last, as in ``rows_back``
            order.sort(key=lambda text: text in written and len(written[text].tree) > 1)
        began = perf_counter()
        try:
            outputs = self._shared.decode([(text.place.slot, rows[text]) for text in order])
        except Exception as error:
            for text in order:
                self.fail(text, error)
            return
        seconds = perf_counter() - began
        n_rows = sum([len(part) for part in rows.values()])
        is_one_decode = self._can_rewind or len({len(part) for part in rows.values()}) == 1
        if is_one_decode and not n_prompt:  # a prompt's rows are cheaper, without output
            follow(continuations, n_rows, seconds)
        elif cost is not None:
            cost.decoded(n_rows)
        for text, output in zip(order, outputs, strict=True):
            with self._failing(text):
                if text in written:
                    self._take(text, written[text].accept(output, seconds), len(texts))
                else:
                    text.read(output)

    def _know_place(self, texts: Sequence[ActiveText]) -> None:
        """Tell the cost what a row attends to.

        Flash attention skips the cells of other texts, at least on a CPU: 8 rows of SmolLM2 took 36
        ms with 200 tokens in each of 8 texts, and 80 ms with 1,600 in one. To look at a cell costs
        about a twentieth of attending to it.
        """
        cost, context = self._engine.resources.known_cost, self._engine.context
        if cost is not None:
            n_cells = sum([len(place.cache.tokens) for place in self.places])
            own = sum([len(text.place.cache.tokens) for text in texts]) // len(texts)
            cost.n_past = own + (n_cells - own) // 20 if context.flash_attn else n_cells

    def _read(self, texts: Sequence[ActiveText]) -> dict[ActiveText, Rows]:
        """The next prompt rows of the texts that are not written yet; those that are read begin."""
        chunks: dict[ActiveText, Rows] = {}
        reading = [text for text in texts if text.writing is None]
        if not reading:
            return chunks
        reading.sort(key=lambda text: text.generation.submitted)
        n_writing = len(texts) - len(reading)
        if len(texts) > 1 and self._long_prompts is not None:
            long = [text for text in reading if self._long_prompts.takes(text)]
            self._long_prompts.read(long, n_writing, _wait(n_writing), self._failing)
            reading = [text for text in reading if text not in long]
        n_left = self._chunk(len(texts), n_writing)
        for text in reading:
            if n_left < 2:
                break
            text.place.slot.n_batch = n_left  # not what the last text had for its drafts
            with self._failing(text):
                rows = text.reading.next_rows(n_left)
                if rows is None:
                    n_left -= text.place.cache.n_deferred
                    text.begin()
                else:
                    n_left -= len(rows)
                    chunks[text] = rows
        return chunks

    def _draft(self, texts: Sequence[ActiveText], start: float) -> dict[ActiveText, Continuation]:
        """Let the texts that are written draft."""
        written = {text: text.writing for text in texts if text.writing is not None}
        written = {text: one for text, one in written.items() if text.place.text is text}
        resources = self._engine.resources
        if resources.known_cost is not None:
            resources.known_cost.n_texts = max(1, len(written))
        drafted: dict[ActiveText, Continuation] = {}
        for text, one in written.items():
            if text.drafting is not None:
                continue
            share = self._tree_rows(len(texts)) // len(texts)
            text.place.slot.n_batch = share + one.cache.n_deferred
            with self._failing(text):
                self._extend(text, _TREE_ROOM + 1)  # a full context would end the text
                proposing = text.propose()
                one.started = start
                if proposing is None:
                    drafted[text] = one
                else:
                    text.drafting = Running(proposing)
        running = [text.drafting for text in written if text.drafting is not None]
        # A draft model may have a long prompt to read: then the others do not wait for this text.
        end = perf_counter() + MAX_WAIT
        while any(one.work for one in running) and perf_counter() < end:
            advance(running)
        for text, one in written.items():
            if (drafting := text.drafting) is not None and drafting.work is None:
                text.drafting = None
                with self._failing(text):
                    if drafting.error is not None:
                        raise drafting.error
                    drafted[text] = one
        return drafted

    def _tree_rows(self, n_texts: int) -> int:
        """How many rows of a batch are kept for the trees of ``n_texts``; prompts may have the
        others."""
        return min(_TREE_ROOM * n_texts, self._engine.context.n_batch // 2)

    @property
    def _max_rows(self) -> int:
        """Rows of a batch with several texts, beyond which each costs more."""
        context = self._engine.context
        on_cpu = context.flash_attn and context.model.n_host_layers
        return _TILE - 1 if on_cpu else NO_LIMIT

    def _chunk(self, n_texts: int, n_writing: int) -> int:
        """How many prompt rows to decode in a step of ``n_texts``, of which some are written."""
        most = self._engine.context.n_batch - self._tree_rows(n_texts)
        room = self._max_rows - n_texts  # one that has read its prompt has a row, too
        if n_writing and room >= _TILE // 4:  # else prompts would take too many steps
            most = min(most, room)
        cost = self._engine.resources.known_cost
        if cost is None:
            return most
        seconds = _wait(n_writing) - cost.curve(0).at(n_writing)
        return max(2, min(int(seconds / cost.row_seconds), most))

    def _failing(self, text: ActiveText) -> _Failing:
        return _Failing(self, text)

    def _take(self, text: ActiveText, emitted: Emitted, n_texts: int = 1) -> None:
        text.take(emitted, n_texts)
        if emitted.finish_reason is not None:
            self._end(text, emitted.finish_reason)

    def _end(self, text: ActiveText, reason: str) -> None:
        text.end()
        text.generation.finish(reason)

    def fail(self, text: ActiveText, error: Exception) -> None:
        """End a text with an error."""
        try:
            text.end()
        finally:
            text.generation.fail(error)


def _read_seconds(engine: Host) -> float:
    """What reading a token again takes, where copying it may take longer: on a GPU."""
    model, cost = engine.context.model, engine.resources.known_cost
    on_gpu = model.n_host_layers < model.n_layer
    return cost.row_seconds if on_gpu and cost is not None else inf


def _wait(n_writing: int) -> float:
    """Seconds that a step with prompts may take."""
    return MAX_WAIT if n_writing else MAX_READING
