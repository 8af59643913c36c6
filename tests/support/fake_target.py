"""A target without llama.cpp: logits follow from the token prefix a row can see.

Its KV cache enforces llama.cpp's rules and fails where llama.cpp would fail or silently compute
nonsense: sequences without gaps, rows shared only by sequences that hold the same tokens, parents
before children, no more cells than the context has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batching.cache import Reading, SequenceCache, StateReader, common_prefix
from batching.errors import CannotRewind
from batching.rows import Rows, rows_back
from batching.target import Cancelled, Meanwhile, Output, Watch
from batching.tree import NO_LIMIT, Floats
from speculation.chat.detokenizer import Token

N_VOCAB = 12
N_AHEAD = 5  # tokens a hidden state predicts: the next one, and one for each of four heads


@cache  # compared methods ask for the same prefixes, and making a generator is slow
def fake_logits(prefix: tuple[int, ...]) -> Floats:
    """Logits after ``prefix``. Mostly they depend on the last two tokens, so that texts repeat; a
    smaller part depends on the whole prefix, so that any error shows."""
    logits: Floats = (2.0 * _noise(prefix[-2:]) + 0.7 * _noise(prefix)).astype(np.float32)
    logits.flags.writeable = False
    return logits


@lru_cache(maxsize=1024)  # of two tokens there are few
def _noise(tokens: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return np.random.default_rng(hash(tokens) & 0xFFFFFFFF).standard_normal(N_VOCAB)


@cache
def fake_hidden(
    prefix: tuple[int, ...], logits: Callable[[tuple[int, ...]], Floats] = fake_logits
) -> Floats:
    """A state that contains what a head has to predict: the next N_AHEAD tokens, greedily."""
    text = prefix
    for _ in range(N_AHEAD):
        text = (*text, int(logits(text).argmax()))
    hidden = np.array(text[len(prefix) :], np.float32)
    hidden.flags.writeable = False
    return hidden


class Row(NamedTuple):
    """One row of a batch."""

    token: int
    position: int
    seq_ids: tuple[int, ...]
    output: bool


def listed(rows: Rows) -> list[Row]:
    columns = rows.tokens, rows.positions, map(tuple, rows.seq_ids), map(bool, rows.outputs)
    return [Row(*row) for row in zip(*columns, strict=True)]


class FakeOutput:
    n_vocab = N_VOCAB

    def __init__(
        self,
        prefixes: list[tuple[int, ...]],
        outputs: Sequence[bool],
        logits: Callable[[tuple[int, ...]], Floats],
        has_hidden: bool = False,
    ) -> None:
        self._logits = logits
        self._has_logits = True
        self._has_hidden = has_hidden
        self._prefixes = prefixes
        self._outputs = outputs
        self.stale = False

    def logits(self, row: int) -> Floats:
        assert self._has_logits, "logits were not requested"
        return self._all_logits(row)

    def _all_logits(self, row: int) -> Floats:
        assert not self.stale, "a view was read after the next decode"
        assert self._outputs[row], f"row {row} has no output"
        return self._logits(self._prefixes[row])

    def argmax(self, row: int) -> int:
        return int(self._all_logits(row).argmax())

    def argmaxes(self, first: int, n: int) -> list[int]:
        return [self.argmax(row) for row in range(first, first + n)]

    def hidden(self, row: int) -> Floats:
        assert not self.stale, "a view was read after the next decode"
        assert self._has_hidden, "hidden states were not requested"
        return fake_hidden(self._prefixes[row], self._logits)

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        raise RuntimeError("the fake target exposes no layers")


class FakeTarget:
    def __init__(
        self,
        n_ctx: int = 512,
        n_batch: int = 256,
        n_seq_max: int = 0,
        logits: Callable[[tuple[int, ...]], Floats] = fake_logits,
        n_rewind: int = NO_LIMIT,
    ) -> None:
        n_seq_max = n_seq_max or (64 if n_rewind == NO_LIMIT else 1)
        self.n_vocab = N_VOCAB
        self.n_rewind = n_rewind
        self._n_back: dict[int, int] = {}  # by sequence: rows that can be taken back now
        self._logits = logits
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_seq_max = n_seq_max
        self.n_until_cancelled = NO_LIMIT  # decodes
        self.is_device = False  # whether others may work meanwhile
        self.decoded: list[Rows] = []
        self.copies = 0
        self._tokens: list[tuple[int, ...]] = [()] * n_seq_max  # tokens of each sequence
        self._has_hidden, self._has_logits = False, True
        self._output = FakeOutput([], [], logits)

    def decode(
        self,
        rows: Rows,
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> FakeOutput:
        assert 1 <= len(rows) <= self.n_batch, f"{len(rows)} rows in a batch of {self.n_batch}"
        if len(self.decoded) == self.n_until_cancelled:
            raise Cancelled
        self._output.stale = True
        self.decoded.append(rows)
        prefixes = []
        for row in listed(rows):
            prefixes_of_row = {self._tokens[seq_id] for seq_id in row.seq_ids}
            assert len(prefixes_of_row) == 1, f"sequences {row.seq_ids} share a row but differ"
            (prefix,) = prefixes_of_row
            assert len(prefix) == row.position, f"a gap before {row}: {len(prefix)} tokens"
            prefix = (*prefix, row.token)
            prefixes.append(prefix)
            for seq_id in row.seq_ids:
                self._tokens[seq_id] = prefix
        assert self.n_cells() <= self.n_ctx, "more cells than the context has"
        if self.n_rewind < NO_LIMIT:
            assert all(len(seq_ids) == 1 for seq_ids in rows.seq_ids), "texts share a state"
            self._n_back = rows_back(rows, self.n_rewind)
        outputs = [output or self._has_hidden for output in rows.outputs]
        self._output = FakeOutput(prefixes, outputs, self._logits, self._has_hidden)
        self._output._has_logits = self._has_logits
        if self.is_device and meanwhile is not None:
            meanwhile()
        return self._output

    def decode_row(self, token: int, position: int, seq_ids: range) -> FakeOutput:
        return self.decode(Rows([token], [position], [seq_ids], [True]))

    def want_hidden(self, wanted: bool) -> None:
        self._has_hidden = wanted

    def want_logits(self, wanted: bool) -> None:
        self._has_logits = wanted

    def want_layers(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        if self.n_rewind < NO_LIMIT and p0:
            n_back = self._n_back.get(seq_id := max(0, seq_id), 0)
            n = len(self._tokens[seq_id]) - p0
            if n > n_back:
                raise CannotRewind(f"{n} rows to take back, {n_back} can be")
            if n > 0:
                self._n_back[seq_id] = 0
        for s in range(self.n_seq_max) if seq_id == -1 else [seq_id]:
            tokens = self._tokens[s]
            assert p1 == -1 or p1 >= len(tokens), "a hole in the middle of a sequence"
            self._tokens[s] = tokens[:p0]

    def has_window(self, seq_id: int, n_tokens: int) -> bool:
        return True

    def save(self, seq_id: int) -> object:
        return self._tokens[seq_id]

    def restore(self, seq_id: int, state: object, n_tokens: int) -> None:
        assert isinstance(state, tuple)
        assert state == self._tokens[seq_id][:n_tokens] and len(state) == n_tokens, (
            "a state of another text"
        )
        self._tokens[seq_id] = state
        self._n_back[seq_id] = 0

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        self.copies += 1
        assert len(self._tokens[dest]) == p0, "a copy leaves a gap or overlaps"
        self._tokens[dest] = self._tokens[dest] + self._tokens[source][p0:p1]

    def n_cells(self) -> int:
        """Cells in use: sequences share the cells of a common prefix."""
        n_cells = 0
        before: tuple[int, ...] = ()
        for tokens in sorted(set(self._tokens)):
            n_cells += len(tokens) - common_prefix(before, tokens)
            before = tokens
        return n_cells

    def tokens_of(self, seq_id: int) -> list[int]:
        return list(self._tokens[seq_id])


class FakeSampler:
    """Greedy, or seeded with one draw per token. The repetition penalty needs every token."""

    def __init__(self, temperature: float, seed: int, penalty: float = 0.0) -> None:
        self.temperature = temperature
        self.penalty = penalty
        self.reads_logits = bool(temperature or penalty)
        self.seen: list[int] = []
        self._random = random.Random(seed)

    def sample(self, output: Output, row: int) -> int:
        if not self.reads_logits:
            self.accept(token := output.argmax(row))
            return token
        logits = output.logits(row).astype(np.float64)
        for token in self.seen[-8:]:
            logits[token] -= self.penalty
        if self.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = np.exp((logits - logits.max()) / self.temperature)
            edges = np.cumsum(weights) / weights.sum()
            token = int(np.searchsorted(edges, self._random.random(), side="right"))
            token = min(token, N_VOCAB - 1)
        self.accept(token)
        return token

    def probabilities(self, logits: Floats) -> Floats:
        raise NotImplementedError("only match is tested with the fake sampler")

    def accept(self, token: int) -> None:
        self.seen.append(token)


class FakeReply:
    """Ends with token 0, or after ``n_tokens``."""

    ends: Container[int] = (0,)
    shown = stopped_by = ""

    def __init__(self, n_tokens: int = NO_LIMIT) -> None:
        self.ids: list[int] = []
        self._n_tokens = n_tokens

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        for n, token in enumerate(tokens, 1):
            self.ids.append(token)
            if token == 0:
                return n, "stop"
            if len(self.ids) == self._n_tokens:
                return n, "length"
        return len(tokens), None

    def release(self, n: int, n_drafted: int) -> list[Token]:
        return []

    def rest(self) -> list[Token]:
        return []


def prefill(
    cache: SequenceCache,
    tokens: Sequence[int],
    *,
    reader: StateReader | None = None,
    defer: bool = False,
) -> int:
    """Make ``tokens`` the text of ``cache``, by itself; return how many of them were cached."""
    reading = Reading(cache, tokens, reader, defer=defer)
    try:
        while (rows := reading.next_rows()) is not None:
            reading.take(cache.target.decode(rows))
    finally:
        reading.close()
    return reading.n_reused


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(N_VOCAB) for _ in range(rng.randrange(1, 30))]


def plain_text(
    seed: int, temperature: float = 0.0, penalty: float = 0.0, n_ctx: int = 400, n_tokens: int = 32
) -> list[int]:
    """The text of the same prompt and sampler, without our cache, trees or decode loop."""
    prompt, text = prompt_of(seed), FakeReply(n_tokens)
    sampler = FakeSampler(temperature, seed, penalty)
    reason = None
    while reason is None and len(prompt) + len(text.ids) <= n_ctx:
        prefix = (*prompt, *text.ids)
        output = FakeOutput([prefix], [True], fake_logits)
        _, reason = text.take([sampler.sample(output, 0)])
    return text.ids
