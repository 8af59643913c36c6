"""Counters and phase timers of a generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from batching.tree import TokenTree

PHASES = ("draft", "build", "decode", "verify", "commit")


@dataclass(slots=True)
class Stats:
    """What a generation cost and yielded. Seconds are wall-clock.

    n_prompt         prompt tokens, those reused from the cache among them (n_reused)
    n_tokens         tokens generated, an end-of-generation token included
    n_first          those of the first step, which is part of the prefill
    n_steps          target decodes that yielded tokens
    n_rows           rows those decodes held, without the prompt's
    n_drafted        draft tokens offered; n_accepted of them became text
    prefill_seconds  the time to the first token: the prompt, the drafters' own preparations and the
                     first step, whose decode has the end of the prompt in it
    decode_seconds   from the second step to the end, the consumer's time between tokens left out
    phase_seconds    the same by phase; what is missing to the sum is the loop itself
    rows_histogram   rows of a step -> steps that had so many
    tokens_histogram  tokens a step yielded -> steps that yielded so many
    accepted_by_source  source of a draft token -> how many of its tokens became text; empty where a
                     method has one source only
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    n_first: int = 0
    n_steps: int = 0
    n_rows: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rows_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tokens_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    def add_step(
        self, tree: TokenTree, path: Sequence[int], n_emitted: int, n_accepted: int
    ) -> None:
        """Count a step: its tree, the accepted path, and how much of that became text."""
        n_rows = len(tree)
        self.n_tokens += n_emitted
        self.n_steps += 1
        self.n_rows += n_rows
        self.n_drafted += tree.n_drafted
        self.n_accepted += n_accepted
        self.rows_histogram[n_rows] += 1
        self.tokens_histogram[n_emitted] += 1
        if tree.sources:
            counts = self.accepted_by_source
            for node in path[1 : n_accepted + 1]:
                source = tree.sources[node]
                counts[source] = counts.get(source, 0) + 1

    def add_plain(self, n: int) -> None:
        """Count ``n`` steps of one row that made a token each."""
        self.n_tokens += n
        self.n_steps += n
        self.n_rows += n
        self.rows_histogram[1] += n
        self.tokens_histogram[1] += n

    @property
    def tokens_per_second(self) -> float:
        """After the first step; 0 where there is none."""
        return rate(self.n_tokens, self.n_first, self.decode_seconds)

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated per target decode (mean acceptance length)."""
        return self.n_tokens / self.n_steps if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def overhead_seconds_per_step(self) -> float:
        """Time outside ``llama_decode`` per step after the first."""
        outside = self.decode_seconds - self.phase_seconds["decode"]
        return outside / (self.n_steps - 1) if self.n_steps > 1 else 0.0


def rate(n_tokens: int, n_first: int, decode_seconds: float) -> float:
    """Tokens per second after the first step, which made ``n_first``; 0 where there is none."""
    return (n_tokens - n_first) / decode_seconds if decode_seconds else 0.0
