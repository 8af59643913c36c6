"""Places: which slot a text takes, and what is done with the texts that nobody writes.

A text begins with as much of its prompt as any slot has, or an idle text (``idle``): prefixes are
shared, not read again. Cells are reserved for running texts; idle ones make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from batching.cache import SequenceCache
from batching.clock import now
from batching.slots import Slot, Slots
from batching.tree import NO_LIMIT
from speculation.drafting.resources import Seat
from speculation.idle.copies import WORTH_KEEPING, IdleTexts
from speculation.idle.files import TextFiles
from speculation.runtime import Runtime
from speculation.sequence import ROOM, TokenSequence


class Place:
    """A slot with its cache, and the text that is there now, or None.

    n_prompt  how many of its tokens are those of a prompt: another turn brings them again
    on_disk   whether what is cached may go to disk
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.cache = SequenceCache(slot)
        self.sequence: TokenSequence | None = None
        self.used = 0.0  # when its last text ended
        self.n_prompt, self.on_disk = 0, True

    def n_lost(self, n_kept: int) -> int:
        """How many tokens of a prompt are lost if ``n_kept`` of the text are kept."""
        return min(self.n_prompt, len(self.cache.tokens)) - n_kept


class Places:
    """The slots of a context, and the texts in them."""

    def __init__(self, runtime: Runtime, n_slots: int, files: TextFiles | None = None) -> None:
        """Idle texts may go to ``files``."""
        self.runtime = runtime
        self.n_slots = n_slots
        self.idle = IdleTexts(
            files=files, read_seconds=_read_seconds(runtime), is_limited=not self.can_rewind
        )
        self.renew()

    def renew(self) -> None:
        """The context was replaced: all texts in it are lost."""
        self.slots = Slots(self.runtime.context, self.n_slots)
        self.places = [Place(slot) for slot in self.slots.slots]

    @property
    def can_rewind(self) -> bool:
        return self.runtime.context.n_rewind == NO_LIMIT

    def active(self) -> list[TokenSequence]:
        return [place.sequence for place in self.places if place.sequence is not None]

    def of(self, sequence: TokenSequence) -> Place:
        """The place where it is."""
        return next(place for place in self.places if place.sequence is sequence)

    def seat_of(self, place: Place) -> Seat:
        """Where the drafts of ``place`` are made."""
        return self.runtime.resources.seat_of(place.slot.index, self.n_slots)

    def is_being_read(self, waiting: TokenSequence) -> bool:
        """Whether another text is reading much that the prompt of ``waiting`` begins with.

        Prompts are compared once, and again when the other text is so far or has ended.
        """
        if waiting.awaited is not None:
            other, n = waiting.awaited
            if other.reading is not None and not other.has_ended and other.n_read <= n:
                return True
        reading = [text for text in self.active() if text.reading is not None]
        if not reading or not self.runtime.context.can_share:
            return False
        prompt = waiting.request.prompt[:-1]
        known = max([place.cache.n_kept(prompt) for place in self.places])
        common = {text: text.n_shared(prompt) for text in reading}
        first = max(reading, key=common.__getitem__)
        is_much = common[first] - known >= WORTH_KEEPING
        if is_much:
            n_rest = WORTH_KEEPING if self.can_rewind else 0
            waiting.awaited = first, common[first] - n_rest
        return is_much

    def has_room(self, text: TokenSequence) -> bool:
        """Whether a place and enough cells for a text are free."""
        is_free = any(place.sequence is None for place in self.places)
        return is_free and self._cells_for(text) + self._n_reserved() <= self.runtime.context.n_ctx

    def find(self, text: TokenSequence) -> Place:
        """The free place for a text that has room, with as much of its prompt as is kept
        anywhere."""
        free = [place for place in self.places if place.sequence is None]
        n_cells = self._cells_for(text)
        prompt = () if text.request.reads_all else text.request.prompt[:-1]
        common = {place: place.cache.n_kept(prompt) for place in self.places}
        chosen = max(free, key=common.__getitem__)
        other = min(free, key=lambda place: (bool(place.cache.tokens), place.used))
        is_spare = not other.cache.tokens
        loses_most = 2 * common[chosen] < len(chosen.cache.tokens)
        if loses_most or (is_spare and chosen.n_lost(common[chosen]) >= WORTH_KEEPING):
            chosen = other
        can_share = self.runtime.context.can_share
        best = max(self.places if can_share else [chosen], key=common.__getitem__)
        chosen.cache.reserve(1)
        idle, _ = self.idle.best(prompt, common[best])
        if idle is not None:
            self._drop(chosen)
            self._make_room(max(n_cells, len(idle.tokens)), free)
            *saved, (_, state) = idle.states
            if self.runtime.context.copy_in(chosen.slot.first, state):
                chosen.cache.tokens, chosen.cache.saved = list(idle.tokens), saved
                chosen.n_prompt, chosen.on_disk = idle.n_prompt, idle.on_disk
                self.idle.use(idle, prompt)
        elif common[chosen] < common[best]:
            self._drop(chosen)
            chosen.cache.share(best.cache, common[best])
            self.seat_of(chosen).share_text(self.seat_of(best), common[best])
            chosen.n_prompt, chosen.on_disk = common[best], best.on_disk
        elif chosen.n_lost(common[chosen]) >= WORTH_KEEPING:
            self._keep(chosen)
        if self.runtime.model.n_window and self.can_rewind:
            # llama.cpp reuses cells outside of the window that one sequence alone has.
            chosen.cache.reserve(min(2, chosen.slot.n_seq_max))
        chosen.slot.n_ctx = n_cells
        others = [place for place in free if place is not chosen]
        seat = self.runtime.resources.seat
        reads_again = seat.draft is not None or seat.heads  # what drafts, that is
        if self.idle.pays and not reads_again:
            for place in others:
                self._drop(place)
        self._make_room(n_cells, others)
        return chosen

    def leave(self) -> None:
        """Free the places of texts that have ended."""
        for place in self.places:
            if place.sequence is not None and place.sequence.has_ended:
                place.sequence, place.used = None, now()

    def extend(self, place: Place, n_tokens: int) -> None:
        """Give a text cells for ``n_tokens`` more, or as many as there are."""
        n_missing = len(place.cache.tokens) + n_tokens - place.slot.n_ctx
        if n_missing <= 0:
            return
        context = self.runtime.context
        n_free = min(context.n_ctx - self._n_reserved(), context.text_limit - place.slot.n_ctx)
        n_more = min(n_missing, n_free)
        if n_more > 0:
            self._make_room(n_more, [place for place in self.places if place.sequence is None])
            place.slot.n_ctx += n_more

    def shrink(self, place: Place, n_tokens: int) -> None:
        """Leave a text at most cells for ``n_tokens`` more, but what it had at first."""
        assert place.sequence is not None
        n_least = max(self._cells_for(place.sequence), len(place.cache.tokens) + n_tokens)
        place.slot.n_ctx = min(place.slot.n_ctx, n_least)

    def close(self) -> None:
        """Put all texts on disk, if that is wanted."""
        if self.idle.files is not None:
            for place in sorted(self.places, key=lambda place: place.used):
                self._keep(place, is_last=True)
            self.idle.close()

    def _n_reserved(self) -> int:
        """Cells that running texts may use."""
        return sum([place.slot.n_ctx for place in self.places if place.sequence is not None])

    def _cells_for(self, text: TokenSequence) -> int:
        """Cells for a text at first: up to its end, or a share of the context."""
        limit, n_prompt = self.runtime.context.text_limit, len(text.request.prompt)
        if self.n_slots == 1:
            return limit
        share = self.runtime.context.n_ctx // self.n_slots
        most = max(share - n_prompt - ROOM, share // 2)
        n_tokens = min(text.request.max_tokens or most, most)
        return min(limit, n_prompt + n_tokens + ROOM)

    def _make_room(self, n_more: int, idle: Sequence[Place]) -> None:
        """Drop idle texts, least recently used first, until ``n_more`` cells can be reserved, in a
        smaller context of the draft model, too."""
        n_used = n_more + self._n_reserved() + sum([len(place.cache.tokens) for place in idle])
        draft = self.runtime.draft
        for place in sorted(idle, key=lambda place: place.used):
            n_idle = len(place.cache.tokens)
            if n_used > self.runtime.context.n_ctx:
                self._drop(place)
            elif draft is not None and n_used > draft.n_ctx:
                self.seat_of(place).forget_text()
            else:
                break
            n_used -= n_idle

    def _drop(self, place: Place) -> None:
        """Empty a place; a text worth it is kept outside of the cache."""
        self._keep(place)
        place.cache.truncate(0)
        self.seat_of(place).forget_text()

    def _keep(self, place: Place, *, is_last: bool = False) -> None:
        """Copy a text that is worth it out of the cache."""
        cache = place.cache
        cache.truncate(cache.n_past)  # to a state that no failed decode has spoiled
        copy = partial(self.runtime.context.copy_out, place.slot.first)
        n_prompt = min(place.n_prompt, len(cache.tokens))
        self.idle.put(
            cache.tokens, n_prompt, copy, cache.saved, on_disk=place.on_disk, is_last=is_last
        )


def _read_seconds(runtime: Runtime) -> float:
    """What reading a token again takes, where copying it may take longer: on a GPU."""
    model = runtime.model
    on_gpu = model.n_host_layers < model.n_layer
    return runtime.resources.cost.row_seconds if on_gpu else inf
