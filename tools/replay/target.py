"""A target that plays a recorded text at an assumed cost, and the clock it advances."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from batching.rows import Rows
from batching.target import Meanwhile, Watch
from batching.tree import NO_LIMIT, Floats
from speculation.drafting.cost import Cost
from tools.replay.recording import Recorded


class Clock:
    """Simulated time in seconds; calling it returns the time, as ``perf_counter`` does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Playback:
    """The output of a decode: at every row the recorded text's next token.

    A verifier reads rows along the accepted path alone, which is the recorded text.
    """

    def __init__(self, target: PlaybackTarget, positions: Sequence[int], n_before: int) -> None:
        self._target = target
        self._positions = positions
        self._before = n_before

    @property
    def n_vocab(self) -> int:
        return self._target.n_vocab

    def _position(self, row: int) -> int:
        return self._positions[self._before + row]

    def argmax(self, row: int) -> int:
        return self._target.next_token(self._position(row))

    def argmaxes(self, first: int, n: int) -> list[int]:
        return [self.argmax(row) for row in range(first, first + n)]

    def logits(self, row: int) -> Floats:
        return self._target.logits(self._position(row))

    def hidden(self, row: int) -> Floats:
        raise RuntimeError("a recording has no hidden states")

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        raise RuntimeError("a recording has no hidden states")


class PlaybackTarget:
    """Plays one text after the other. Implements ``Target``.

    noise      standard deviation of a decode's relative time
    hiccups    share of decodes that take four times as long: the machine did something else
    """

    n_batch = 1 << 16
    n_seq_max = 64
    n_rewind = NO_LIMIT

    def __init__(
        self, n_vocab: int, cost: Cost, clock: Clock, *, noise: float = 0.0, hiccups: float = 0.0
    ) -> None:
        self.n_ctx = 1 << 20
        self._cost = cost
        self.clock = clock
        self._noise, self._hiccups = noise, hiccups
        self._random = random.Random(1)
        self._text: list[int] = []
        self._n_prompt = 0
        self._successors: Sequence[Sequence[tuple[int, float]]] = ()
        self.n_vocab = n_vocab
        self._logits = np.full(n_vocab, -100.0, np.float32)
        self._shown: list[int] = []  # tokens with a logit in _logits
        self._last_rows, self._repeats = 0, False
        self._is_first = True
        self.excess = 0.0  # seconds of noise in this text, without its first step
        self.decoded_tree = False  # whether the last decode was a tree's

    def play(self, text: Recorded) -> None:
        """Play ``text`` from now on."""
        self._text = [*text.prompt, *text.reply]
        self._n_prompt = len(text.prompt)
        self._successors = text.successors
        self._is_first, self.excess = True, 0.0

    def next_token(self, position: int) -> int:
        text = self._text
        return text[position + 1] if position + 1 < len(text) else text[-1]

    def logits(self, position: int) -> Floats:
        """The recorded successors' log-probabilities; all others are very unlikely."""
        for token in self._shown:
            self._logits[token] = -100.0
        i = min(position - self._n_prompt + 1, len(self._successors) - 1)
        self._shown = [token for token, _ in self._successors[i]]
        for token, log_prob in self._successors[i]:
            self._logits[token] = log_prob
        return self._logits

    def spend(self, n_rows: int, n_past: int) -> None:
        """Advance the clock by a decode."""
        curve = self._cost.curve(n_past)
        seconds = curve.at(n_rows)
        if n_rows != self._last_rows:
            seconds += curve.switch_seconds
        self._last_rows = n_rows
        noise = max(0.5, self._random.gauss(1.0, self._noise)) if self._noise else 1.0
        if self._hiccups and self._random.random() < self._hiccups:
            noise *= 4.0
        self.clock.now += noise * seconds
        if self._is_first:  # of the text, which counts as prefill
            self._is_first = False
        else:
            self.excess += (noise - 1.0) * seconds

    def decode(
        self, rows: Rows, watch: Watch | None = None, meanwhile: Meanwhile | None = None
    ) -> Playback:
        self.decoded_tree = True
        self.spend(len(rows) - rows.n_before, rows.positions[rows.n_before])
        return Playback(self, rows.positions, rows.n_before)

    def decode_row(self, token: int, position: int, seq_ids: range) -> Playback:
        self.decoded_tree = False
        self.spend(1, position)
        return Playback(self, (position,), 0)

    def want_hidden(self, wanted: bool) -> None: ...

    def want_layers(self, layers: Sequence[int]) -> None: ...

    def want_logits(self, wanted: bool) -> None: ...

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...

    def has_window(self, seq_id: int, n_tokens: int) -> bool:
        return True

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None: ...

    def save(self, seq_id: int) -> object:
        raise RuntimeError("a recording cannot be rewound")

    def restore(self, seq_id: int, state: object, n_tokens: int) -> None:
        raise RuntimeError("a recording cannot be rewound")
