"""Target, Output and Sampler: the model interface of the decode loop. Pure.

``batching.llama.context.Context`` implements Target; tests use a fake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batching.rows import Rows
from batching.tree import Floats

Watch = Callable[[float], bool]
Meanwhile = Callable[[], object]

END = -1  # llama.cpp's "to the last position"
ALL = -1  # llama.cpp's "any sequence"


class Cancelled(Exception):
    """The caller cancelled prompt processing. The cache stays usable."""


class Output(Protocol):
    """The result of one decode. Views, valid until the next decode: copy what you keep.

    Rows count from the batch's first, and of a slot from its tree's root.
    """

    n_vocab: int

    def logits(self, row: int) -> Floats:
        """Logits of a row with output, ``(n_vocab,)``.

        Raises RuntimeError after ``Target.want_logits(False)``.
        """

    def argmax(self, row: int) -> int:
        """The most likely token of a row with output; the lowest id on ties, on a CPU."""

    def argmaxes(self, first: int, n: int) -> list[int]:
        """``argmax`` of ``n`` consecutive rows starting at ``first``, all with output."""

    def hidden(self, row: int) -> Floats:
        """The state after the final norm, ``(n_embd,)``: the input of the output matrix.

        Raises RuntimeError unless ``Target.want_hidden(True)`` was called before the decode.
        """

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        """The inputs of ``layers``, concatenated, ``(len(layers) * n_embd,)``. Any row.

        Raises RuntimeError for layers not requested with ``Target.want_layers``.
        """


class Target(Protocol):
    """A model with a KV cache, as the decode loop sees it.

    n_ctx      KV cache cells
    n_vocab    tokens of the vocabulary
    n_batch    most rows in one decode
    n_seq_max  most sequences in the KV cache
    n_rewind   how many rows of the last decode can be rolled back, once. NO_LIMIT for a KV cache,
               where any part can be removed. A recurrent state covers the whole text at once: only
               the last rows of a chain for which the target keeps copies of its state (possibly
               none) can be rolled back. Such a target has one sequence for each text. Of several
               texts in a decode, the last can be rolled back, and those before it with as many rows
               (``rows.rows_back``)
    """

    n_ctx: int
    n_vocab: int
    n_batch: int
    n_seq_max: int
    n_rewind: int

    def decode(
        self,
        rows: Rows,
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Output:
        """Decode one batch.

        During a long decode, calls ``watch(share_done)`` from time to time (0 while the share is
        unknown). If it returns True, the decode stops and raises Cancelled. If a device computes
        all of it and this process need only wait, calls ``meanwhile()`` first.
        """

    def decode_row(self, token: int, position: int, seq_ids: range) -> Output:
        """Faster ``decode`` of a single row with output."""

    def want_hidden(self, wanted: bool) -> None:
        """Turn hidden states on or off for the following decodes.

        While on, llama.cpp computes the output of every row, so turn it off for prompts.
        """

    def want_layers(self, layers: Sequence[int]) -> None:
        """Request the inputs of ``layers`` from the following decodes; empty = none.

        In a model with multi-token-prediction layers, ``n_layer`` names the first of them: its
        input is the state it starts from. Unlike ``want_hidden``, adds no output rows.
        """

    def want_logits(self, wanted: bool) -> None:
        """Whether the following decodes need more than ``Output.argmax``; at first they do.

        If not, a device need not copy logits to main memory.
        """

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Drop positions ``[p0, p1)``. ``seq_id`` -1: all sequences; ``p1`` -1: to the end.

        Raises CannotRewind, changing nothing, if that is further back than the target can go.
        Dropping everything always works.
        """

    def has_window(self, seq_id: int, n_tokens: int) -> bool:
        """Whether rows can follow the first ``n_tokens`` of a sequence: of layers with a sliding
        window, tokens further back may be lost."""

    def save(self, seq_id: int) -> object:
        """Snapshot a sequence's state for ``restore``. Only if ``n_rewind`` is limited."""

    def restore(self, seq_id: int, state: object, n_tokens: int) -> None:
        """Return to a state saved after ``n_tokens`` tokens, a prefix of the sequence's text."""

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        """Let ``dest`` share the cells of ``source`` at positions ``[p0, p1)``."""


class Sampler(Protocol):
    """Chooses the next token; the verifier calls it once per token of the text.

    reads_logits  whether it reads more of an output than ``argmax``
    """

    reads_logits: bool

    def sample(self, output: Output, row: int) -> int:
        """Choose the token after ``row``; it becomes part of the text."""

    def probabilities(self, logits: Floats) -> Floats:
        """The distribution the next token is drawn from, ``(n_vocab,)``, summing to 1."""

    def accept(self, token: int) -> None:
        """Record a token of the text that this sampler did not choose."""
