"""What came of a reply, and its figures as OpenAI's ``usage`` and llama-server's ``timings``."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from math import exp, isnan
from time import perf_counter
from typing import Any, NamedTuple

from app.worker.messages import Chance, Done, Event, Opening, Prefill, PromptTokens, Tokens


class Shown(NamedTuple):
    """A token of a reply's text.

    text     the characters it completed
    chances  its probability, and those of the likeliest tokens
    """

    text: str
    chances: tuple[Chance, tuple[Chance, ...]]


@dataclass
class Gathered:
    """What came of one choice so far.

    ends     tokens that end a text, and are not in it
    prompt   the prompt's tokens, if their probabilities come
    chances  each token's probabilities
    shown    the same of the tokens whose text is shown: not of one that ends it, nor of those that
             a stop string has cut off
    """

    ends: Container[int] = ()
    prompt: list[Shown] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    n_accepted: int = 0
    chances: list[tuple[Chance, tuple[Chance, ...]]] = field(default_factory=list)
    opening: str = ""
    prefill: Prefill | None = None
    n_reused: int = 0
    done: Done | None = None
    began: float = 0.0  # when the prompt began to be read …
    has_read: float = 0.0  # … when it was last seen to be, or the first token came …
    first: float = 0.0  # … that is when the first tokens came …
    came: float = 0.0  # … and when the last ones did
    _held: list[Shown] = field(default_factory=list)  # without a text so far
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )  # of the prompt

    def take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.came = perf_counter()
            self.first = self.first or self.came
            self.has_read = self.first
            self.pieces += [text for text, _ in event.pieces]
            self.ids += event.ids
            self.n_accepted += sum(drafted for _, drafted in event.pieces)
            self.chances += event.chances
            for (text, _), chances in zip(event.pieces, event.chances, strict=False):
                if chances[0].id not in self.ends:
                    self._held.append(Shown(text, chances))
                    if text:
                        self._show()
        elif isinstance(event, PromptTokens):
            decode = self._decoder.decode
            self.prompt += [Shown(decode(one[0].piece), one) for one in event.chances]
        elif isinstance(event, Opening):
            self.opening = event.mark
        elif isinstance(event, Prefill):
            self.n_reused = event.done if self.prefill is None else self.n_reused
            self.has_read = perf_counter()
            self.began = self.has_read if self.prefill is None else self.began
            self.prefill = event
        elif isinstance(event, Done):
            self.done = event
            if not event.stop_string:
                self._show()

    def _show(self) -> None:
        self.shown += self._held
        self._held = []

    def progress(self, event: Event) -> dict[str, int] | None:
        """How much of the prompt is read after ``event``, if that changes it."""
        if self.prefill is None or not isinstance(event, Prefill | Tokens):
            return None
        total = self.prefill.total + 1
        if isinstance(event, Tokens):
            if len(self.ids) > len(event.ids):
                return None
            return {"total": total, "cache": self.n_reused, "processed": total}
        return {"total": total, "cache": self.n_reused, "processed": event.done}

    @property
    def so_far(self) -> Done:
        """Counters and times while it runs, as far as they are seen from here."""
        n_read = self.prefill.done if self.prefill is not None else 0
        n_tokens = len(self.ids)
        return Done(
            "",
            n_prompt=n_read + bool(n_tokens),
            n_reused=self.n_reused,
            n_read=n_read - self.n_reused + bool(n_tokens),
            n_tokens=n_tokens,
            n_first=min(1, n_tokens),
            n_accepted=self.n_accepted,
            prefill_seconds=self.has_read - self.began,
            decode_seconds=self.came - self.has_read if n_tokens else 0.0,
        )

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def usage(choices: Sequence[Gathered], n: int) -> dict[str, Any]:
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


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def token_logprobs(tokens: Sequence[Shown]) -> list[dict[str, Any]]:
    """Tokens and their log probabilities, with the likeliest ones, as OpenAI has them."""
    return [
        {**_chance(own), "top_logprobs": [_chance(one) for one in top]} for _, (own, top) in tokens
    ]


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
        "content": token_logprobs(tokens),
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
