"""SamplingParams: what a user may set, and the sampler chain that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batching.errors import InvalidParameter
from batching.model import Model
from batching.sampler import GreedySampler, SamplerChain, json_schema_to_gbnf
from batching.tree import Floats
from speculation.ranges import check_ranges
from speculation.verify import draw


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and order of the links are llama.cpp's own.

    With ``temperature`` 0 the most likely token is taken; otherwise one is drawn with ``seed``, and
    the same seed gives the same text with every method. Defaults leave each link out.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = 1024
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("temperature", 0.0, 100.0),
                ("seed", 0, 2**32 - 1),
                ("top_k", 0, 2**31 - 1),
                ("top_p", 0.0, 1.0),
                ("min_p", 0.0, 1.0),
                ("typical_p", 0.0, 1.0),
                ("xtc_probability", 0.0, 1.0),
                ("xtc_threshold", 0.0, 1.0),
                ("repeat_penalty", 0.01, 100.0),
                ("frequency_penalty", -100.0, 100.0),
                ("presence_penalty", -100.0, 100.0),
                ("penalty_last_n", 0, 2**31 - 1),
                ("dry_multiplier", 0.0, 100.0),
                ("dry_base", 1.0, 100.0),
                ("dry_allowed_length", 1, 2**31 - 1),
                ("dry_last_n", 0, 2**31 - 1),
                ("mirostat", 0, 2),
            ),
        )
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidParameter("grammar and json_schema are both given; give one")

    @property
    def is_plain_greedy(self) -> bool:
        """Whether nothing but the argmax is asked for."""
        return (
            self.temperature == 0
            and not self._has_penalties
            and self.dry_multiplier == 0
            and not self.logit_bias
            and self.grammar is None
            and self.json_schema is None
        )

    @property
    def _has_penalties(self) -> bool:
        return self.penalty_last_n > 0 and (
            self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )


def make_sampler(params: SamplingParams, model: Model) -> GreedySampler | SamplerChain:
    """The sampler of ``params``: an argmax, or llama.cpp's chain in llama.cpp's order.

    Raises GrammarError when a grammar or schema does not parse.
    """
    if params.is_plain_greedy:
        return GreedySampler()
    chain = SamplerChain(model)
    if params.json_schema is not None:
        chain.grammar(json_schema_to_gbnf(params.json_schema))
    elif params.grammar is not None:
        chain.grammar(params.grammar)
    if params.logit_bias:
        chain.logit_bias(params.logit_bias)
    if params._has_penalties:
        chain.penalties(
            params.penalty_last_n,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
    if params.dry_multiplier:
        chain.dry(
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_last_n,
            params.dry_breakers,
        )
    if params.temperature == 0:
        return chain.greedy()
    if params.mirostat:
        return chain.temperature(params.temperature).mirostat(
            params.mirostat, params.mirostat_tau, params.mirostat_eta, params.seed
        )
    if params.top_k:
        chain.top_k(params.top_k)
    if params.typical_p < 1:
        chain.typical(params.typical_p)
    if params.top_p < 1:
        chain.top_p(params.top_p)
    if params.min_p > 0:
        chain.min_p(params.min_p)
    if params.xtc_probability > 0:
        chain.xtc(params.xtc_probability, params.xtc_threshold, params.seed)
    return chain.temperature(params.temperature).draw(params.seed)


class DraftDistribution:
    """q: the target's own sampler chain, applied to a draft model's logits.

    The chain sees the text and, where it has a memory (penalties), the drafts of the path as well.
    """

    def __init__(self, chain: SamplerChain | GreedySampler, seed: int) -> None:
        """``chain`` is of its own; ``seed`` is that of the drafts' draws."""
        self._chain = chain
        self._random = np.random.default_rng([seed, 1])

    def begin(self, prompt: Sequence[int]) -> None:
        if isinstance(self._chain, SamplerChain):
            self._chain.accept_prompt(prompt)

    def accept(self, token: int) -> None:
        self._chain.accept(token)

    def probabilities(self, logits: Floats, path: Sequence[int]) -> Floats:
        if isinstance(self._chain, GreedySampler) or not (path and self._chain.has_memory):
            return self._chain.probabilities(logits)
        ahead = self._chain.copy_state()
        try:
            for token in path:
                ahead.accept(token)
            return ahead.probabilities(logits)
        finally:
            ahead.close()

    def draw(self, q: Floats) -> int:
        return draw(q, self._random)
