"""Figures of a reply, as OpenAI's ``usage`` and llama-server's ``timings`` give them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import Any

from app.api.replies import Gathered
from app.worker.messages import Chance, Done


def usage(choices: Sequence[Gathered]) -> dict[str, Any]:
    """The tokens of a call. Its choices have one prompt."""
    done = [choice.done for choice in choices if choice.done is not None]
    n_prompt = done[0].n_prompt if done else 0
    n_tokens = sum(one.n_tokens for one in done)
    n_accepted = sum(one.n_accepted for one in done)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": done[0].n_reused if done else 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": sum(one.n_drafted for one in done) - n_accepted,
        },
    }


def timings(done: Done) -> dict[str, Any]:
    """Times of a reply. The first step counts as prompt, since it reads the prompt's end too."""
    n_read, n_decoded = done.n_prompt - done.n_reused, done.n_tokens - done.n_first
    prompt_ms, predicted_ms = 1000 * done.prefill_seconds, 1000 * done.decode_seconds
    return {
        "cache_n": done.n_reused,
        "prompt_n": n_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, n_read),
        "prompt_per_second": _ratio(1000 * n_read, prompt_ms),
        "predicted_n": done.n_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, n_decoded),
        "predicted_per_second": _ratio(1000 * n_decoded, predicted_ms),
        "draft_n": done.n_drafted,
        "draft_n_accepted": done.n_accepted,
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def token_logprobs(chances: Sequence[tuple[Chance, tuple[Chance, ...]]]) -> list[dict[str, Any]]:
    """Tokens and their log probabilities, with the likeliest ones, as OpenAI has them."""
    return [{**_chance(own), "top_logprobs": [_chance(one) for one in top]} for own, top in chances]


def native_probs(
    chances: Sequence[tuple[Chance, tuple[Chance, ...]]], post_sampling: bool
) -> list[dict[str, Any]]:
    """The same as llama-server has it: with ids, and those after sampling as probabilities."""

    def one(chance: Chance) -> dict[str, Any]:
        found = {"id": chance.id, **_chance(chance)}
        return {**found, "prob": exp(found.pop("logprob"))} if post_sampling else found

    name = "top_probs" if post_sampling else "top_logprobs"
    return [{**one(own), name: [one(other) for other in top]} for own, top in chances]


def _chance(chance: Chance) -> dict[str, Any]:
    return {
        "token": chance.piece.decode("utf-8", "replace"),
        "logprob": min(0.0, chance.logprob),
        "bytes": list(chance.piece),
    }


def legacy_logprobs(chances: Sequence[tuple[Chance, tuple[Chance, ...]]]) -> dict[str, Any]:
    """The form of OpenAI's older completions, with that of the newer in ``content``."""
    texts = [own.piece.decode("utf-8", "replace") for own, _ in chances]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [own.logprob for own, _ in chances],
        "top_logprobs": [
            {one.piece.decode("utf-8", "replace"): one.logprob for one in top} for _, top in chances
        ],
        "text_offset": offsets,
        "content": token_logprobs(chances),
    }
