"""Counters and phase timers of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("draft", "build", "decode", "verify", "commit")


@dataclass(slots=True)
class Stats:
    """What a generation cost and yielded. Seconds are wall-clock.

    n_prompt         prompt tokens, those reused from the cache among them (n_reused)
    n_tokens         tokens generated, an end-of-generation token included
    n_steps          target decodes after the prefill
    n_rows           rows those decodes held
    n_drafted        draft tokens offered; n_accepted of them became text
    prefill_seconds  until the first step: the prompt's KV and the drafters' own preparations
    decode_seconds   from the first step to the end, the consumer's time between tokens left out
    phase_seconds    the same by phase; what is missing to the sum is the loop itself
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    n_steps: int = 0
    n_rows: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / self.decode_seconds if self.decode_seconds else 0.0

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
        """Time outside ``llama_decode`` per step."""
        outside = self.decode_seconds - self.phase_seconds["decode"]
        return outside / self.n_steps if self.n_steps else 0.0
