"""The decode loop: draft, choose, decode, accept, for one sequence or for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batching.clock import now
from batching.rows import Rows
from batching.slots import Slots
from batching.target import Cancelled, Watch
from batching.together import Running, advance, run
from batching.tree import NO_LIMIT
from speculation.auto.choose import choose, follow, give_one_length
from speculation.drafting.cost import Cost
from speculation.sequence import ROOM, TokenSequence

MAX_WAIT = 0.2  # seconds that sequences wait for the drafter of another one, or for its prompt


class Batch:
    """What the sequences of a step share.

    slots     decodes their rows
    cost      what a decode costs, if that is known
    drafting  by sequence, what drafts its next tree, until that is done
    has_device  whether a device computed the last step
    accepted  sequences whose tokens are handed out while a device computes the next step
    """

    def __init__(self, slots: Slots, cost: Cost | None = None) -> None:
        self.slots, self.cost = slots, cost
        self.drafting: dict[TokenSequence, Running] = {}
        self.has_device = False
        self.accepted: list[TokenSequence] = []

    def draft(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
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
                        drafting[one] = Running(one.draft())
                        continue
                    run(one.draft())  # nothing to share, or to read
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

    def meanwhile(self) -> None:
        """A device computes."""
        self.has_device = True
        self.hand_out()

    def hand_out(self) -> None:
        """Hand out the tokens of the step before, if that was left for later."""
        for one in self.accepted:
            with one:
                one.hand_out(len(self.accepted))
        self.accepted.clear()

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
    max_rows: int = NO_LIMIT,
    watch: Watch | None = None,
    is_wanted: Callable[[], bool] = lambda: False,
) -> None:
    """Draft for all ``sequences``, decode the drafts that are worth their rows, and accept.

    ``pieces`` of the prompts of other sequences ride in the same batch, and ``max_rows`` limits it
    where drafts are chosen. A sequence that fails ends alone; if the decode fails, all in it do.
    ``watch`` may end a long decode (``Target.decode``); then nothing is accepted. A sequence that
    is alone and would draft nothing takes a run of plain steps, up to a moment when ``is_wanted``
    says that the engine is.
    """
    cost, pieces = batch.cost, pieces or {}
    is_alone = len(sequences) == 1 and not pieces and not batch.drafting
    for one in sequences:
        if one not in batch.drafting:
            with one:
                if one.look() and is_alone:
                    batch.hand_out()
                    one.run_plain(is_wanted)
                    return
    if cost is not None:
        cost.n_texts = max(1, len(sequences))
    # 1. Each sequence drafts a tree below its last token. Among all of them, keep what is worth its
    #    rows.
    written = batch.draft(sequences)
    n_prompt = sum([len(rows) for rows in pieces.values()])
    n_prompt += sum([one.cache.n_deferred for one in written])
    choose(written, n_prompt if len(sequences) + len(pieces) > 1 else 0, max_rows)
    if cost is not None and len(written) + len(pieces) > 1:
        give_one_length(written, cost)
    # Trees precede prompts: only their rows have output, so that these are found quickly.
    rows: dict[TokenSequence, Rows] = {}
    for one in written:
        if not one.has_ended:  # by an error of its method while drafts were chosen
            with one:
                rows[one] = one.rows()
    rows.update(pieces)
    if not rows:
        batch.hand_out()
        return
    order = list(rows)
    if order[0].cache.is_limited:  # drafts come last, as in ``rows_back``
        order.sort(key=lambda one: one not in pieces and len(one.tree) > 1)
    # 2. Decode all rows in one forward pass. If a device computes it, this process hands out the
    #    tokens of the step before meanwhile.
    parts: list[tuple[Any, Rows]] = [(one.cache.target, rows[one]) for one in order]
    began = now()
    try:
        outputs = batch.slots.decode(parts, watch, batch.meanwhile)
    except Cancelled:
        return
    except Exception as error:
        for one in order:
            one.fail(error)
        return
    seconds = now() - began
    if cost is not None:
        follow(written, cost, [len(rows[one]) for one in order], n_prompt, seconds)
    # 3. Each sequence verifies its tree, keeps the KV entries of the accepted path, and adds the
    #    bonus token.
    for one, output in zip(order, outputs, strict=True):
        if one.has_ended:  # by an error while the rows were computed
            continue
        with one:
            if one in pieces:
                one.take_piece(output)
                continue
            reason = one.accept(output, seconds, len(rows)).finish_reason
            if batch.has_device and reason is None:
                batch.accepted.append(one)
            else:
                one.hand_out(len(sequences))
