"""Texts written step by step on a fake target, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from batching.cache import SequenceCache
from batching.rows import Rows
from batching.slots import Slot, Slots
from batching.tree import NO_LIMIT
from speculation.drafter import Drafter
from speculation.methods import parse_method
from speculation.request import Request
from speculation.sequence import Emitted, TokenSequence
from speculation.step import Batch, step
from speculation.verify import Match, Verifier
from tests.support.fake_target import FakeReply, FakeSampler


class WrittenText(TokenSequence):
    """A text in a slot, and what its steps emitted."""

    def __init__(
        self,
        prompt: Sequence[int],
        slot: Slot,
        drafters: Sequence[Drafter] = (),
        *,
        sampler: FakeSampler | None = None,
        n_tokens: int = NO_LIMIT,
        verifier: Verifier | None = None,
        cache: SequenceCache | None = None,
        record: bool = False,
    ) -> None:
        most = None if n_tokens == NO_LIMIT else n_tokens
        request = Request(tuple(prompt), parse_method("ar"), max_tokens=most, record=record)
        super().__init__(request, cast("Any", FakeReply(n_tokens)))
        self.emitted: list[Emitted] = []
        sampler = sampler or FakeSampler(0, 0)
        self.start(cache or SequenceCache(slot), drafters, verifier or Match(), sampler)

    def hand_out(self, n_texts: int = 1) -> None:
        self.emitted += [self._emitted] if self._emitted else []
        super().hand_out(n_texts)


def write(
    text: WrittenText, slots: Slots, is_wanted: Callable[[], bool] = lambda: False
) -> Iterator[Emitted]:
    """Write a text that is alone, as the scheduler does; yields what each step emits."""
    batch, n_seen = Batch(slots), 0
    while not text.has_ended:
        pieces: dict[TokenSequence, Rows] = {}
        if text.reading is not None and (rows := text.next_piece(NO_LIMIT)) is not None:
            pieces[text] = rows
        step([text] if text.reading is None else [], batch, pieces, is_wanted=is_wanted)
        yield from text.emitted[n_seen:]
        n_seen = len(text.emitted)
        if text.reply.error is not None:
            raise text.reply.error
