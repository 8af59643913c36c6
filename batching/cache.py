"""SequenceCache: the committed tokens in the KV cache; prefill, commit and rollback.

Invariant: every sequence in use contains exactly ``tokens``. Pure bookkeeping over
``Target.seq_rm`` and ``Target.seq_cp``; ``docs/batches.md`` draws a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from batching.errors import CannotRewind, PromptTooLong, TreeError
from batching.rows import Rows, text_rows
from batching.slots import Slot, decoding
from batching.target import ALL, END, Output, Target
from batching.together import Coroutine
from batching.tree import NO_LIMIT, Floats

TAIL = 8  # tokens after the last saved state: the next prompt may differ in the last few
EVERY = 512  # tokens of a prompt, after which a state is saved in any case
MAX_SAVED = 8  # states of a text: megabytes each
# Chunk size when hidden states are read (every such row also gets a row of logits), and how many
# cached tokens may be decoded again for their states.
STATE_ROWS = 64


class StateReader(Protocol):
    """Reads the target's states over the prompt, for drafting heads that take them as input.

    needs_hidden  whether it reads ``Output.hidden``
    needs_layers  the layers whose ``Output.aux_hidden_states`` it reads
    """

    needs_hidden: bool
    needs_layers: tuple[int, ...]

    def begin(self, tokens: Sequence[int]) -> int:
        """Return the index of the first prompt token whose state is needed.

        ``len(tokens)`` if none is. Called before the prompt is prefilled.
        """

    def read(self, first: int, n: int, output: Output) -> None:
        """Read the states of tokens ``first`` to ``first + n``: the rows of ``output``."""


class SequenceCache:
    """The committed tokens and the sequences that share them.

    n_deferred  trailing tokens not decoded yet; they precede the next tree's rows, so a prompt and
                the first token take one decode
    saved       states of the target that ``truncate`` may go back to: (n_tokens, state), ascending

    If the target cannot rewind freely, its state is saved while a prompt is read: after each turn,
    every ``EVERY`` tokens, and shortly before the end. Texts that begin alike start from there.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tokens: list[int] = []
        self.n_seq = 1
        self.n_deferred = 0
        self.saved: list[tuple[int, object]] = []

    @property
    def is_limited(self) -> bool:
        """Whether only saved states let it go back to a part of the text."""
        return self.target.n_rewind < NO_LIMIT

    @property
    def n_past(self) -> int:
        """Number of committed tokens; the position of the next one."""
        return len(self.tokens)

    def reserve(self, n_seq: int) -> None:
        """Put ``n_seq`` sequences in use, all sharing the committed tokens.

        Called only when a tree needs them: a chain's rows belong to every sequence in use, which
        costs 1% of a small model's step with 5 sequences, 4% with 20 and 7% with 64.

        Raises TreeError if the context has fewer.
        """
        if n_seq > self.target.n_seq_max:
            raise TreeError(
                f"the method needs {n_seq} sequences, the context has {self.target.n_seq_max}; "
                f"lower the number of branches, window columns or guesses"
            )
        n_decoded = len(self.tokens) - self.n_deferred
        if n_decoded:
            for seq_id in range(self.n_seq, n_seq):
                self.target.seq_cp(0, seq_id, 0, n_decoded)
            for seq_id in range(n_seq, self.n_seq):
                self.target.seq_rm(seq_id, 0, END)
        self.n_seq = n_seq

    def with_deferred(self, rows: Rows) -> Rows:
        """The rows of a tree, preceded by any deferred prompt tokens.

        Pass only the tree's rows to ``commit``.
        """
        n = self.n_deferred
        if not n:
            return rows
        first = self.n_past - n
        all_seqs = rows.seq_ids[0]  # the root's
        return Rows(
            [*self.tokens[first:], *rows.tokens],
            [*range(first, first + n), *rows.positions],
            [all_seqs] * n + list(rows.seq_ids),
            [False] * n + list(rows.outputs),
            n_before=n,
        )

    def extend(self, tokens: Sequence[int], embeddings: Floats | None = None) -> Coroutine[Output]:
        """Commit ``tokens`` in one decode; the last row, ``len(tokens) - 1``, has output.

        ``embeddings``, (n, n_embd), is for models that take them as input.
        """
        n_past, n = self.n_past, len(tokens)
        seq_ids = range(self.n_seq)
        try:
            outputs = [False] * (n - 1) + [True]
            positions = range(n_past, n_past + n)
            rows = Rows(tokens, positions, [seq_ids] * n, outputs, embeddings)
            output = yield from decoding(self.target, rows)
        except BaseException:
            self.truncate(n_past)
            raise
        self.tokens.extend(tokens)
        return output

    def commit(self, rows: Rows, path: Sequence[int]) -> None:
        """Keep the KV of the accepted ``path`` (row indexes, root first) and drop the rest.

        One call removes everything past the new end. If a branch was accepted beyond the root, its
        new positions are copied to the other sequences. The prefix is never copied again, and rows
        shared by all sequences (a lone root, a chain) need no copy.
        """
        target, tokens, seq_ids = self.target, rows.tokens, rows.seq_ids
        first, n = len(self.tokens) + 1, len(path)
        self.n_deferred = 0
        is_shared = seq_ids[-1] is seq_ids[0]  # by a chain or a lone root
        self.tokens += tokens[:n] if is_shared else [tokens[row] for row in path]
        end = first - 1 + n
        if len(tokens) > n:
            target.seq_rm(ALL, end, END)
        accepted = seq_ids[path[-1]]
        if is_shared or n == 1 or len(accepted) == self.n_seq:
            return
        source = accepted[0]
        occupied = {
            seq_id
            for row, position in enumerate(rows.positions)
            if first <= position < end
            for seq_id in rows.seq_ids[row]
        }
        for seq_id in range(self.n_seq):
            if seq_id != source:
                if seq_id in occupied:
                    target.seq_rm(seq_id, first, end)
                target.seq_cp(source, seq_id, first, end)

    def truncate(self, n_tokens: int) -> None:
        """Drop everything after the first ``n_tokens`` tokens, including uncommitted rows.

        If the target cannot rewind that far, goes back to the last saved state before it, or
        clears the text.
        """
        self._drop_deferred()
        n_tokens = min(n_tokens, self.n_past)
        saved = self.saved
        while saved and saved[-1][0] > n_tokens:
            saved.pop()
        try:
            self.target.seq_rm(ALL, n_tokens, END)
        except CannotRewind:
            if saved:
                n_tokens, state = saved[-1]
                self.target.restore(0, state, n_tokens)
            else:
                self.target.seq_rm(ALL, 0, END)
                n_tokens = 0
        del self.tokens[n_tokens:]

    def save(self) -> None:
        """Save the target's state for ``truncate`` to restore, unless already saved here."""
        saved = self.saved
        if self.n_past and (not saved or saved[-1][0] < self.n_past):
            saved.append((self.n_past, self.target.save(0)))
            kept = worth_saving([n for n, _ in saved])
            saved[:] = [state for state in saved if state[0] in kept]

    def share(self, other: SequenceCache, n_tokens: int) -> None:
        """Start, while it is empty, with ``n_tokens`` that it can keep (``n_kept``) of the text of
        another slot."""
        assert isinstance(self.target, Slot) and isinstance(other.target, Slot)
        saved = [state for state in other.saved if state[0] <= n_tokens]
        if self.is_limited and (not saved or saved[-1][0] < n_tokens):  # all of the text
            saved.append((n_tokens, other.target.save(0)))
        self.target.share(other.target, n_tokens)
        self.tokens, self.saved = other.tokens[:n_tokens], saved
        if self.is_limited:
            self.target.restore(0, saved[-1][1], n_tokens)

    def n_kept(self, tokens: Sequence[int]) -> int:
        """How many tokens of another text stay cached when a ``Reading`` makes it this one."""
        decoded = self.tokens[: len(self.tokens) - self.n_deferred]
        n = n_kept(decoded, tokens, self.saved if self.is_limited else None)
        return n if self.target.has_window(0, n) else 0

    def _drop_deferred(self) -> None:
        """Forget deferred tokens that were never decoded."""
        if self.n_deferred:
            del self.tokens[-self.n_deferred :]
            self.n_deferred = 0


class Reading:
    """A prompt on its way into a cache, which decodes what follows the longest common prefix.

    Repeat ``next_rows``, a decode and ``take`` until ``next_rows`` returns None, then ``close``. A
    failed decode leaves the chunks before it in the cache.

    n_reused  tokens that were cached
    """

    def __init__(
        self,
        cache: SequenceCache,
        tokens: Sequence[int],
        reader: StateReader | None = None,
        *,
        defer: bool = False,
        turn_ends: Container[int] = (),
        reuse: bool = True,
        score: Callable[[int, int, Output], None] | None = None,
    ) -> None:
        """Raises PromptTooLong.

        A ``reader`` of hidden states gets smaller chunks. The last few cached tokens are decoded
        again for it, unless the target cannot rewind freely. With ``defer`` the last chunk waits
        for the next tree's decode if a row still fits.
        Each of the tokens ``turn_ends`` ends a turn. Without ``reuse`` nothing is taken over.
        ``score`` gets the first token, the number of tokens and the output of each chunk, whose
        rows then all have logits.
        """
        self._cache, self._tokens, self._reader, self._defer = cache, tokens, reader, defer
        self._score = score
        cache._drop_deferred()
        check_fits(len(tokens), cache.target.n_ctx)
        n_reused = common_prefix(cache.tokens, tokens) if reuse else 0
        self._read_from = len(tokens) if reader is None else reader.begin(tokens)
        if not cache.is_limited:
            n_reused = min(n_reused, max(self._read_from, n_reused - STATE_ROWS))
        self._is_reading = False
        self._chunk: Sequence[int] = ()  # being decoded
        cache.truncate(n_reused if cache.target.has_window(0, n_reused) else 0)
        self.n_reused = cache.n_past
        self._save_at = self._ends(turn_ends) if cache.is_limited else []

    def _ends(self, turn_ends: Container[int]) -> list[int]:
        """After how many tokens states are saved, from now on."""
        first, last = max(1, self.n_reused), len(self._tokens) - TAIL
        turns = [n for n in range(first, last) if self._tokens[n - 1] in turn_ends]
        steps = range(first + -first % EVERY, last, EVERY)
        saved = [n for n, _ in self._cache.saved]
        kept = worth_saving(sorted({*saved, *turns, *steps, last}))
        return [n for n in kept if first <= n]

    def n_shared(self, n_common: int) -> int:
        """How much of ``n_common`` tokens another text can start with once they are read."""
        if not self._cache.is_limited:
            return n_common
        return max([n for n in self._save_at if n <= n_common], default=0)

    @property
    def n_left(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self._tokens) - self._cache.n_past

    @property
    def needs_output(self) -> bool:
        """Whether the output of rows is read."""
        return self._reader is not None or self._score is not None

    def next_rows(self, max_rows: int = NO_LIMIT) -> Rows | None:
        """The next chunk, at most ``max_rows``; None if the rest is deferred, or nothing is left.

        The last of them is deferred if ``defer`` is set and a row still fits beside them.
        """
        cache, target, reader = self._cache, self._cache.target, self._reader
        first, save_at = cache.n_past, self._save_at
        n_left = self.n_left
        if not n_left:
            return None
        if save_at and first == save_at[0]:
            cache.save()
            del save_at[0]
        max_rows = min(max_rows, target.n_batch)
        if self._defer and n_left < max_rows and not save_at:
            cache.n_deferred = n_left
            cache.tokens += self._tokens[first:]
            return None
        n = min(n_left, max_rows, *[end - first for end in save_at[:1]])
        if reader is not None and first >= self._read_from:
            if not self._is_reading:
                target.want_hidden(reader.needs_hidden)
                target.want_layers(reader.needs_layers)
                self._is_reading = True
            n = min(n, STATE_ROWS) if reader.needs_hidden else n
        else:
            n = min(n, self._read_from - first)
        has_logits = self._score is not None
        n = min(n, STATE_ROWS) if has_logits else n
        self._chunk = chunk = self._tokens[first : first + n]
        return text_rows(chunk, first, [has_logits] * n, cache.n_seq)

    def take(self, output: Output | None) -> None:
        """The rows were decoded: they are part of the text. ``output`` may be None unless it is
        needed (``needs_output``)."""
        first, chunk = self._cache.n_past, self._chunk
        self._cache.tokens += chunk
        self._chunk = ()
        if self._is_reading and self._reader is not None and output is not None:
            self._reader.read(first, len(chunk), output)
        if self._score is not None and output is not None:
            self._score(first, len(chunk), output)

    def close(self) -> None:
        """Drop what a failed decode left, and ask for no more states."""
        cache = self._cache
        if self._chunk:
            cache.truncate(cache.n_past)
        if self._is_reading:
            cache.target.want_hidden(False)
            cache.target.want_layers(())


def check_fits(n_tokens: int, n_ctx: int, longest: int = NO_LIMIT) -> None:
    """Raise PromptTooLong if a prompt of ``n_tokens`` and its last token do not fit.

    ``longest`` is how many tokens the model can read, whatever the context is.
    """
    if n_tokens >= n_ctx:
        more = n_tokens + 2
        advice = f"or raise {{n_ctx}} to at least {more}"
        if more > longest:
            advice = f"since the model was trained for {longest}"
        raise PromptTooLong(
            f"the prompt, including the conversation so far, needs {n_tokens + 1} tokens but the "
            f"context holds {n_ctx}; shorten it, {advice}",
            settings=("n_ctx",),
            requested=n_tokens + 1,
            available=n_ctx,
        )


def worth_saving(ends: Sequence[int]) -> list[int]:
    """At most ``MAX_SAVED`` of the ascending ``ends`` of a text's parts: the last, and those whose
    states save most reading. The ends of turns stay longest: other texts may begin alike."""
    kept = list(ends)
    while len(kept) > MAX_SAVED:
        gains = [
            (end % EVERY > 0, end - start)
            for start, end in zip([0, *kept], kept[:-1], strict=False)
        ]
        del kept[gains.index(min(gains))]
    return kept


def n_kept(
    text: Sequence[int], tokens: Sequence[int], saved: Sequence[tuple[int, object]] | None
) -> int:
    """How many tokens of ``text`` another one can begin with.

    ``saved`` are the states that a target which cannot rewind has of ``text``; None = it can.
    """
    n = common_prefix(text, tokens)
    if saved is None or n == len(text):
        return n
    return max([n_tokens for n_tokens, _ in saved if n_tokens <= n], default=0)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
