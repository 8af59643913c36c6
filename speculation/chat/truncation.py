"""Conversations that outgrow the context: how many of their first turns the model no longer reads.

What is left out stays so while the rest fits, and so much goes at once that the rest has room to
grow: the cache reuses only a common prefix, so each new beginning is read as a whole. Pure: prompts
are counted by whoever asks.
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
    """How many of the first turns are to be left out, so that ``room`` tokens are left for a reply.

    ``count`` gives the tokens of a prompt (``Engine.count_tokens``), ``left_out`` the turns that
    were left out last time. They stay so as long as the prompt fits and takes more than half of
    ``n_ctx``. Else it is decided anew: none where all fits, or as few as leave a prompt of at most
    half of the context, or, where the last turn alone takes more, a prompt that fits. The last turn
    is never left out, whether or not it fits.
    """
    most = len(_starts(messages)) - 1
    left_out = min(left_out, most)

    @cache
    def takes(n: int) -> int:
        return count(without_turns(messages, n))

    half, limit = n_ctx // 2, n_ctx - room
    fits = takes(left_out) <= limit
    if fits and (left_out == 0 or takes(left_out) > half):
        return left_out
    if takes(most) > half:
        return _fewest(takes, most, limit)
    n = _fewest(takes, left_out if fits else most, min(half, limit))
    return 0 if fits and _outgrown(takes, n, limit, most + 1 - n) is None else n


def room_for_reply(n_ctx: int, max_tokens: int | None) -> int:
    """How many tokens to keep free for a reply: all it may have, but at most a quarter of the
    context."""
    quarter = n_ctx // 4
    return quarter if max_tokens is None else min(max_tokens, quarter)


def without_turns(messages: Sequence[Message], n: int) -> list[Message]:
    """The messages without the first ``n`` turns.

    A turn is a message of the user and what follows up to the next; system messages at the head
    belong to none and stay.
    """
    starts = _starts(messages)
    return [*messages[: starts[0]], *messages[starts[n] :]] if n else list(messages)


def _starts(messages: Sequence[Message]) -> list[int]:
    """Where the turns begin; a greeting of the assistant before them is one as well."""
    roles = [message.get("role") for message in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), 0)
    return [first, *(i for i, role in enumerate(roles) if role == "user" and i > first)]


def _fewest(takes: Callable[[int], int], most: int, limit: int) -> int:
    """The least ``n`` up to ``most`` for which ``takes(n)``, which falls, is within the limit;
    ``most`` where none is."""
    beyond = _outgrown(takes, most, limit, 1)
    if beyond is None:
        return 0
    return bisect_left(range(most), True, lo=beyond + 1, key=lambda n: takes(n) <= limit)


def _outgrown(takes: Callable[[int], int], n: int, limit: int, step: int) -> int | None:
    """A lesser ``n`` for which the prompt is beyond the limit, or None where none is.

    Found in growing steps, so that no prompt far beyond it is counted.
    """
    while n:
        n, step = max(0, n - step), 2 * step
        if takes(n) > limit:
            return n
    return None
