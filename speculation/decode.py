"""The decode loop: draft, choose, decode, verify, for one text or for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from batching.clock import now
from batching.rows import Rows
from batching.target import Cancelled, Meanwhile, Output, Watch
from batching.together import Running, advance, run
from batching.tree import NO_LIMIT
from speculation.auto.choose import choose, follow, give_one_length
from speculation.drafting.cost import Cost
from speculation.fast_path import run_plain
from speculation.text import ROOM, Text, failing

MAX_WAIT = 0.2  # seconds that texts wait for the drafter of another one, or for its prompt


class Decoder(Protocol):
    """Decodes rows of several texts in one batch: ``batching.slots.Slots``, or a replay's."""

    def decode(
        self,
        parts: Sequence[tuple[Any, Rows]],
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Sequence[Output]:
        """The output of each part: a text's target and its rows. ``Target.decode`` says what
        ``meanwhile`` is."""
        ...


class Batch:
    """What the texts of a step share.

    slots     decodes their rows
    cost      what a decode costs, if that is known
    drafting  by text, what drafts its next tree, until that is done
    has_device  whether a device computed the last step
    accepted  texts whose tokens are handed out while a device computes the next step
    """

    def __init__(self, slots: Decoder, cost: Cost | None = None) -> None:
        self.slots, self.cost = slots, cost
        self.drafting: dict[Text, Running] = {}
        self.has_device = False
        self.accepted: list[Text] = []

    def propose(self, texts: Sequence[Text]) -> list[Text]:
        """Let each text draft; returns those that have.

        The work of a draft model or of heads is done for all of them together. A text whose drafter
        has much to read drafts in a later step.
        """
        for text in [text for text in self.drafting if text.has_ended]:
            self.drop(text)
        drafted, drafting, start = [], self.drafting, now()
        for text in texts:
            if text not in drafting:
                with failing(text):
                    proposing = text.propose()
                    if len(texts) > 1 and text.stats.n_steps:
                        text.started = start  # its step begins with that of the others
                    if proposing is None:
                        drafted.append(text)
                    elif len(texts) == 1 and text.n_unread <= ROOM:  # nothing to share, or to read
                        run(proposing)
                        drafted.append(text)
                    else:
                        drafting[text] = Running(proposing)
        end = start + MAX_WAIT
        while any(one.work for one in drafting.values()):
            if now() > end:
                break
            advance(list(drafting.values()))
        for text, one in list(drafting.items()):
            if one.work is None:
                del drafting[text]
                if one.error is None:
                    drafted.append(text)
                else:
                    text.fail(one.error)
        return drafted

    def meanwhile(self) -> None:
        """A device computes."""
        self.has_device = True
        self.hand_out()

    def hand_out(self) -> None:
        """Hand out the tokens of the step before, if that was left for later."""
        for text in self.accepted:
            with failing(text):
                text.hand_out(len(self.accepted))
        self.accepted.clear()

    def drop(self, text: Text) -> None:
        """The text has ended, perhaps while it drafted."""
        if (running := self.drafting.pop(text, None)) is not None:
            with failing(text):
                running.close()


def step(
    texts: Sequence[Text],
    batch: Batch,
    pieces: Mapping[Text, Rows] | None = None,
    *,
    max_rows: int = NO_LIMIT,
    watch: Watch | None = None,
    is_wanted: Callable[[], bool] = lambda: False,
) -> None:
    """Draft for all ``texts``, decode the drafts that are worth their rows, and accept.

    ``pieces`` of the prompts of other texts ride in the same batch, and ``max_rows`` limits it
    where drafts are chosen. A text that fails ends alone; if the decode fails, all in it do.
    ``watch`` may end a long decode (``Target.decode``); then nothing is accepted. A text that is
    alone and would draft nothing takes a run of plain steps, up to a moment when ``is_wanted`` says
    that the engine is (``fast_path``).
    """
    cost, pieces = batch.cost, pieces or {}
    if len(texts) == 1 and not pieces and not batch.drafting:
        with failing(texts[0]):
            if texts[0].is_plain():
                batch.hand_out()
                run_plain(texts[0], is_wanted)
                return
        if texts[0].has_ended:
            return
    if cost is not None:
        cost.n_texts = max(1, len(texts))
    # 1. Each text drafts a tree below its last token. Among all of them, keep what is worth its
    #    rows.
    written = batch.propose(texts)
    n_prompt = sum([len(rows) for rows in pieces.values()])
    n_prompt += sum([text.cache.n_deferred for text in written])
    choose(written, n_prompt if len(texts) + len(pieces) > 1 else 0, max_rows)
    if cost is not None and len(written) + len(pieces) > 1:
        give_one_length(written, cost)
    # Trees precede prompts: only their rows have output, so that these are found quickly.
    rows: dict[Text, Rows] = {}
    for text in written:
        if not text.has_ended:  # by an error of its method while drafts were chosen
            with failing(text):
                rows[text] = text.rows()
    rows.update(pieces)
    if not rows:
        batch.hand_out()
        return
    order = list(rows)
    if order[0].cache.target.n_rewind < NO_LIMIT:  # drafts come last, as in ``rows_back``
        order.sort(key=lambda text: text not in pieces and len(text.tree) > 1)
    # 2. Decode all rows in one forward pass. If a device computes it, this process hands out the
    #    tokens of the step before meanwhile.
    began, parts = now(), [(text.cache.target, rows[text]) for text in order]
    try:
        outputs = batch.slots.decode(parts, watch, batch.meanwhile)
    except Cancelled:
        return
    except Exception as error:
        for text in order:
            text.fail(error)
        return
    seconds = now() - began
    if cost is not None:
        follow(written, cost, [len(rows[text]) for text in order], n_prompt, seconds)
    # 3. Each text verifies its tree, keeps the KV entries of the accepted path, and adds the bonus
    #    token.
    for text, output in zip(order, outputs, strict=True):
        if text.has_ended:  # by an error while the rows were computed
            continue
        with failing(text):
            if text in pieces:
                text.take_piece(output)
                continue
            reason = text.accept(output, seconds, len(rows)).finish_reason
            if batch.has_device and reason is None:
                batch.accepted.append(text)
            else:
                text.hand_out(len(texts))
