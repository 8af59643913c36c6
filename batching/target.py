"""Target and Output: what the decode loop needs of a model. Pure.

``batching.llama.context.Context`` is the real one; tests have a fake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batching.rows import Rows
from batching.tree import Floats

Watch = Callable[[float], bool]


class Cancelled(Exception):
    """The caller said so in the middle of a prompt. The cache stays usable."""


class Output(Protocol):
    """What one decode computed. Views, valid until the next decode: copy what you keep.

    Rows count from the first of a tree, where others stand before it.
    """

    def logits(self, row: int) -> Floats:
        """Logits of a row whose output was asked for, ``(n_vocab,)``."""
        ...

    def argmax(self, row: int) -> int:
        """The most likely token of a row whose output was asked for; the lowest id of equals."""
        ...

    def argmaxes(self, first: int, n: int) -> list[int]:
        """The same for ``n`` rows from ``first`` on, all with output."""
        ...

    def hidden(self, row: int) -> Floats:
        """The state after the final norm, ``(n_embd,)``: what the output matrix turns into logits.

        Only after ``Target.want_hidden(True)``; raises RuntimeError otherwise.
        """
        ...

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        """What went into ``layers``, one after the other, ``(len(layers) * n_embd,)``; of any row.

        Only of those in ``Target.want_layers``; raises RuntimeError otherwise.
        """
        ...


class Target(Protocol):
    """A model with a KV cache: what the decode loop needs of ``Context``, and a fake offers too."""

    @property
    def n_ctx(self) -> int:
        """Cells of the KV cache."""
        ...

    @property
    def n_batch(self) -> int:
        """Rows that one decode can hold."""
        ...

    @property
    def n_seq_max(self) -> int:
        """Sequences the KV cache can tell apart."""
        ...

    @property
    def n_rewind(self) -> int:
        """How many of the rows of one decode can be taken back, once and before the next.

        NO_LIMIT for a KV cache, of which any part can be removed. A recurrent state is all of a
        text at once: what can be taken back are the last rows of a chain for which the target keeps
        copies of its state, which may be none. Such a target has one sequence.
        """
        ...

    def decode(self, rows: Rows, watch: Watch | None = None) -> Output:
        """One decode. A long one asks ``watch`` now and then, with the share of it that is done
        (0 as long as that cannot be told), whether to end it, which raises Cancelled."""
        ...

    def decode_row(self, token: int, position: int, n_seq: int) -> Output:
        """``decode`` of a single row with output, in the first ``n_seq`` sequences, for less."""
        ...

    def want_hidden(self, wanted: bool) -> None:
        """Whether the decodes from here on also give hidden states.

        They then compute the output of every row, asked for or not, which is llama.cpp's rule: to
        be off while a prompt is read.
        """
        ...

    def want_layers(self, layers: Sequence[int]) -> None:
        """Of which layers decodes from here on also give the inputs; empty = of none.

        Of a model with layers that predict further tokens the first of these, whose number is that
        of the layers before it, is one too: its input is the state that it begins with. That makes
        no row have output that would not have it.
        """
        ...

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Drop positions ``[p0, p1)`` of a sequence; -1: of all sequences, or to the end.

        Raises CannotRewind, and changes nothing, where these are more than can be taken back; all
        there is can always be dropped.
        """
        ...

    def save(self) -> object:
        """The state as it is, for ``restore``. Only where ``n_rewind`` is limited."""
        ...

    def restore(self, state: object, n_tokens: int) -> None:
        """Go back to a state that was saved after ``n_tokens`` tokens, which it still holds."""
        ...

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        """Let ``dest`` share the cells of ``source`` at positions ``[p0, p1)``."""
        ...


class Sampler(Protocol):
    """Chooses the next token; the verifier asks once for each token of the text."""

    def sample(self, output: Output, row: int) -> int:
        """The token that follows ``row``, which is thereby part of the text."""
        ...

    def probabilities(self, logits: Floats) -> Floats:
        """What the next token would be drawn from, ``(n_vocab,)``, summing to 1."""
        ...

    def accept(self, token: int) -> None:
        """``token`` is part of the text, whoever chose it."""
        ...
