"""Structure: what a JSON schema, a regular expression or a grammar allows a text to say.

llguidance (github.com/guidance-ai/llguidance) parses along with the text. Before a token is chosen,
those that cannot follow are taken out of the target's logits, so drafts are verified by the same
walk as without a structure. Forced tokens are drafted for free.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from batching.errors import GrammarError, utf8
from batching.llama.model import Model
from batching.llama.sampler import Ids
from batching.tree import TokenTree
from speculation.drafter import DraftBudget, Drafter
from speculation.gbnf import gbnf_to_lark
from speculation.json_schema import followed, reason, tell
from speculation.sampling import SamplingParams
from speculation.sandbox import one_limit, problem_of

log = logging.getLogger(__name__)

_KEPT = 64  # grammars that are ready to use again
_NAMED = re.compile(r"<[^<>\s]+>")  # a token by its text
LARK = "%llguidance"  # a grammar that starts with it is Lark, any other one is GBNF


class Structures:
    """The structures of one model's texts. From any thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        ends = (model.special_token("eot"), model.special_token("eos"), *sorted(model.ends))
        self._end = next((end for end in ends if end is not None and end in model.ends), 0)
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, sampling: SamplingParams) -> Structure | None:
        """The structure of a new text; None if ``sampling`` asks for none.

        Raises GrammarError. Takes long for a large schema, so not in the engine's thread.
        """
        with one_limit():
            grammar = grammar_of(sampling)
            if grammar is None:
                return None
            return Structure(self._matcher(grammar).deep_copy(), self._end)

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            if (matcher := self._ready.get(grammar)) is not None:
                self._ready.move_to_end(grammar)
                return matcher
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._model)
        names = {name: self._model.marks.get(name) for name in _NAMED.findall(grammar)}
        special = tuple((name, token) for name, token in names.items() if token is not None)
        n_vocab = self._model.n_vocab if "<[" in grammar else 0
        if problem := reason(problem_of(grammar, special, n_vocab)):
            raise GrammarError(f"the grammar cannot be used: {problem}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {reason(matcher.get_error())}")
        for warning in matcher.get_grammar_warnings():
            log.warning("a grammar: %s", warning)
        with self._lock:
            self._ready[grammar] = matcher
            while len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return matcher


def grammar_of(sampling: SamplingParams) -> str | None:
    """The structure that ``sampling`` asks for, as llguidance reads it. Raises GrammarError."""
    if sampling.json_schema is not None:
        schema, left_out = followed(sampling.json_schema, strict=sampling.strict)
        tell("a JSON schema", *left_out)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    given = sampling.regex or sampling.grammar or ""
    utf8(given)  # llguidance cannot read half a character
    if sampling.regex is not None:
        return LLMatcher.grammar_from_regex(sampling.regex)
    if sampling.grammar is not None:
        is_lark = sampling.grammar.lstrip().startswith(LARK)
        lark = sampling.grammar if is_lark else gbnf_to_lark(sampling.grammar)
        return LLMatcher.grammar_from_lark(lark)
    return None


class Structure:
    """Where a text is in its structure."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        """``end`` is the token that ends a complete text."""
        self._matcher = matcher
        self._end = end
        self._forced: list[int] = []  # tokens that alone may follow, as far as they are known
        self._n_taken = 0  # of these
        self._is_known = False  # whether they are those after the text so far

    def allowed(self) -> Ids:
        """The tokens that may follow. Raises GrammarError if that takes too much to find out."""
        if forced := self.forced(1):
            return np.array(forced)
        found = np.flatnonzero(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8))
        self._check()
        return found

    def allows(self, token: int) -> bool:
        forced = self.forced(1)
        return forced[0] == token if forced else self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """``token`` is part of the text. Raises GrammarError if it must not be."""
        is_forced = self._forced[self._n_taken : self._n_taken + 1] == [token]
        self._n_taken += 1
        self._is_known = is_forced and self._n_taken < len(self._forced)
        if not self._matcher.consume_token(token):
            self._check()

    def forced(self, most: int) -> Sequence[int]:
        """The first ``most`` of the tokens that alone may follow, one after the other."""
        if not self._is_known:
            self._forced, self._n_taken, self._is_known = self._all_forced(), 0, True
        return self._forced[self._n_taken : self._n_taken + most]

    def _all_forced(self) -> list[int]:
        if self._matcher.is_stopped():
            self._check()
            return [self._end]
        forced = self._matcher.compute_ff_tokens()
        self._check()
        if forced:
            after = self._matcher.deep_copy()
            if after.consume_tokens(forced) and after.is_stopped():
                forced.append(self._end)
        return forced

    def prune(self, tree: TokenTree) -> list[int]:
        """The drafts of ``tree`` that may follow, ascending."""
        parents = {*tree.parents[1 : tree.n_drafted + 1]}
        kept: set[int] = set()
        for leaf in range(1, tree.n_drafted + 1):
            if leaf not in parents:
                path = tree.path_to(leaf)[1:]
                n = self._matcher.validate_tokens([tree.tokens[node] for node in path])
                kept.update(path[:n])
        return sorted(kept)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {reason(self._matcher.get_error())}")


class ForcedTokens(Drafter):
    """Drafts the tokens that a structure forces."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def promise(self, tokens: Sequence[int]) -> float:
        """Whether a token is forced."""
        return float(len(self._structure.forced(1)))

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> None:
        n = max(0, min(budget.room(tree), budget.max_depth))
        tree.add_chain(0, self._structure.forced(n))


class _Vocabulary:
    """A model's vocabulary, in the form that llguidance's TokenizerWrapper reads."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.tokens = [model.piece(token) for token in range(model.n_vocab)]
        self.special_token_ids = [t for t in range(model.n_vocab) if model.is_control(t)]
        self.bos_token_id: int | None = None
        self.eos_token_id = min(model.ends, default=0)
        self._greedy: dict[bytes, int] = {}

    def __call__(self, data: bytes) -> list[int]:
        """Tokens that spell exactly ``data``."""
        model, text = self._model, data.decode("utf-8", "replace")
        found = model.tokenize(text, add_special=False)
        if model.detokenize(found) == data:
            return found
        # SentencePiece puts a space before a text, but not after a line break.
        found = model.tokenize("\n" + text, add_special=False)
        for n in range(1, min(4, len(found))):
            if model.detokenize(found[n:]) == data:
                return found[n:]
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        if not self._greedy:
            special = frozenset(self.special_token_ids)
            self._greedy = {p: t for t, p in enumerate(self.tokens) if p and t not in special}
        longest, at, found = max(map(len, self._greedy)), 0, list[int]()
        while at < len(data):
            ends = range(min(len(data), at + longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._greedy), None)
            if end is None:
                break  # no tokens spell it: then nothing is forced
            found.append(self._greedy[data[at:end]])
            at = end
        return found


def _tokenizer(model: Model) -> LLTokenizer:
    """As llguidance needs it. Takes a second for a vocabulary of 150,000 tokens."""
    wrapper = TokenizerWrapper(_Vocabulary(model))
    ends: Any = sorted(model.ends) or [0]
    return LLTokenizer(wrapper, n_vocab=model.n_vocab, eos_token=ends)
