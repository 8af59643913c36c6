"""Stats: counters, phase timers and histograms of a generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from batching.tree import TokenTree

STRUCTURE = "structure"  # the source of drafts that a schema or grammar forces
PHASES = ("draft", "build", "decode", "verify", "commit")


@dataclass(slots=True)
class Stats:
    """Counters and times of a generation. Seconds are wall-clock.

    n_prompt         prompt tokens
    n_reused         prompt tokens reused from the KV cache
    n_read           prompt tokens decoded: fewer if the text was cancelled before
    n_tokens         generated tokens, including an end-of-generation token
    n_first          tokens of the first step, which counts as prefill
    n_steps          target decodes after the prompt, one per step
    n_rows           rows in those decodes, without the prompt's
    n_drafted        draft tokens
    n_accepted       draft tokens that became text
    n_expected       how many were expected to, as ``auto`` chose them; 0 for other methods
    prefill_seconds  time to the first token: the prompt, the drafters' preparation, and the first
                     step, which also decodes the end of the prompt
    first_seconds    the part of ``prefill_seconds`` for the first step's drafts, by their rows
    decode_seconds   from the first step's end to the last one's; in between, other texts may be
                     served, too
    phase_seconds    decode_seconds by phase; the difference to the sum is the loop itself, and what
                     was done for other texts
    rows_histogram   rows of a step -> number of steps
    tokens_histogram  tokens of a step -> number of steps
    accepted_by_source  draft source -> accepted tokens; empty for methods with one source
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_read: int = 0
    n_tokens: int = 0
    n_first: int = 0
    n_steps: int = 0
    n_rows: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_expected: float = 0.0
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rows_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tokens_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    def add_step(
        self, tree: TokenTree, path: Sequence[int], n_emitted: int, n_accepted: int
    ) -> None:
        """Count a step: its tree, its accepted path, and how many tokens became text."""
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
                source = tree.sources.get(node, STRUCTURE)
                counts[source] = counts.get(source, 0) + 1

    def add_plain(self, n: int) -> None:
        """Count ``n`` plain steps: one row and one token each."""
        self.n_tokens += n
        self.n_steps += n
        self.n_rows += n
        self.rows_histogram[1] += n
        self.tokens_histogram[1] += n

    @property
    def tokens_per_second(self) -> float:
        """Excludes the first step; 0 if there was no other."""
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
        """Time per step outside ``llama_decode``, without the first step."""
        outside = self.decode_seconds - self.phase_seconds["decode"]
        return outside / (self.n_steps - 1) if self.n_steps > 1 else 0.0


def rate(n_tokens: int, n_first: int, decode_seconds: float) -> float:
    """Tokens per second without the first step, which made ``n_first``; 0 if there was no other."""
    return (n_tokens - n_first) / decode_seconds if decode_seconds else 0.0
