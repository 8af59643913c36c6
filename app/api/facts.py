"""Figures of a reply, as OpenAI's ``usage`` and llama-server's ``timings`` give them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isnan
from typing import Any

from app.api.replies import Gathered, Shown
from app.api.sampling import MOST_CHOICES, Sampling
from app.worker.messages import Chance, Done


def usage(choices: Sequence[Gathered], n: int = MOST_CHOICES) -> dict[str, Any]:
    """The tokens of a call: those of each prompt, which has ``n`` choices in a row, and of all
    choices."""
    done = [choice.done for choice in choices if choice.done is not None]
    firsts = [choice.done for choice in choices[::n] if choice.done is not None]
    n_prompt = sum(one.n_prompt for one in firsts)
    n_tokens = sum(one.n_tokens for one in done)
    n_accepted = sum(one.n_accepted for one in done)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_tokens,
        "total_tokens": n_prompt + n_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.n_reused for one in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": sum(one.n_drafted for one in done) - n_accepted,
        },
    }


def timings(done: Done) -> dict[str, Any]:
    """Times of a reply. Its first token comes of reading the prompt; speed is that of the later
    ones."""
    n_read, n_later = done.n_read, max(0, done.n_tokens - 1)
    prompt_ms = 1000 * (done.prefill_seconds - done.first_seconds)
    predicted_ms = 1000 * (done.decode_seconds + done.first_seconds)
    return {
        "cache_n": done.n_reused,
        "prompt_n": n_read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, n_read),
        "prompt_per_second": _ratio(1000 * n_read, prompt_ms),
        "predicted_n": done.n_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, n_later),
        "predicted_per_second": _ratio(1000 * n_later, predicted_ms),
        "draft_n": done.n_drafted,
        "draft_n_accepted": done.n_accepted,
    }


def times(gathered: Gathered, asked: Sampling) -> dict[str, Any]:
    """The field of a chunk with the times so far, if they are asked for."""
    return {"timings": timings(gathered.so_far)} if asked.timings_per_token else {}


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
        "logprob": min(chance.logprob, 0.0),  # NaN stays NaN
        "bytes": list(chance.piece),
    }


def legacy_logprobs(tokens: Sequence[Shown], at: int = 0) -> dict[str, Any]:
    """The form of OpenAI's older completions, with that of the newer in ``content``. The text of
    the first token begins at character ``at`` of the choice."""
    offsets = []
    for token in tokens:
        offsets.append(max(0, at))
        at += len(token.text)
    chances = [token.chances for token in tokens]
    return {
        "tokens": [_name(own) for own, _ in chances],
        "token_logprobs": [own.logprob for own, _ in chances],
        "top_logprobs": [_by_name(own, top) for own, top in chances],
        "text_offset": offsets,
        "content": token_logprobs(chances),
    }


def _name(chance: Chance) -> str:
    """A token's text; its bytes, as OpenAI writes them, if it has only a part of a character."""
    try:
        return chance.piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in chance.piece)


def _by_name(own: Chance, top: Sequence[Chance]) -> dict[str, float] | None:
    """Log probabilities by text, the token's own among them; None where there are none. Of several
    tokens with one text, the likeliest counts."""
    if isnan(own.logprob):
        return None
    found: dict[str, float] = {}
    for chance in sorted([*top, own], key=lambda chance: -chance.logprob):
        found.setdefault(_name(chance), chance.logprob)
    return found
