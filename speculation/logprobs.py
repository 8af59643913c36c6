"""Log probabilities of generated tokens, recorded as the sampler chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from batching.llama.sampler import GreedySampler, SamplerChain
from batching.target import Output, Sampler
from batching.tree import Floats


class TokenLogprobs(NamedTuple):
    """A token's natural log probability under the model, before any sampler or after all of them.

    top  the most likely tokens here with theirs, the likeliest first
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class RecordingSampler:
    """A sampler that also records ``TokenLogprobs``, one for each token it chooses."""

    reads_logits = True

    def __init__(
        self, sampler: Sampler, n_top: int, found: list[TokenLogprobs], *, after: bool = False
    ) -> None:
        """``after`` records what the sampler draws from, instead of what the model says."""
        self._sampler = sampler
        self._after = after
        self._n_top = n_top
        self._found = found

    def sample(self, output: Output, row: int) -> int:
        token = self._sampler.sample(output, row)
        logits = output.logits(row)
        if self._after and isinstance(self._sampler, GreedySampler | SamplerChain):
            logits = self._sampler.remaining(logits)
        self._found.append(token_logprobs(logits, token, self._n_top))
        return token

    def accept(self, token: int) -> None:
        self._sampler.accept(token)

    def probabilities(self, logits: Floats) -> Floats:
        return self._sampler.probabilities(logits)


def token_logprobs(logits: Floats, token: int, n_top: int) -> TokenLogprobs:
    """Of ``logits``, (n_vocab,): the log probability of ``token`` and the ``n_top`` highest."""
    highest = float(logits.max())
    total = highest + float(np.log(np.exp(logits - highest, dtype=np.float64).sum()))
    top = _largest(logits, min(n_top, len(logits)))
    return TokenLogprobs(
        float(logits[token]) - total,
        tuple((i, float(logits[i]) - total) for i in top if logits[i] > -np.inf),
    )


def _largest(logits: Floats, n: int) -> Sequence[int]:
    if not n:
        return ()
    found = np.argpartition(-logits, n - 1)[:n]
    order: list[int] = found[np.lexsort((found, -logits[found]))].tolist()
    return order
