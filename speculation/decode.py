"""The decode loop for one text: draft, decode, verify, commit, until the text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from speculation.continuation import Continuation, Emitted
from speculation.fast_path import plain_steps


def decode(text: Continuation, cancelled: Callable[[], bool] | None = None) -> Iterator[Emitted]:
    """Continue ``text``, yielding what each step, or a run of plain steps, added to it.

    ``cancelled`` is asked after each plain step, which ends the run; to stop is up to the caller.
    When the context is full, the finish reason is ``context``. The cache ends up with the text but
    for its last token, also where the generator is closed early.
    """
    try:
        text.begin()
        while True:
            if (idle := text.idle_hint()) is not None:
                # Nobody would draft: plain steps, without a tree.
                for emitted in plain_steps(text, idle, cancelled):
                    yield emitted
            else:
                # 1. Draft a tree below the last token, as many drafts as the budget allows.
                tree, rows = text.propose()
                # 2. Decode the whole tree at once: one forward pass.
                output = text.cache.decode(rows)
                # 3. Verify it, keep the accepted path's KV entries, and take the bonus token.
                emitted = text.accept(tree, rows, output)
                yield emitted
            if emitted.finish_reason is not None:
                return
    finally:
        text.end()
