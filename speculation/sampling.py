"""SamplingParams, the llama.cpp sampler chain built from them, and recording what it chose from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from batching.errors import InvalidParameter, utf8
from batching.llama.model import Model
from batching.llama.sampler import Constraint, GreedySampler, Ids, SamplerChain, dry_link
from batching.target import Output, Sampler
from batching.tree import Floats
from speculation.system.params import Params
from speculation.verify import draw

MOST_BREAKERS = 16  # llama.cpp reads the whole vocabulary for each


def _within(default: float, low: float, high: float) -> Any:
    """A field with its default, its lowest and its highest value."""
    return field(default=default, metadata={"within": (low, high)})


@dataclass(frozen=True)
class SamplingParams(Params):
    """How the next token is chosen. Names, meanings and order of the samplers are llama.cpp's.

    ``temperature`` 0 takes the most likely token; otherwise tokens are drawn with ``seed``, and the
    same seed gives the same text with every method. By default every sampler is off. -1 for
    ``penalty_last_n`` and ``dry_last_n`` means the whole context. At most one of three restricts
    the text: a JSON schema, a regular expression or a grammar, in GBNF or, if it starts with
    ``%llguidance``, in llguidance's Lark. What a schema says that cannot be enforced is left out
    with a warning, or raises GrammarError if ``strict``. The text does not end before
    ``min_tokens``, unless it is complete.
    """

    temperature: float = _within(0.0, 0.0, 100.0)
    seed: int = _within(0, 0, 2**32 - 2)  # 2**32 - 1 means a random seed in llama.cpp
    top_k: int = _within(0, 0, 2**31 - 1)
    top_p: float = _within(1.0, 0.0, 1.0)
    min_p: float = _within(0.0, 0.0, 1.0)
    typical_p: float = _within(1.0, 0.0, 1.0)
    xtc_probability: float = _within(0.0, 0.0, 1.0)
    xtc_threshold: float = _within(0.1, 0.0, 1.0)
    repeat_penalty: float = _within(1.0, 0.01, 100.0)
    frequency_penalty: float = _within(0.0, -100.0, 100.0)
    presence_penalty: float = _within(0.0, -100.0, 100.0)
    penalty_last_n: int = _within(64, -1, 2**31 - 1)
    dry_multiplier: float = _within(0.0, 0.0, 100.0)
    dry_base: float = _within(1.75, 1.0, 100.0)
    dry_allowed_length: int = _within(2, 1, 2**31 - 1)
    dry_last_n: int = _within(1024, -1, 2**31 - 1)
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = _within(0, 0, 2)
    mirostat_tau: float = _within(5.0, 0.0, 1000.0)
    mirostat_eta: float = _within(0.1, 0.0, 1000.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = _within(0, 0, 2**31 - 1)
    grammar: str | None = None
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | bool | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(one is not None for one in (self.grammar, self.regex, self.json_schema)) > 1:
            raise InvalidParameter(
                "{grammar}, {regex} and {json_schema} exclude each other; give one",
                settings=("grammar", "regex", "json_schema"),
            )
        if (n := len(self.dry_breakers)) > MOST_BREAKERS:
            raise InvalidParameter(
                f"{{dry_breakers}} has {n} texts; give at most {MOST_BREAKERS}",
                settings=("dry_breakers",),
            )
        for text in self.dry_breakers:
            utf8(text)
        for token, value in self.logit_bias.items():
            if math.isnan(value) or value == math.inf:
                raise InvalidParameter(
                    f"logit_bias of token {token} is {value}; give a number, or -inf to forbid it"
                )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the sampler is an argmax of the allowed tokens."""
        return (
            self.temperature == 0
            and not self._has_penalties
            and self.dry_multiplier == 0
            and not self.logit_bias
        )

    @property
    def has_structure(self) -> bool:
        """Whether a JSON schema, a regular expression or a grammar restricts the text."""
        return any(one is not None for one in (self.grammar, self.regex, self.json_schema))

    @property
    def _has_penalties(self) -> bool:
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        )


def make_sampler(
    params: SamplingParams, model: Model, n_ctx: int, structure: Constraint | None = None
) -> GreedySampler | SamplerChain:
    """The sampler for ``params``: an argmax, or llama.cpp's chain in llama.cpp's order, of what
    ``structure`` allows.

    Look-back windows are limited to ``n_ctx``, because llama.cpp allocates memory for them. Raises
    InvalidParameter for a logit bias on an unknown token.
    """
    constraint = structure
    if params.min_tokens:
        constraint = _AtLeast(params.min_tokens, model, structure)
    if params.is_plain_greedy:
        return GreedySampler(constraint)
    for token in params.logit_bias:
        if not 0 <= token < model.n_vocab:
            raise InvalidParameter(
                f"logit_bias has token {token}; this model has 0 to {model.n_vocab - 1}"
            )
    chain = SamplerChain(model, constraint)
    try:
        return _add_samplers(chain, params, n_ctx)
    except BaseException:
        chain.close()
        raise


class _AtLeast:
    """Keeps a text from ending before it has ``n`` tokens, unless nothing else may follow."""

    def __init__(self, n: int, model: Model, inner: Constraint | None) -> None:
        self._n_left, self._ends, self._inner = n, np.array(sorted(model.ends)), inner
        self._all = np.arange(model.n_vocab)
        self._others = np.delete(self._all, self._ends)

    def allows(self, token: int) -> bool:
        if self._n_left > 0 and token in self._ends:
            return token in self.allowed()
        return self._inner is None or self._inner.allows(token)

    def allowed(self) -> Ids:
        if self._inner is None:
            return self._others if self._n_left > 0 else self._all
        found = self._inner.allowed()
        others = found if self._n_left <= 0 else found[~np.isin(found, self._ends)]
        return others if len(others) else found

    def accept(self, token: int) -> None:
        self._n_left -= 1
        if self._inner is not None:
            self._inner.accept(token)


def _add_samplers(chain: SamplerChain, params: SamplingParams, n_ctx: int) -> SamplerChain:
    if params.logit_bias:
        chain.add("logit_bias", params.logit_bias)
    if params._has_penalties:
        n = _window(params.penalty_last_n, n_ctx)
        penalties = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        chain.add("penalties", n, *penalties)
    if params.dry_multiplier:
        chain.add("dry", *_dry(params, n_ctx))
    if params.temperature == 0:
        return chain.greedy()
    if params.mirostat:
        values = params.seed, params.mirostat_tau, params.mirostat_eta
        return chain.mirostat(params.mirostat, params.temperature, *values)
    if params.top_k:
        chain.add("top_k", params.top_k)
    if params.typical_p < 1:
        chain.add("typical", params.typical_p)
    if params.top_p < 1:
        chain.add("top_p", params.top_p)
    if params.min_p > 0:
        chain.add("min_p", params.min_p)
    if params.xtc_probability > 0:
        chain.add("xtc", params.xtc_probability, params.xtc_threshold, params.seed)
    return chain.draw(params.seed, params.temperature)


def prepare_sampler(params: SamplingParams, model: Model, n_ctx: int) -> None:
    """Make what takes long to make of ``make_sampler``'s sampler, in the thread that asks."""
    if params.dry_multiplier:
        dry_link(model, *_dry(params, n_ctx))


def _dry(params: SamplingParams, n_ctx: int) -> tuple[float, float, int, int, tuple[str, ...]]:
    last_n = _window(params.dry_last_n, n_ctx)
    fields = params.dry_multiplier, params.dry_base, params.dry_allowed_length
    return *fields, last_n, tuple(params.dry_breakers)


def _window(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


class DraftDistribution:
    """q: the target's sampler settings applied to a draft model's logits.

    The chain sees the text and, if it has memory (penalties), also the drafts of the path.
    """

    def __init__(self, chain: SamplerChain, seed: int) -> None:
        """``chain`` must not be shared with the target; ``seed`` seeds the drafts' draws."""
        self._chain = chain
        self._random = np.random.default_rng([seed, 1])

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts with ``prompt``."""
        self._chain.accept_prompt(prompt)

    def accept(self, token: int) -> None:
        """A token was added to the text."""
        self._chain.accept(token)

    def probabilities(self, logits: Floats, path: Sequence[int]) -> Floats:
        """q after the text and the drafts in ``path``, from the draft model's ``logits``."""
        if not (path and self._chain.has_memory):
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

    def close(self) -> None:
        self._chain.close()


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
            logits = self._sampler.remaining(logits, token)
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
