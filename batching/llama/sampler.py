"""llama.cpp's sampler chain and grammar: one draw per token.

A ``Sampler`` sees only accepted tokens, in order, so penalties, grammars and seeded draws work as
they would without speculation. Greedy sampling without a chain is a plain argmax.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from batching.errors import GrammarError, InvalidParameter
from batching.llama.grammar import LazyGrammar, grammar_allows, load_grammar
from batching.llama.log import initialise
from batching.llama.model import Model
from batching.llama.native import Native
from batching.target import Output
from batching.tree import Floats
from batching.watched import GRAMMAR_SECONDS, Watched

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class GreedySampler:
    """Chooses the most likely token, without a chain."""

    reads_logits = False
    has_memory = False

    def sample(self, output: Output, row: int) -> int:
        return output.argmax(row)

    def probabilities(self, logits: Floats) -> Floats:
        probs: Floats = np.zeros(len(logits), np.float32)
        probs[logits.argmax()] = 1.0
        return probs

    def remaining(self, logits: Floats) -> Floats:
        """As ``SamplerChain.remaining``."""
        found: Floats = np.full(len(logits), -np.inf, np.float32)
        found[logits.argmax()] = 0.0
        return found

    def accept(self, token: int) -> None:
        pass

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        pass

    def copy_state(self) -> GreedySampler:
        return self

    def close(self) -> None:
        pass


class SamplerChain:
    """A ``llama_sampler_chain`` over the whole vocabulary, with an optional grammar.

    The grammar checks the drawn token first. Only if it rejects that token is the whole vocabulary
    masked and the draw repeated. That usually saves checking 150,000 tokens; the result follows
    the constrained distribution either way. A lazy grammar accepts every token until its trigger
    appears, but not one that completes the trigger and goes on against the grammar.
    """

    reads_logits = True

    def __init__(self, model: Model) -> None:
        initialise()
        self.model = model
        self._chain: Native | None = _owned(
            C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        )
        self._last: Native | None = None  # the link that chooses: a draw, mirostat or greedy
        self._draws = False  # the last link is a draw
        self._is_greedy = False
        self._random_links = False  # earlier links are random too
        self.has_memory = False  # the result depends on accepted tokens
        self._grammar: Native | None = None
        self._lazy: LazyGrammar | None = None  # until its trigger appears
        self._started: Native | None = None  # the lazy grammar after the token about to be accepted
        n = model.n_vocab
        self._ids = np.arange(n, dtype=np.int32)
        self._candidates = np.zeros(n, _CANDIDATE)
        self._data: Any = self._candidates.ctypes.data_as(ctypes.POINTER(C.llama_token_data))
        self._array = C.llama_token_data_array(
            data=self._data,
            size=n,
            selected=-1,
            sorted=False,
        )

    def logit_bias(self, bias: Mapping[int, float]) -> SamplerChain:
        """Add ``bias[token]`` to the token's logit; ``-inf`` forbids it."""
        entries = (C.llama_logit_bias * len(bias))(
            *(C.llama_logit_bias(token, value) for token, value in bias.items())
        )
        return self._add(C.llama_sampler_init_logit_bias(self.model.n_vocab, len(bias), entries))

    def penalties(
        self, last_n: int, repeat: float, frequency: float, presence: float
    ) -> SamplerChain:
        """Penalise the tokens among the ``last_n`` accepted ones."""
        self.has_memory = True
        return self._add(
            C.llama_sampler_init_penalties(self.model.n_vocab, last_n, repeat, frequency, presence)
        )

    def dry(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> SamplerChain:
        """DRY: penalise tokens that would extend a repetition longer than ``allowed_length``."""
        self.has_memory = True
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        return self._add(
            C.llama_sampler_init_dry(
                self.model.vocab, multiplier, base, allowed_length, last_n, texts, len(breakers)
            )
        )

    def top_k(self, k: int) -> SamplerChain:
        return self._add(C.llama_sampler_init_top_k(k))

    def typical(self, p: float) -> SamplerChain:
        return self._add(C.llama_sampler_init_typical(p, 1))

    def top_p(self, p: float) -> SamplerChain:
        return self._add(C.llama_sampler_init_top_p(p, 1))

    def min_p(self, p: float) -> SamplerChain:
        return self._add(C.llama_sampler_init_min_p(p, 1))

    def xtc(self, probability: float, threshold: float, seed: int) -> SamplerChain:
        self._random_links = True
        return self._add(C.llama_sampler_init_xtc(probability, threshold, 1, seed))

    def temperature(self, t: float) -> SamplerChain:
        return self._add(C.llama_sampler_init_temp(t))

    def mirostat(self, version: int, tau: float, eta: float, seed: int) -> SamplerChain:
        """Mirostat 1 or 2 as the last link, which draws the token."""
        if version == 1:
            return self._end(C.llama_sampler_init_mirostat(self.model.n_vocab, seed, tau, eta, 100))
        return self._end(C.llama_sampler_init_mirostat_v2(seed, tau, eta))

    def draw(self, seed: int) -> SamplerChain:
        """Draw from the remaining tokens, one random number per token. The last link."""
        self._draws = True
        return self._end(C.llama_sampler_init_dist(seed))

    def greedy(self) -> SamplerChain:
        """Take the most likely of the remaining tokens. The last link."""
        self._is_greedy = True
        return self._end(C.llama_sampler_init_greedy())

    def grammar(self, gbnf: str, root: str = "root", triggers: Sequence[str] = ()) -> SamplerChain:
        """Constrain the text to a GBNF grammar; with ``triggers``, regular expressions, only once
        one of them matches, from its first group on.

        Raises GrammarError with llama.cpp's reason if it does not parse.
        """
        if triggers:
            self._lazy = LazyGrammar(self.model, gbnf, root, triggers)
        else:
            self._grammar = load_grammar(self.model, gbnf, root)
        return self

    def sample(self, output: Output, row: int) -> int:
        if self._grammar is None:
            return self._sample(output.logits(row))
        with Watched("a grammar", GRAMMAR_SECONDS):
            return self._sample(output.logits(row))

    def _sample(self, logits: Floats) -> int:
        token = self._apply(logits)
        if self._grammar is not None and not grammar_allows(self._grammar, token):
            token = self._apply(logits, constrained=True)
        rejected: list[int] = []
        while not self._starts_or_waits(token):
            rejected.append(token)
            token = self._apply(logits, rejected=rejected)
        self._accept(token)
        return token

    def accept(self, token: int) -> None:
        """Tell every link that ``token`` is part of the text. Raises GrammarError if ``token``
        triggers a lazy grammar that rejects it."""
        if not self._starts_or_waits(token):
            raise GrammarError(f"the grammar does not allow token {token} here")
        self._accept(token)

    def _starts_or_waits(self, token: int) -> bool:
        """Start a lazy grammar if ``token`` triggers it; False if the grammar rejects the token."""
        if self._lazy is not None and self._lazy.triggered_by(token):
            self._started = self._lazy.started_with(token)
            return self._started is not None
        return True

    def _accept(self, token: int) -> None:
        if self._started is not None:
            self._grammar, self._started, self._lazy = self._started, None, None
        elif self._lazy is not None:
            self._lazy.accept(token)
        elif self._grammar is not None:
            C.llama_sampler_accept(self._grammar.handle, token)
        for link in self._links():
            C.llama_sampler_accept(link.handle, token)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Pass the prompt to the penalties; a grammar applies only to the text after it."""
        chain, _ = self._links()
        for token in tokens:
            C.llama_sampler_accept(chain.handle, token)

    def probabilities(self, logits: Floats) -> Floats:
        """The distribution the last link draws from: ``(n_vocab,)``, zero for filtered tokens, and
        for all but the most likely one without a draw.

        Raises InvalidParameter if there is none: mirostat adapts while drawing, XTC is random, and
        a grammar only checks the drawn token.
        """
        has_grammar = self._grammar is not None or self._lazy is not None
        has_distribution = self._draws or self._is_greedy
        if not has_distribution or self._random_links or has_grammar:
            raise InvalidParameter(
                "rejection and typical acceptance need a distribution, which mirostat, XTC, "
                "grammars and JSON schemas do not provide; use verify=match with them"
            )
        self._fill(logits)
        chain, _ = self._links()
        C.llama_sampler_apply(chain.handle, ctypes.byref(self._array))
        left = self._left()
        if self._is_greedy:
            best = int(left["logit"].argmax())
            left = left[best : best + 1]
        weights = np.exp(left["logit"] - left["logit"].max())
        probs: Floats = np.zeros(len(self._candidates), np.float32)
        probs[left["id"]] = weights / weights.sum()
        return probs

    def remaining(self, logits: Floats) -> Floats:
        """The logits of the tokens that the last token was drawn from, ``(n_vocab,)``; -inf for all
        others, which is all but one without a draw. ``logits`` are those given to ``sample``."""
        found: Floats = np.full(len(logits), -np.inf, np.float32)
        left = self._left()
        if self._is_greedy:
            left = left[self._array.selected : self._array.selected + 1]
        found[left["id"]] = left["logit"]
        return found

    def _left(self) -> npt.NDArray[Any]:
        """The candidates that the chain has left."""
        array = self._array
        return np.ctypeslib.as_array(
            ctypes.cast(array.data, ctypes.POINTER(ctypes.c_byte)),
            (array.size * _CANDIDATE.itemsize,),
        ).view(_CANDIDATE)

    def copy_state(self) -> SamplerChain:
        """A copy of the chain with its state, without the grammar."""
        other = SamplerChain(self.model)
        chain, last = self._links()
        other._chain = _owned(C.llama_sampler_clone(chain.handle))
        other._last = _owned(C.llama_sampler_clone(last.handle))
        other._draws, other._random_links = self._draws, self._random_links
        other._is_greedy, other.has_memory = self._is_greedy, self.has_memory
        return other

    def _links(self) -> tuple[Native, Native]:
        """The chain, and the link that chooses."""
        if self._chain is None or self._last is None:
            raise RuntimeError("the sampler is closed, or has no last link")
        return self._chain, self._last

    def _fill(self, logits: Any) -> None:
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = logits
        array = self._array
        array.data = self._data  # XTC drops candidates by moving the pointer
        array.size = len(candidates)
        array.selected = -1
        array.sorted = False

    def _apply(
        self, logits: Any, *, constrained: bool = False, rejected: Sequence[int] = ()
    ) -> int:
        self._fill(logits)
        array, candidates = self._array, self._candidates
        if constrained:
            assert self._grammar is not None
            C.llama_sampler_apply(self._grammar.handle, ctypes.byref(array))
        candidates["logit"][list(rejected)] = -np.inf
        if (constrained or rejected) and not np.isfinite(candidates["logit"]).any():
            raise GrammarError(
                "the grammar allows none of the model's tokens here; loosen the grammar"
            )
        for link in self._links():
            C.llama_sampler_apply(link.handle, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def _add(self, link: Any) -> SamplerChain:
        assert self._chain is not None
        C.llama_sampler_chain_add(self._chain.handle, link)  # transfers ownership of the link
        return self

    def _end(self, link: Any) -> SamplerChain:
        self._last = _owned(link)
        return self

    def close(self) -> None:
        """Free the chain and the grammar. Idempotent."""
        self._chain = self._last = self._grammar = self._started = None


def _owned(sampler: Any) -> Native:
    """A ``llama_sampler *`` that is freed once nothing uses it."""
    return Native(sampler, C.llama_sampler_free)
