"""Draws, and what they choose among, beside plain reference implementations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batching.llama.sampler import _gumbel, _uniform, draw, nucleus
from batching.tree import Floats
from speculation.sampling import SamplingParams, make_sampler


def some_logits() -> list[Floats]:
    """Flat, sharp, with ties, with forbidden tokens, and of a single token."""
    rng = np.random.default_rng(1)
    flat, sharp = rng.normal(0, 0.5, 20_000), rng.normal(0, 3, 20_000)
    sharp[rng.integers(0, 20_000, 9)] += 15
    ties = rng.integers(0, 4, 300).astype(float)
    forbidden = np.where(rng.random(300) < 0.5, -np.inf, rng.normal(0, 3, 300))
    found = flat, sharp, ties, forbidden, np.zeros(100), np.array([3.0])
    return [logits.astype(np.float32) for logits in found]


def reference_nucleus(logits: Floats, p: float) -> list[int]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    kept, total = [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: (-weights[token], token)):
        kept.append(token)
        total += weights[token]
        if total >= p * weights.sum():
            break
    return sorted(kept)


def chosen(logits: Floats, position: int = 0, **sampling: Any) -> int:
    model: Any = SimpleNamespace(n_vocab=len(logits), ends=frozenset({0}))
    sampler = make_sampler(SamplingParams(**sampling), model, 512)
    for _ in range(position):
        sampler.accept(0)
    output: Any = SimpleNamespace(logits=lambda row: logits)
    return sampler.sample(output, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-3, 1e-6])
def test_the_highest_sum_of_logit_and_noise_is_drawn(temperature: float) -> None:
    for logits in some_logits():
        ids, scaled = np.arange(len(logits)), logits / np.float32(temperature)
        for position in range(20):
            sums = scaled.astype(np.float64) + _gumbel(_uniform(ids, 5, position))
            assert draw(ids, scaled, 5, position) == sums.argmax()


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-300])
def test_at_a_tiny_temperature_a_most_likely_token_is_drawn(temperature: float) -> None:
    for logits in some_logits():
        for more in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"mirostat": 2}):
            token = chosen(logits, temperature=temperature, **more)
            assert logits[token] == logits.max(), more


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.95, 0.999])
def test_the_nucleus_is_the_fewest_tokens_with_enough_probability(p: float) -> None:
    for logits in some_logits():
        assert nucleus(logits, p).tolist() == reference_nucleus(logits, p)


def test_a_token_is_drawn_from_what_all_samplers_leave() -> None:
    for logits in some_logits():
        kept = np.array(reference_nucleus(logits, 0.8))
        strong = kept[logits[kept] >= logits.max() + np.log(0.2)]
        for position in range(10):
            settings: dict[str, Any] = {"temperature": 0.7, "seed": 5}
            for left, more in (
                (np.arange(len(logits)), {}),
                (kept, {"top_p": 0.8}),
                (strong, {"top_p": 0.8, "min_p": 0.2}),
            ):
                scaled = logits[left] / np.float32(0.7)
                expected = left[(scaled + _gumbel(_uniform(left, 5, position))).argmax()]
                assert chosen(logits, position, **settings, **more) == expected
            if len(logits) > 1:  # token 0 ends the text
                left = np.arange(1, len(logits))
                sums = logits[left] / np.float32(0.7) + _gumbel(_uniform(left, 5, position))
                least = {"min_tokens": 11}
                assert chosen(logits, position, **settings, **least) == left[sums.argmax()]


def test_draws_follow_the_softmax_and_the_seed() -> None:
    ids = np.array([3, 7, 100, 4000])
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1])).astype(np.float32)
    moved = logits + np.array([0.001, -0.001, 0.001, -0.001], np.float32)
    chosen = [draw(ids, logits, 5, n) for n in range(20_000)]
    shares = np.bincount(chosen) / 20_000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.15, 0.1], atol=0.012)
    again = [draw(ids, moved, 5, n) for n in range(20_000)]
    assert sum(a != b for a, b in zip(chosen, again, strict=True)) < 40
    other = [draw(ids, logits, 6, n) for n in range(100)]
    assert sum(a != b for a, b in zip(chosen[:100], other, strict=True)) > 30
    ids = np.arange(20_001)
    logits = np.full(20_001, -14.0, np.float32)
    logits[0] = 0.0  # the others have a share of 1.6% together
    found = [draw(ids, logits, 1, n) for n in range(5000)]
    assert 55 < sum(index > 0 for index in found) < 110
    some = np.arange(0, 20_001, 2)  # what is left out does not change the noise of the others
    for n in (n for n, index in enumerate(found) if index % 2 == 0):
        assert some[draw(some, logits[some], 1, n)] == found[n]
