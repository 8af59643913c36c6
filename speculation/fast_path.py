"""Runs of plain steps: single rows of a text that is alone, decoded without a tree.

Without a tree, the Python overhead of a step is 9 to 18 µs instead of 50. That matters for small
models, whose decode takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from batching.clock import now
from speculation.drafter import PlainSteps
from speculation.steps import RecordedStep
from speculation.text import FRAME_SECONDS, Emitted, Text


def run_plain(text: Text, is_wanted: Callable[[], bool] = lambda: False) -> None:
    """Decode plain steps while no drafter would draft, and deliver their tokens.

    Ends after FRAME_SECONDS, or when ``is_wanted``, polled after each step, says that something
    else is to be done. If a later step fails, the tokens before it are delivered first.
    """
    text.show_plain()
    cache, stats, phases = text.cache, text.stats, text.stats.phase_seconds
    start, n_ctx = text.started, cache.target.n_ctx
    n_steps = min(text.max_length - len(text.tokens), n_ctx - cache.n_past)
    steps, failure = PlainSteps([], []), None
    began = now()
    try:
        _decode_rows(text, steps, n_steps, is_wanted)
    except Exception as error:
        if not steps.tokens:
            raise
        failure = error
    decoded = now()
    if text.chooser is not None and text.chooser.cost is not None:
        text.chooser.cost.follow(1, cache.n_past, median(steps.seconds), len(steps.seconds))
    for drafter in text.drafters:
        drafter.observe_plain(steps)
    observed = now()
    _, reason = text.reply.take(steps.tokens)
    if reason is None and cache.n_past >= n_ctx:
        reason = "context"
    decoding = sum(steps.seconds)
    drafting, verifying = began - start + observed - decoded, decoded - began - decoding
    phases["draft"] += drafting
    phases["decode"] += decoding
    phases["verify"] += verifying
    stats.add_plain(len(steps.tokens))
    stats.decode_seconds = now() - text.written_since
    if text.request.record:
        n = len(steps.tokens)
        text.steps += [
            RecordedStep(drafting / n, seconds, verifying / n, 1, bonus=token)
            for token, seconds in zip(*steps, strict=True)
        ]
    text.deliver(Emitted(steps.tokens, 0, reason))
    if failure is not None:
        raise failure


def _decode_rows(
    text: Text, steps: PlainSteps, n_steps: int, is_wanted: Callable[[], bool]
) -> None:
    """Decode at most ``n_steps`` plain steps; add their tokens to ``steps`` and to the text.

    Stops early when a drafter would draft, and after a token that may end the text.
    """
    target, committed, seq_ids = text.cache.target, text.cache.tokens, range(text.cache.n_seq)
    sample, tokens, (found, seconds), ends = text.sample, text.tokens, steps, text.reply.ends
    promises = [drafter.promise for drafter in text.drafters]
    token = tokens[-1]
    start = now()
    for position in range(len(committed), len(committed) + n_steps):
        before = now()
        output = target.decode_row(token, position, seq_ids)
        decoded = now()
        committed.append(token)
        token = sample(output, 0)
        found.append(token)
        seconds.append(decoded - before)
        tokens.append(token)
        if token in ends or decoded - start > FRAME_SECONDS or is_wanted():
            break
        for promise in promises:
            if promise(tokens) != 0.0:
                return
