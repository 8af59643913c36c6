"""Truncates conversations that outgrow the context: how many of the first turns to leave out.

The KV cache reuses only a common prefix, so every change of the first turn costs a full prefill.
Therefore turns once left out stay out while the rest fits, and enough are left out at a time that
the rest can grow. Pure: callers count the tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from speculation.chat.template import Message


def turns_to_leave_out(
    messages: Sequence[Message],
    count: Callable[[Sequence[Message]], int],
    n_ctx: int,
    room: int,
    left_out: int = 0,
) -> int:
    """How many of the first turns to leave out, so that ``room`` tokens remain for a reply.

    ``count`` counts a prompt's tokens (``Engine.count_tokens``); ``left_out`` is the previous
    result. It is kept while the prompt fits and takes more than half of ``n_ctx``. Otherwise the
    result is 0 if everything fits, else the fewest turns that leave a prompt of at most half the
    context, or, if the last turn alone takes more, one that fits. The last turn always stays,
    whether or not it fits.
    """
    n_max = len(_starts(messages)) - 1
    left_out = min(left_out, n_max)

    @cache
    def n_tokens(n: int) -> int:
        return count(without_turns(messages, n))

    half, limit = n_ctx // 2, n_ctx - room
    fits = n_tokens(left_out) <= limit
    if fits and (left_out == 0 or n_tokens(left_out) > half):
        return left_out
    if n_tokens(n_max) > half:
        return _fewest(n_tokens, n_max, limit)
    n = _fewest(n_tokens, left_out if fits else n_max, min(half, limit))
    return 0 if fits and _exceeding(n_tokens, n, limit, n_max + 1 - n) is None else n


def room_for_reply(n_ctx: int, max_tokens: int | None) -> int:
    """Tokens to keep free for a reply: ``max_tokens``, but at most a quarter of the context."""
    quarter = n_ctx // 4
    return quarter if max_tokens is None else min(max_tokens, quarter)


def without_turns(messages: Sequence[Message], n: int) -> list[Message]:
    """The messages without the first ``n`` turns.

    A turn is a user message and everything up to the next one. System messages at the start belong
    to no turn and stay.
    """
    starts = _starts(messages)
    return [*messages[: starts[0]], *messages[starts[n] :]] if n else list(messages)


def _starts(messages: Sequence[Message]) -> list[int]:
    """Indices where turns start. A greeting by the assistant before them counts as a turn."""
    roles = [message.get("role") for message in messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    return [first, *(i for i, role in enumerate(roles) if role == "user" and i > first)]


def _fewest(n_tokens: Callable[[int], int], n_max: int, limit: int) -> int:
    """The smallest ``n`` up to ``n_max`` with ``n_tokens(n)``, which decreases, within the limit;
    ``n_max`` if there is none."""
    beyond = _exceeding(n_tokens, n_max, limit, 1)
    if beyond is None:
        return 0
    return bisect_left(range(n_max), True, lo=beyond + 1, key=lambda n: n_tokens(n) <= limit)


def _exceeding(n_tokens: Callable[[int], int], n: int, limit: int, step: int) -> int | None:
    """A smaller ``n`` whose prompt exceeds the limit, or None.

    Searches in growing steps, so that prompts far beyond the limit need not be counted.
    """
    while n:
        n, step = max(0, n - step), 2 * step
        if n_tokens(n) > limit:
            return n
    return None
