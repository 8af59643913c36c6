"""Prompts that are read for their tokens' probabilities, or read anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batching.errors import InvalidParameter, PromptTooLong
from speculation.engine import Engine
from speculation.reply import Reply
from speculation.request import Request
from speculation.sampling import TokenLogprobs
from speculation.settings import as_method
from tests.support.exact import EXACT, PROMPT, endless
from tests.support.tiny_heads import mtp


@pytest.fixture(scope="module")
def parallel(tiny_model: Path) -> Iterator[Engine]:
    with Engine.load(tiny_model, EXACT, parallel=2) as engine:
        yield engine


def scored(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """The log probability of each token from the second on, one request each."""
    found = []
    for n in range(1, len(tokens)):
        text = engine.generate(tokens[:n], max_tokens=1, logprobs=engine.model.n_vocab).run()
        found.append(dict(text.logprobs[0].top)[tokens[n]])
    return found


def test_a_prompt_has_its_tokens_probabilities(engine: Engine, parallel: Engine) -> None:
    tokens = engine.model.tokenize(f"{PROMPT} " * 4)
    assert len(tokens) > 130  # more than two pieces of 64 rows
    expected = scored(engine, tokens)
    for one in (engine, parallel):
        for n_top in (0, 3):
            found = one.score(tokens, n_top)
            assert [token.logprob for token in found] == pytest.approx(expected, abs=1e-4)
            assert {len(token.top) for token in found} == {n_top}
        likeliest = one.generate(tokens[:90], max_tokens=1).run().token_ids
        assert [found[89].top[0][0]] == likeliest
    assert engine.score(tokens[:1]) == []
    assert engine.score("a cat") == engine.score(engine.model.tokenize("a cat"))


def test_a_scored_prompt_lets_others_have_a_token_a_piece(parallel: Engine) -> None:
    written = parallel.generate("a dog", method="ar", sampling=endless(parallel))
    next(written)
    seen: list[int] = []

    def take(found: Sequence[TokenLogprobs]) -> None:
        assert len(found) <= 64
        seen.append(len(written.token_ids))

    tokens = tuple(parallel.model.tokenize(f"{PROMPT} " * 4))
    request = Request(tokens, as_method("ar"), max_tokens=2, logprobs=0, scored=take)
    text = parallel.start(request).run()
    assert len(seen) >= 3
    assert seen == sorted(set(seen))  # a step of both texts for each piece
    assert len(text.token_ids) == 2
    written.cancel()


def test_a_prompt_can_be_read_into_the_cache_or_anew_and_some_cannot_be_scored(
    engine: Engine,
) -> None:
    def read(prompt: str, **more: Any) -> Reply:
        tokens = tuple(engine.model.tokenize(prompt))
        return engine.start(Request(tokens, as_method("ar"), **more)).run()

    n = len(engine.model.tokenize(PROMPT))
    empty = read(PROMPT, max_tokens=0)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], "length")
    assert empty.stats.prefill_seconds > 0
    plain = read(PROMPT, max_tokens=9)
    assert plain.stats.n_reused == n - 1
    anew = read(PROMPT, max_tokens=9, reuse=False)
    assert (anew.stats.n_reused, anew.token_ids) == (0, plain.token_ids)
    with pytest.raises(InvalidParameter, match="the prompt is empty"):
        engine.score([])
    with pytest.raises(PromptTooLong, match="needs 600 tokens"):
        engine.score([5] * 600)


def test_states_are_read_beside_probabilities(tmp_path: Path) -> None:
    model, _, (_, method, *_) = mtp(tmp_path)
    with Engine.load(model, EXACT) as engine:
        tokens = tuple(engine.model.tokenize(PROMPT * 2))
        found: list[TokenLogprobs] = []
        request = Request(tokens, as_method(method), max_tokens=12, logprobs=0, scored=found.extend)
        text = engine.start(request).run()
        assert text.stats.n_drafted > 0
        assert found == engine.score(tokens)
        assert text.token_ids == engine.generate(tokens, method="ar", max_tokens=12).run().token_ids
