"""Runs of plain steps: single rows, decoded without a tree while no drafter would draft.

Without a tree, the Python overhead of a step is 9 to 18 µs instead of 50. That matters for small
models, whose decode takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

from speculation.choice import follow
from speculation.continuation import Continuation, Emitted
from speculation.drafter import PlainSteps

FRAME_SECONDS = 0.016  # about that of a display, so that text appears smoothly


def plain_steps(
    text: Continuation, cancelled: Callable[[], bool] | None = None
) -> Iterator[Emitted]:
    """Decode plain steps while no drafter would draft, and yield the tokens they added.

    If a later step fails, the tokens before it are yielded first and then the error is raised.
    """
    text.end_plain()
    cache, stats, phases = text.cache, text.stats, text.stats.phase_seconds
    start, n_ctx = text.started, cache.target.n_ctx
    n_steps = min(text.max_length - len(text.tokens), n_ctx - cache.n_past)
    steps, failure = PlainSteps([], []), None
    began = perf_counter()
    try:
        _decode_rows(text, steps, n_steps, cancelled)
    except Exception as error:
        if not steps.tokens:
            raise
        failure = error
    decoded = perf_counter()
    follow([text], 1, median(steps.seconds), len(steps.seconds))
    for drafter in text.drafters:
        drafter.observe_plain(steps)
    observed = perf_counter()
    _, reason = text.text.take(steps.tokens)
    if reason is None and cache.n_past >= n_ctx:
        reason = "context"
    decoding = sum(steps.seconds)
    phases["draft"] += began - start + observed - decoded
    phases["decode"] += decoding
    phases["verify"] += decoded - began - decoding
    stats.add_plain(len(steps.tokens))
    stats.decode_seconds += perf_counter() - start
    yield Emitted(steps.tokens, 0, reason)
    if failure is not None:
        raise failure


def _decode_rows(
    text: Continuation,
    steps: PlainSteps,
    n_steps: int,
    cancelled: Callable[[], bool] | None,
) -> None:
    """Decode at most ``n_steps`` plain steps; add their tokens to ``steps`` and to the text.

    Stops early when a drafter would draft, after a token that may end the text, after
    FRAME_SECONDS, and when ``cancelled`` returns True.
    """
    target, committed, seq_ids = text.cache.target, text.cache.tokens, range(text.cache.n_seq)
    sample, tokens, (found, seconds), ends = text.sample, text.tokens, steps, text.text.ends
    strengths = [drafter.strength for drafter in text.drafters]
    token = tokens[-1]
    start = perf_counter()
    for position in range(len(committed), len(committed) + n_steps):
        before = perf_counter()
        output = target.decode_row(token, position, seq_ids)
        decoded = perf_counter()
        committed.append(token)
        token = sample(output, 0)
        found.append(token)
        seconds.append(decoded - before)
        tokens.append(token)
        if (
            token in ends
            or decoded - start > FRAME_SECONDS
            or (cancelled is not None and cancelled())
        ):
            break
        for strength in strengths:
            if strength(tokens):
                return
