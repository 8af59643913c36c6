"""What came of a reply's drafts: a sentence for a newcomer, and the figures behind it. Pure.

A speed-up compares with the plain steps of this reply, at their median, if there are LEAST_PLAIN:
they were taken in the same minute and at the same place of the context. The reply's own time has
them at their median, too, so that a pause does not count. That is no plain run of this text, so the
sentence says "about". Steps that also decoded other texts tell nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import monotonic
from types import MappingProxyType
from typing import Any

from app.page.slowness import why_slow
from app.page.steps import milliseconds, n_tokens
from app.worker.messages import Done, StepRecord, Tokens
from speculation.drafter import BASELINE
from speculation.meter import STRUCTURE, rate

LEAST_TOKENS, LEAST_MS = 32, 100.0  # of a reply that tells a speed-up
LEAST_PLAIN = 8  # steps
CHECKED = 4  # tokens, whose cost is compared with that of one
DEAR = 1.5  # times the cost of one: a reason to draft nothing

# What became of a source's tokens. Those of others were "drafted by" them.
_VERBS = {
    "prediction": "copied from the expected text",
    "recycling": "drafted from the model's earlier guesses",
    "draft": "drafted by the draft model",
    "mtp": "drafted by the model's own extra layers",
    STRUCTURE: "given by the format",
}
COUNTING = "auto"  # the method that drafts nothing where checking costs too much
_COPYING = ("prompt-lookup", "suffix")
_ENDS = {"cancelled": "stopped", "length": "length limit", "context": "context full"}


class Pace:
    """How fast a reply is being written."""

    def __init__(self) -> None:
        self._began = 0.0
        self._n_first = self._n = self._n_drafted = 0

    def take(self, event: Tokens) -> str:
        """What to say after more tokens. The first ones tell no time."""
        now = monotonic()
        self._n += len(event.pieces)
        self._n_drafted += sum(is_drafted for _, is_drafted in event.pieces)
        if not self._began:
            self._began, self._n_first = now, self._n
        per_second = rate(self._n, self._n_first, now - self._began)
        share = f", {100 * self._n_drafted / self._n:.0f}% drafted" if self._n_drafted else ""
        return f"{_speed(per_second)}{share}" if per_second else ""


@dataclass(frozen=True)
class Outcome:
    """What is said below a reply.

    sentence  for a newcomer
    figures   (label, value), for those who want to know more
    """

    sentence: str
    figures: tuple[tuple[str, str], ...]


def outcome(
    done: Done,
    records: Sequence[StepRecord] = (),
    message: str = "",
    files: str = "",
    n_left_out: int = 0,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """What to say of a reply that ended with ``done``.

    records      its steps
    message, files  what the user wrote, and its files, to tell what was copied from there
    n_left_out   how many earlier turns the prompt left out
    sampling     fields of ``SamplingParams``
    """
    ratio, plain_step = _plain(records)
    why = why_slow(done, records, ratio)
    return Outcome(
        ". ".join(filter(None, [_sentence(done, _counts(records, message, files), ratio), why])),
        tuple(_figures(done, records, plain_step, n_left_out, sampling)),
    )


def speed(done: Done) -> float:
    """Tokens per second without the first step, which the time to first token covers."""
    return rate(done.n_tokens, done.n_first, done.decode_seconds)


def _plain(records: Sequence[StepRecord]) -> tuple[float, str]:
    """How many times as fast as plain decoding the reply was, 0 if it is too short to tell; and the
    time of a plain step."""
    # The first step may also read the end of the prompt.
    steps = [one for one in records[1:] if one.n_texts == 1]
    own = [one for one in steps if one.n_rows == 1]
    if len(own) < LEAST_PLAIN:
        return 0.0, ""
    n, spent = sum(map(n_tokens, steps)), sum(map(milliseconds, steps))
    spent += len(own) * median(map(milliseconds, own)) - sum(map(milliseconds, own))
    step = median(one.decode_ms + one.accept_ms for one in own)
    is_long = n >= LEAST_TOKENS and spent >= LEAST_MS
    figure = f"{_ms(step)}, the median of {len(own)} in this reply"
    return n * step / spent if is_long else 0.0, figure


def _sentence(done: Done, counts: Counter[str], ratio: float) -> str:
    if not done.n_tokens:
        return "No tokens were written"
    fast = _speed(speed(done)) if speed(done) else ""
    if done.method == BASELINE:
        came = "Plain decoding: one token a step, no drafts"
    elif not done.n_drafted:
        came = _no_drafts(done)
    else:
        came = f"0 of {done.n_drafted} drafts were accepted"
        if done.n_accepted:
            came = _accepted(done, counts)
        if ratio and fast:
            return f"{fast}, about {times(ratio)} plain: {came}"
    return ". ".join(filter(None, [fast, came]))


def times(ratio: float) -> str:
    """A speed-up: "1.9×"."""
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def _no_drafts(done: Done) -> str:
    if not done.method.startswith(COUNTING):
        return f"No drafts: {done.method} found none"
    if done.model is not None and not done.model.can_draft:
        return "No drafts: this model is recurrent and cannot drop rejected ones"
    if len(done.decode_ms) >= CHECKED and _cost_of_checking(done) >= DEAR:
        cost = f"{_cost_of_checking(done):.1f}× one token on this machine"
        return f"No drafts: verifying {CHECKED} tokens costs {cost}"
    return "No drafts: none was likely enough"


def _cost_of_checking(done: Done) -> float:
    return done.decode_ms[CHECKED - 1] / done.decode_ms[0]


def _accepted(done: Done, counts: Counter[str]) -> str:
    """How many tokens were accepted drafts, and where most of those came from."""
    n = done.n_accepted
    of_all = f"{n} of {done.n_tokens} tokens {'was' if n == 1 else 'were'}"
    # The steps are those of the whole reply, ``done`` is of its last part if it was continued.
    if not counts or counts.total() != n:
        return f"{of_all} drafted"
    verb, most = counts.most_common(1)[0]
    return f"{of_all} {verb}" if most == n else f"{of_all} drafted, {most} of them {verb}"


def _counts(records: Sequence[StepRecord], message: str, files: str) -> Counter[str]:
    """How many accepted drafts came from where."""
    counts: Counter[str] = Counter()
    last = ""
    for record in records:
        counts.update(verbs(record, last, message, files))
        last = last_token(record, last)
    return counts


def verbs(record: StepRecord, before: str, message: str = "", files: str = "") -> list[str]:
    """What became each of a step's accepted drafts, which follow the token ``before``."""
    path = [record.nodes[node] for node in record.path]
    # A copy has the token before it from there, too.
    copied = before + "".join(node.piece for node in path)
    place = "your message" if copied in message else "earlier text"
    found = _VERBS | dict.fromkeys(
        _COPYING, f"copied from {'your file' if copied in files else place}"
    )
    return [found.get(node.source, f"drafted by {node.source}") for node in path]


def last_token(record: StepRecord, before: str) -> str:
    """The last token of the text after a step; ``before`` is that before it."""
    return record.bonus or (record.nodes[record.path[-1]].piece if record.path else before)


def _figures(
    done: Done,
    records: Sequence[StepRecord],
    plain_step: str,
    n_left_out: int,
    sampling: Mapping[str, Any],
) -> list[tuple[str, str]]:
    found = []
    if speed(done):
        found.append(("Speed", _speed(speed(done))))
    if plain_step and done.method != BASELINE:
        found.append(("A plain step", plain_step))
    if done.n_steps:
        found.append(("Tokens per step", f"{done.n_tokens / done.n_steps:.1f}"))
    if done.n_drafted:
        share = 100 * done.n_accepted / done.n_drafted
        found.append(("Accepted", f"{done.n_accepted} of {done.n_drafted} drafts ({share:.0f}%)"))
    by_source = Counter(one.nodes[node].source for one in records for node in one.path)
    if by_source:
        each = [f"{n} by {source}" for source, n in by_source.most_common()]
        found.append(("Accepted drafts", ", ".join(each)))
    if steps := records[1:]:
        drafting = _ms(fmean(one.draft_ms for one in steps))
        decoding = _ms(fmean(one.decode_ms for one in steps))
        accepting = _ms(fmean(one.accept_ms for one in steps))
        found.append(("A step", f"drafting {drafting}, decoding {decoding}, accepting {accepting}"))
    if len(done.decode_ms) >= CHECKED:
        found.append((f"Checking {CHECKED} tokens", f"{_cost_of_checking(done):.1f} times one"))
    if done.n_tokens:
        first = f"{done.prefill_seconds:.2f} s"
        read = f"{done.n_prompt - done.n_reused} of {done.n_prompt} prompt tokens read"
        found.append(("First token", f"after {first}, {read}"))
    if done.model is not None:
        # The last token of a full context is never decoded, so it has no cell.
        n_used = min(done.n_prompt + done.n_tokens, done.model.n_ctx)
        found.append(("Context", f"{n_used} of {done.model.n_ctx} tokens"))
    if n_left_out:
        found.append(("Left out", f"{n_left_out} turn{'' if n_left_out == 1 else 's'}"))
    if done.finish_reason in _ENDS:
        found.append(("End", _ENDS[done.finish_reason]))
    if heat := sampling.get("temperature"):  # else each token was the most likely one
        found.append(("Sampling", f"temperature {heat:g}, seed {sampling['seed']}"))
    return found


def _speed(tokens_per_second: float) -> str:
    shown = f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"
    return f"{shown} tokens/s"


def _ms(spent: float) -> str:
    return f"{spent:.1f} ms" if spent >= 1 else f"{spent:.2f} ms"
