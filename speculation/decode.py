"""The decode loop for one text: draft, decode, verify, commit, until the text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

from batching.together import run
from speculation.choice import choose, follow
from speculation.continuation import Continuation, Emitted
from speculation.fast_path import plain_steps


def decode(text: Continuation, cancelled: Callable[[], bool] | None = None) -> Iterator[Emitted]:
    """Continue ``text``; yield the tokens of each step, or of each run of plain steps.

    ``cancelled`` is polled after each plain step and ends the run; stopping is up to the caller. If
    the context is full, the finish reason is ``context``. The cache is left with the text except
    its last token, even if the generator is closed early.
    """
    try:
        run(text.begin())
        while True:
            if text.is_plain():
                # No drafter would draft: plain steps, without a tree.
                for emitted in plain_steps(text, cancelled):
                    yield emitted
            else:
                # 1. Draft a tree below the last token, and keep what is worth its rows.
                run(text.draft())
                choose([text])
                rows = text.rows()
                # 2. Decode the whole tree in one forward pass.
                start = perf_counter()
                output = text.cache.target.decode(rows, text.cache.watch)
                seconds = perf_counter() - start
                follow([text], len(rows), seconds)
                # 3. Verify it, keep the accepted path's KV entries, and add the bonus token.
                emitted = text.accept(output, seconds)
                yield emitted
            if emitted.finish_reason is not None:
                return
    finally:
        text.end()
