"""Slots: one target shared by several texts, whose rows go into one decode. Pure.

A slot has a range of the target's sequences and looks like a target of its own: its sequences count
from 0, and "all sequences" are its own. So the cache, the drafters and the verifier of a text need
not know of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from batching.rows import Rows, pack
from batching.target import ALL, END, Meanwhile, Output, Target, Watch
from batching.together import Coroutine, Work
from batching.tree import Floats


class Slots:
    """A target divided into slots with equally many sequences."""

    def __init__(self, target: Target, n_slots: int) -> None:
        if not 1 <= n_slots <= target.n_seq_max:
            raise ValueError(f"{n_slots} slots in {target.n_seq_max} sequences")
        self.target = target
        width = target.n_seq_max // n_slots
        self.slots = [Slot(self, i, width) for i in range(n_slots)]

    def decode(
        self,
        parts: Sequence[tuple[Slot, Rows]],
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Output]:
        """Decode the rows of several slots in one batch; the output of each counts from its tree's
        root. Valid until the next decode. As ``Target.decode``."""
        for slot, rows in parts:
            slot.n_used = max(slot.n_used, rows.seq_ids[0].stop)  # the root is in all of them
        rows, starts = pack([(rows, slot.first) for slot, rows in parts])
        output = self.target.decode(rows, watch, meanwhile)
        return [PartOutput(output, start) if start else output for start in starts]

    def encode(self, parts: Sequence[Floats]) -> list[Floats]:
        """What ``Context.encode`` makes of the features of several slots."""
        target: Any = self.target
        ends = np.cumsum([len(part) for part in parts])
        return np.split(target.encode(np.concatenate(parts)), ends[:-1])

    def want_states(self) -> None:
        """Ask the target for what any of the slots wants."""
        self.target.want_hidden(any(slot.wants_hidden for slot in self.slots))
        layers = {layer for slot in self.slots for layer in slot.wants_layers}
        self.target.want_layers(tuple(sorted(layers)))
        self.target.want_logits(any(slot.wants_logits for slot in self.slots))


class Slot:
    """A text's sequences of a shared target. Implements ``Target``.

    index    which slot it is
    first    the first of its sequences in the target
    n_used   how many of them may hold tokens
    n_ctx    cells that the text may use
    n_batch  rows of a batch that it may use
    """

    def __init__(self, shared: Slots, index: int, n_seq_max: int) -> None:
        self._shared = shared
        self._target = shared.target
        self.index = index
        self.first = index * n_seq_max
        self.n_seq_max = n_seq_max
        self.n_used = 1
        self._is_only = n_seq_max == self._target.n_seq_max  # there are no others
        self.n_vocab, self.n_rewind = self._target.n_vocab, self._target.n_rewind
        self.n_ctx, self.n_batch = self._target.n_ctx, self._target.n_batch
        self.wants_hidden = self.wants_logits = False
        self.wants_layers: tuple[int, ...] = ()

    def work(self, rows: Rows) -> Work:
        """The decode of ``rows`` as work for ``together``."""
        return Work(self._shared.decode, (self, rows), rows.embeddings is None)

    def encoding(self, features: Floats) -> Work:
        """``Context.encode`` as work for ``together``."""
        return Work(self._shared.encode, features)

    def decode(
        self,
        rows: Rows,
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Output:
        return self._shared.decode([(self, rows)], watch, meanwhile)[0]

    def decode_row(self, token: int, position: int, seq_ids: range) -> Output:
        first = self.first
        self.n_used = max(self.n_used, seq_ids.stop)
        moved = range(first + seq_ids.start, first + seq_ids.stop)
        return self._target.decode_row(token, position, moved)

    def want_hidden(self, wanted: bool) -> None:
        self.wants_hidden = wanted
        self._shared.want_states()

    def want_layers(self, layers: Sequence[int]) -> None:
        self.wants_layers = tuple(layers)
        self._shared.want_states()

    def want_logits(self, wanted: bool) -> None:
        self.wants_logits = wanted
        self._shared.want_states()

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        if seq_id != ALL:
            self._target.seq_rm(self.first + seq_id, p0, p1)
            return
        if self._is_only:
            self._target.seq_rm(ALL, p0, p1)
            return
        for used in range(self.first, self.first + self.n_used):
            self._target.seq_rm(used, p0, p1)
        if p0 == 0 and p1 == END:
            self.n_used = 1

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        self.n_used = max(self.n_used, dest + 1)
        self._target.seq_cp(self.first + source, self.first + dest, p0, p1)

    def share(self, source: Slot, n_tokens: int) -> None:
        """Start, while it is empty, with the first ``n_tokens`` tokens of ``source``."""
        for seq_id in range(self.n_used):
            self._target.seq_cp(source.first, self.first + seq_id, 0, n_tokens)

    def append(self, piece: Any, seq_ids: Sequence[int], p0: int, p1: int) -> bool:
        """Put a copy of the next tokens, ``p0`` to ``p1``, into sequences; whether there was room.

        They come through the last sequence, which must be free.
        """
        target: Any = self._target
        last = self.first + self.n_seq_max - 1
        if not target.copy_in(last, piece):
            return False
        for seq_id in seq_ids:
            target.seq_cp(last, self.first + seq_id, p0, p1)
        target.seq_rm(last, 0, END)
        return True

    def has_window(self, seq_id: int, n_tokens: int) -> bool:
        return self._target.has_window(self.first + seq_id, n_tokens)

    def save(self, seq_id: int) -> object:
        return self._target.save(self.first + seq_id)

    def restore(self, seq_id: int, state: object, n_tokens: int) -> None:
        self._target.restore(self.first + seq_id, state, n_tokens)


def decoding(target: Target, rows: Rows) -> Coroutine[Output]:
    """Decode ``rows``; those of a slot, together with those of others."""
    if isinstance(target, Slot):
        output: Output = yield target.work(rows)
        return output
    if len(rows) == 1 and rows.embeddings is None and rows.outputs[0]:
        return target.decode_row(rows.tokens[0], rows.positions[0], rows.seq_ids[0])
    return target.decode(rows)


def encoding(target: Any, features: Floats) -> Coroutine[Floats]:
    """Run the encoder of a head, as ``Context.encode``; for a slot, together with others."""
    if isinstance(target, Slot):
        encoded: Floats = yield target.encoding(features)
        return encoded
    encoded = target.encode(features)
    return encoded


class PartOutput:
    """The output of one text's rows in a batch with others. Implements ``Output``."""

    __slots__ = ("_output", "_start", "n_vocab")

    def __init__(self, output: Output, start: int) -> None:
        """``start``: the row of ``output`` that is row 0 here."""
        self._output, self._start, self.n_vocab = output, start, output.n_vocab

    def logits(self, row: int) -> Floats:
        return self._output.logits(self._start + row)

    def argmax(self, row: int) -> int:
        return self._output.argmax(self._start + row)

    def argmaxes(self, first: int, n: int) -> list[int]:
        return self._output.argmaxes(self._start + first, n)

    def hidden(self, row: int) -> Floats:
        return self._output.hidden(self._start + row)

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        return self._output.aux_hidden_states(self._start + row, layers)
