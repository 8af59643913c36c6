"""The decode loop: draft, choose, decode, accept, for one sequence or for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batching.clock import now
from batching.rows import Rows
from batching.slots import Slots
from batching.target import Cancelled, Output, Watch
from batching.together import Running, advance, run
from batching.tree import NO_LIMIT
from speculation.auto.choose import choose, follow
from speculation.drafting.cost import Cost, Prices
from speculation.sequence import ROOM, TokenSequence

MAX_WAIT = 0.2  # seconds that sequences wait for the drafter of another one, or for its prompt


class Batch:
    """What lives from step to step.

    slots     decodes the rows of all sequences
    cost      what a decode costs, if it is known whatever the methods
    max_rows  rows of a step with several sequences, beyond which each costs more
    drafting  by sequence, what drafts its next tree, until that is done
    accepted  sequences whose tokens are handed out while a device computes the next step
    has_device  whether a device computed the last step
    """

    def __init__(self, slots: Slots, cost: Cost | None = None, max_rows: int = NO_LIMIT) -> None:
        self.slots, self.cost, self.max_rows = slots, cost, max_rows
        self.drafting: dict[TokenSequence, Running] = {}
        self.accepted: list[TokenSequence] = []
        self.has_device = False

    def prices(self, sequences: Sequence[TokenSequence], n_past: int) -> Prices | None:
        """What drafts have to save, if a drafter or the batch knows what a decode costs."""
        cost = next((one.chooser.cost for one in sequences if one.chooser is not None), self.cost)
        return None if cost is None else cost.prices(n_past, len(sequences))

    def is_plain(
        self,
        sequences: Sequence[TokenSequence],
        pieces: Mapping[TokenSequence, Rows],
        prices: Prices | None,
    ) -> bool:
        """Ask each sequence whether it would draft; whether one that would not is all there is."""
        for one in sequences:
            if one not in self.drafting:
                with one:
                    one.look(prices)
        return len(sequences) == 1 and sequences[0].is_plain and not (pieces or self.drafting)

    def draft(
        self, sequences: Sequence[TokenSequence], prices: Prices | None
    ) -> list[TokenSequence]:
        """Let each sequence draft; returns those that have, or that draft nothing.

        The work of a draft model or of heads is done for all of them together. A sequence whose
        drafter has much to read drafts in a later step.
        """
        drafting, ready, end = self.drafting, list[TokenSequence](), now() + MAX_WAIT
        for one in [one for one in drafting if one.has_ended]:
            self.drop(one)
        for one in sequences:
            if one.has_ended or one in drafting:
                continue
            with one:
                if not one.is_plain:
                    if len(sequences) > 1 or one.n_unread > ROOM:
                        drafting[one] = Running(one.draft(prices))
                        continue
                    run(one.draft(prices))  # nothing to share, or to read
                ready.append(one)
        while any(running.work for running in drafting.values()) and now() <= end:
            advance(list(drafting.values()))
        for one, running in list(drafting.items()):
            if running.work is None:
                del drafting[one]
                if running.error is None:
                    ready.append(one)
                else:
                    one.fail(running.error)
        return ready

    def rows(
        self, drafted: Sequence[TokenSequence], pieces: Mapping[TokenSequence, Rows]
    ) -> dict[TokenSequence, Rows]:
        """The rows of the trees and of the ``pieces`` of prompts, in the order of the batch."""
        rows: dict[TokenSequence, Rows] = {}
        for one in drafted:
            if not one.has_ended:  # by an error of its method while drafts were chosen
                with one:
                    rows[one] = one.rows()
        # Trees precede prompts: only their rows have output, so that these are found quickly.
        rows.update(pieces)
        if not rows or not next(iter(rows)).cache.is_limited:
            return rows
        # Drafts come last, as in ``rows_back``.
        order = sorted(rows, key=lambda one: one not in pieces and len(one.tree) > 1)
        return {one: rows[one] for one in order}

    def decode(
        self, rows: Mapping[TokenSequence, Rows], watch: Watch | None
    ) -> tuple[dict[TokenSequence, Output], float]:
        """The output of each sequence that goes on, and the seconds that it took. None if ``watch``
        ends the decode, or if it fails, which ends all of them."""
        if not rows:
            self.hand_out()
            return {}, 0.0
        parts: list[tuple[Any, Rows]] = [(one.cache.target, own) for one, own in rows.items()]
        began = now()
        try:
            outputs = self.slots.decode(parts, watch, self._meanwhile)
        except Cancelled:
            return {}, 0.0
        except Exception as error:
            for one in rows:
                one.fail(error)
            return {}, 0.0
        seconds, found = now() - began, zip(rows, outputs, strict=True)
        return {one: output for one, output in found if not one.has_ended}, seconds

    def _meanwhile(self) -> None:
        """A device computes: hand out the tokens of the step before."""
        self.has_device = True
        self.hand_out()

    def hand_out(self, *, may_wait: bool = False) -> None:
        """Hand out the accepted tokens. If they ``may_wait``, those of sequences that go on do so
        until a device computes the next step."""
        accepted, may_wait = self.accepted, may_wait and self.has_device
        self.accepted = [one for one in accepted if may_wait and not one.is_complete]
        for one in accepted:
            if one not in self.accepted:
                with one:
                    one.hand_out(len(accepted))

    def drop(self, sequence: TokenSequence) -> None:
        """It has ended, perhaps while it drafted."""
        if (running := self.drafting.pop(sequence, None)) is not None:
            with sequence:
                running.close()


def step(
    sequences: Sequence[TokenSequence],
    batch: Batch,
    pieces: Mapping[TokenSequence, Rows] | None = None,
    *,
    n_past: int = 0,
    watch: Watch | None = None,
    is_wanted: Callable[[], bool] = lambda: False,
) -> None:
    """Draft for all ``sequences``, decode the drafts that are worth their rows, and accept.

    ``pieces`` of the prompts of others ride in the same batch, whose rows attend to ``n_past``
    tokens on average. A sequence that fails ends alone; if the decode fails, all in it do.
    ``watch`` may end a long decode (``Target.decode``); then nothing is accepted. A sequence that
    is alone and would draft nothing takes plain steps until ``is_wanted`` says that the engine is.
    """
    pieces, prices = pieces or {}, batch.prices(sequences, n_past)
    if batch.is_plain(sequences, pieces, prices):
        batch.hand_out()
        with sequences[0]:
            sequences[0].run_plain(prices, is_wanted)
        return
    # 1. Each sequence drafts a tree below its last token. Keep what is worth its rows.
    drafted = batch.draft(sequences, prices)
    choose(drafted, pieces, prices, batch.max_rows)
    rows = batch.rows(drafted, pieces)
    # 2. Decode all rows in one forward pass.
    outputs, seconds = batch.decode(rows, watch)
    if prices is not None and outputs:
        follow(prices, rows, seconds)
    # 3. Each sequence verifies its tree, keeps the KV entries of the accepted path, and adds the
    #    bonus token.
    for one, output in outputs.items():
        with one:
            if one in pieces:
                one.take_piece(output)
            else:
                one.accept(output, seconds, len(rows))
                batch.accepted.append(one)
    batch.hand_out(may_wait=True)
