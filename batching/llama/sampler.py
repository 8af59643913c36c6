"""llama.cpp's sampler chain, and draws by Gumbel noise: one choice per token.

A ``Sampler`` sees only accepted tokens, in order, so penalties, constraints and draws work as they
would without speculation. Greedy sampling without a chain is a plain argmax.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, Protocol

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from batching.errors import GrammarError, InvalidParameter
from batching.llama.log import initialise
from batching.llama.model import Model
from batching.llama.native import Native
from batching.target import Output
from batching.tree import Floats

_COPIED = (
    "_seed _is_greedy _random_links has_memory _n_links _n_accepted _top_p _temperature"
).split()
_MOST_LINKS = 256  # as many as texts may wait
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
Ids = npt.NDArray[np.integer[Any]]


class Constraint(Protocol):
    """Says which tokens may be chosen next. Follows the text."""

    def allows(self, token: int) -> bool: ...

    def allowed(self) -> Ids:
        """All that ``allows`` does, ascending."""

    def accept(self, token: int) -> None:
        """``token`` is part of the text."""


class GreedySampler:
    """Chooses the most likely token, without a chain."""

    def __init__(self, constraint: Constraint | None = None) -> None:
        self.reads_logits = constraint is not None
        self._constraint = constraint

    def sample(self, output: Output, row: int) -> int:
        token = output.argmax(row)
        if self._constraint is None:
            return token
        if not self._constraint.allows(token):
            allowed, logits = _some(self._constraint.allowed()), output.logits(row)
            token = int(allowed[logits[allowed].argmax()])
        self._constraint.accept(token)
        return token

    def probabilities(self, logits: Floats) -> Floats:
        probs: Floats = np.zeros(len(logits), np.float32)
        probs[logits.argmax()] = 1.0
        return probs

    def remaining(self, logits: Floats, token: int) -> Floats:
        """As ``SamplerChain.remaining``."""
        return _alone(token, len(logits))

    def accept(self, token: int) -> None:
        if self._constraint is not None:
            self._constraint.accept(token)


class SamplerChain:
    """A ``llama_sampler_chain`` over the tokens that a constraint allows, or over all of them.

    Draws are not llama.cpp's, which compares a random number with cumulated probabilities: there
    rounding anywhere moves the choice. The highest sum of logit and Gumbel noise has the same
    distribution, and moves only if two sums are nearly equal. The noise depends on the seed, the
    number of tokens before and the token, so a seed means one text, with drafts or without.
    """

    reads_logits = True

    def __init__(self, model: Model, constraint: Constraint | None = None) -> None:
        initialise()
        self.model = model
        self._constraint = constraint
        self._chain: Native | None = _owned(
            C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        )
        self._last: Native | None = None  # the link that chooses: mirostat or greedy; a draw: None
        self._seed: int | None = None  # of draws
        self._is_greedy = False
        self._n_links = 0  # before that
        self._top_p, self._temperature = 1.0, np.float32(1.0)  # without links of their own
        self._random_links = False  # earlier links are random too
        self.has_memory = False  # the result depends on accepted tokens
        self._n_accepted = 0
        n = model.n_vocab
        self._ids: Ids = np.arange(n, dtype=np.int32)
        self._drawn_from: tuple[Ids, Floats] = self._ids, np.zeros(n, np.float32)
        self._candidates = np.zeros(n, _CANDIDATE)
        self._data: Any = self._candidates.ctypes.data_as(ctypes.POINTER(C.llama_token_data))
        self._array = C.llama_token_data_array(
            data=self._data,
            size=n,
            selected=-1,
            sorted=False,
        )

    def add(self, name: str, *values: Any) -> SamplerChain:
        """Add a link of ``LINKS``, with its values."""
        self.has_memory |= name in ("penalties", "dry")
        self._random_links |= name == "xtc"
        if name == "top_p" and not self._n_links:
            (self._top_p,) = values  # llama.cpp would sort the whole vocabulary
            return self
        assert self._chain is not None
        self._n_links += 1
        link = LINKS[name](self.model, *values)
        C.llama_sampler_chain_add(self._chain.handle, link)  # transfers ownership of the link
        return self

    def mirostat(self, version: int, temperature: float, *values: float) -> SamplerChain:
        """Mirostat 1 or 2 with seed, tau and eta as the last link, which draws the token."""
        # llama.cpp sorts logits beyond 2**31 wrongly.
        self.add("temperature", max(temperature, 100 * _COLDEST))
        return self._end(f"mirostat {version}", *values)

    def draw(self, seed: int, temperature: float) -> SamplerChain:
        """Draw from the remaining tokens. Takes the place of a last link."""
        self._seed, self._temperature = seed, np.float32(max(temperature, _COLDEST))
        return self

    def greedy(self) -> SamplerChain:
        """Take the most likely of the remaining tokens. The last link."""
        self._is_greedy = True
        return self._end("greedy")

    def sample(self, output: Output, row: int) -> int:
        token = self._choose(output.logits(row))
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Tell the constraint and every link that ``token`` is part of the text."""
        if self._constraint is not None:
            self._constraint.accept(token)
        self._n_accepted += 1
        C.llama_sampler_accept(self._links().handle, token)
        if self._last is not None:
            C.llama_sampler_accept(self._last.handle, token)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Pass the prompt to the penalties; a constraint applies only to the text after it."""
        chain = self._links()
        for token in tokens:
            C.llama_sampler_accept(chain.handle, token)

    def probabilities(self, logits: Floats) -> Floats:
        """The distribution the last link draws from: ``(n_vocab,)``, zero for filtered tokens, and
        for all but the most likely one without a draw.

        Raises InvalidParameter if there is none: mirostat adapts while drawing, XTC is random, and
        a constraint follows only the accepted text.
        """
        has_distribution = self._seed is not None or self._is_greedy
        if not has_distribution or self._random_links or self._constraint is not None:
            raise InvalidParameter(
                "verify=rejection needs a distribution, which mirostat, XTC, "
                "grammars and JSON schemas do not provide; use verify=match with them"
            )
        ids, values = self._filtered(logits)
        if self._is_greedy:
            best = int(values.argmax())
            ids, values = ids[best : best + 1], values[best : best + 1]
        weights = np.exp(values - values.max())
        probs: Floats = np.zeros(len(logits), np.float32)
        probs[ids] = weights / weights.sum()
        return probs

    def remaining(self, logits: Floats, token: int) -> Floats:
        """The logits of the tokens that ``token``, the last one, was drawn from, ``(n_vocab,)``;
        -inf for all others, which is all but one without a draw. ``logits`` are those given to
        ``sample``."""
        if self._is_greedy:
            return _alone(token, len(logits))
        found: Floats = np.full(len(logits), -np.inf, np.float32)
        if self._last is None:
            ids, values = self._drawn_from
        else:
            left = self._left()
            ids, values = left["id"], left["logit"]
        found[ids] = values
        return found

    def _left(self) -> npt.NDArray[Any]:
        """The candidates that the chain has left."""
        array = self._array
        return np.ctypeslib.as_array(
            ctypes.cast(array.data, ctypes.POINTER(ctypes.c_byte)),
            (array.size * _CANDIDATE.itemsize,),
        ).view(_CANDIDATE)

    def copy_state(self) -> SamplerChain:
        """A copy of the chain with its state, without the constraint."""
        other = SamplerChain(self.model)
        other._chain = _owned(C.llama_sampler_clone(self._links().handle))
        if self._last is not None:
            other._last = _owned(C.llama_sampler_clone(self._last.handle))
        for name in _COPIED:
            setattr(other, name, getattr(self, name))
        return other

    def _links(self) -> Native:
        """The chain, without the link that chooses."""
        if self._chain is None or (self._last is None and self._seed is None):
            raise RuntimeError("the sampler is closed, or has no last link")
        return self._chain

    def _filtered(self, logits: Floats) -> tuple[Ids, Floats]:
        """The tokens that the constraint and the links leave, and their logits over the
        temperature. Raises GrammarError if all of them are forbidden."""
        links, ids, values = self._links(), self._ids, logits
        if self._constraint is not None:
            ids = _some(self._constraint.allowed())
            values = logits[ids]
        if self._top_p < 1:
            kept = nucleus(values, self._top_p)
            ids, values = ids[kept], values[kept]
        if self._n_links or self._last is not None:
            candidates, array = self._candidates, self._array
            array.size = n = len(ids)
            candidates["id"][:n] = ids
            candidates["logit"][:n] = values
            array.data = self._data  # XTC drops candidates by moving the pointer
            array.selected = -1
            array.sorted = False
            C.llama_sampler_apply(links.handle, ctypes.byref(array))
            left = self._left()
            ids, values = left["id"], left["logit"]
        if values.max() == -np.inf:
            raise GrammarError(
                "logit_bias forbids all tokens that may follow here; forbid fewer, or loosen the "
                "grammar"
            )
        return ids, values / self._temperature

    def _choose(self, logits: Floats) -> int:
        ids, values = self._filtered(logits)
        if self._last is not None:
            array = self._array
            C.llama_sampler_apply(self._last.handle, ctypes.byref(array))
            return int(array.data[array.selected].id)
        assert self._seed is not None
        self._drawn_from = ids, values
        return int(ids[draw(ids, values, self._seed, self._n_accepted)])

    def _end(self, name: str, *values: float) -> SamplerChain:
        self._last = _owned(LINKS[name](self.model, *values))
        return self

    def close(self) -> None:
        """Free the chain. Idempotent."""
        self._chain = self._last = None


def dry_link(model: Model, *values: Any) -> Native:
    """DRY's sampler, to clone, by its multiplier, base, allowed length, last n and breakers.

    From any thread; made once: for each of the breakers llama.cpp reads the whole vocabulary, and
    16 may take seconds.
    """
    if (link := model.dry_links.get(values)) is None:
        *numbers, breakers = values
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        link = _owned(C.llama_sampler_init_dry(model.vocab, *numbers, texts, len(breakers)))
        if len(model.dry_links) >= _MOST_LINKS:
            model.dry_links.clear()
        model.dry_links[values] = link
    return link


def _logit_bias(model: Model, bias: Mapping[int, float]) -> Any:
    """Adds ``bias[token]`` to the token's logit; ``-inf`` forbids it."""
    entries = (C.llama_logit_bias * len(bias))(*starmap(C.llama_logit_bias, bias.items()))
    return C.llama_sampler_init_logit_bias(model.n_vocab, len(bias), entries)


# What makes each link of a model and its values. Those that filter keep one token at least.
LINKS: dict[str, Callable[..., Any]] = {
    "logit_bias": _logit_bias,
    # of the last n accepted tokens: repeat, frequency, presence
    "penalties": lambda model, *values: C.llama_sampler_init_penalties(model.n_vocab, *values),
    "dry": lambda model, *values: C.llama_sampler_clone(dry_link(model, *values).handle),
    "top_k": lambda _, k: C.llama_sampler_init_top_k(k),
    "typical": lambda _, p: C.llama_sampler_init_typical(p, 1),
    "top_p": lambda _, p: C.llama_sampler_init_top_p(p, 1),
    "min_p": lambda _, p: C.llama_sampler_init_min_p(p, 1),
    # probability, threshold; seed
    "xtc": lambda _, p, t, seed: C.llama_sampler_init_xtc(p, t, 1, seed),
    "temperature": lambda _, temperature: C.llama_sampler_init_temp(temperature),
    # These choose, and come last.
    "mirostat 1": lambda model, *values: C.llama_sampler_init_mirostat(model.n_vocab, *values, 100),
    "mirostat 2": lambda _, *values: C.llama_sampler_init_mirostat_v2(*values),
    "greedy": lambda _: C.llama_sampler_init_greedy(),
}


def _owned(sampler: Any) -> Native:
    """A ``llama_sampler *`` that is freed once nothing uses it."""
    return Native(sampler, C.llama_sampler_free)


def _some(allowed: Ids) -> Ids:
    if not len(allowed):
        raise GrammarError("the grammar allows none of the model's tokens here; loosen the grammar")
    return allowed


_PRIMES = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


_COLDEST = 1e-8  # temperature; below, the highest logit wins in any case, and others overflow
_UNLIKELY = 6.0  # below the highest logit: few tokens have so much more noise than another
_TRIED = 64  # tokens with the most noise, about


def _alone(token: int, n_vocab: int) -> Floats:
    """Logits that allow only ``token``."""
    found: Floats = np.full(n_vocab, -np.inf, np.float32)
    found[token] = 0.0
    return found


def nucleus(logits: Floats, p: float) -> Ids:
    """The indexes of the fewest tokens whose probabilities sum to ``p`` or more, ascending: the
    likeliest, of equal ones the first, and at least one (Holtzman et al. 2019, "The curious case of
    neural text degeneration", arXiv 1904.09751)."""
    weights = np.exp(logits - logits.max())
    enough = p * weights.sum(dtype=np.float64)
    # Those that are left out sum to no more than the rest, so not all of them need sorting.
    least = (1.0 - p) * weights.sum(dtype=np.float64) / len(weights)
    likely = np.sort(weights[weights >= least])[::-1]
    n = min(int(np.searchsorted(np.cumsum(likely, dtype=np.float64), enough)) + 1, len(likely))
    kept = np.flatnonzero(weights >= likely[n - 1])
    if len(kept) > n:
        equal = np.flatnonzero(weights[kept] == likely[n - 1])
        kept = np.delete(kept, equal[n - len(kept) :])
    return kept


def draw(ids: Ids, logits: Floats, seed: int, position: int) -> int:
    """The index of the highest sum of ``logits`` and Gumbel noise: a draw from their softmax.

    The noise of a token depends on its id, ``seed`` and ``position`` alone. Its logarithms take
    most of the time, so they are left out where not even much noise could win: more than the best
    of some lacks, below the highest logit or further below.
    """
    uniform = _uniform(ids, seed, position)
    highest = float(logits.max())
    tried = np.append(np.flatnonzero(uniform > 1.0 - _TRIED / len(ids)), logits.argmax())

    def sums(some: Ids) -> npt.NDArray[np.float64]:
        return logits[some].astype(np.float64) - highest + _gumbel(uniform[some])

    best = float(sums(tried).max())
    found = np.flatnonzero(uniform >= _uniform_of(best))
    if len(found) > _TRIED * _TRIED:
        likely = logits >= highest - _UNLIKELY
        likely |= uniform >= _uniform_of(best + _UNLIKELY)
        found = found[likely[found]]
    return int(found[sums(found).argmax()])


def _uniform_of(noise: float) -> float:
    """The number that has so much Gumbel noise, rounded down."""
    return math.exp(-math.exp(-noise)) * (1.0 - 1e-12)


def _gumbel(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _uniform(ids: Ids, seed: int, position: int) -> npt.NDArray[np.float64]:
    """A number between 0 and 1 for each token id, always the same for a seed and a position.

    Hashes the three by the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators").
    """
    key = (seed * _PRIMES[0] + position * _PRIMES[1]) & _MASK
    key = ((key ^ key >> 29) * _PRIMES[2]) & _MASK
    z = ids.astype(np.uint64)
    z *= np.uint64(_PRIMES[0])
    z += np.uint64(key ^ key >> 32)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_PRIMES[2])
    z ^= z >> np.uint64(27)
    z *= np.uint64(_PRIMES[3])
    z ^= z >> np.uint64(31)
    z >>= np.uint64(11)
    uniform = z.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    return uniform
