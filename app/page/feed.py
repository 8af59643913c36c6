"""The stream of events to the page: kept for a while, so that whoever comes back misses none.

Knows nothing of what the events say. All of it runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from app.api.answers import PING, dumps, encoded

PING_SECONDS = 15.0
MOST_BYTES = 4 * 2**20  # of the events that are kept


@dataclass(frozen=True)
class Sent:
    """An event as it is sent. ``owner`` None: it is for everybody."""

    id: int
    owner: str | None
    text: bytes


class Feed:
    """The events of all owners, in the order of their ids.

    ``seq`` is the last one's id. It grows over restarts of the server, too: it starts at the time.
    """

    def __init__(self) -> None:
        self.seq = int(time.time() * 1000)
        self._dropped = self.seq  # the last event that is not kept any more
        self._kept: deque[Sent] = deque()
        self._n_bytes = 0
        self._news = asyncio.Event()

    def publish(self, owner: str | None, kind: str, data: object) -> None:
        self.seq += 1
        text = encoded(f"id: {self.seq}\nevent: {kind}\ndata: {dumps(data)}\n\n")
        self._kept.append(Sent(self.seq, owner, text))
        self._n_bytes += len(text)
        while self._n_bytes > MOST_BYTES:
            oldest = self._kept.popleft()
            self._n_bytes -= len(oldest.text)
            self._dropped = oldest.id
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def events(
        self, owner: str, after: int | None, quiet: float = PING_SECONDS
    ) -> AsyncIterator[bytes]:
        """This owner's events after one of them; None: the new ones. A ping when none comes for
        ``quiet`` seconds.

        A reader may be as slow as it likes: nothing is kept for it. What it missed is a ``reset``.
        """
        last, now = self.seq if after is None else after, asyncio.get_running_loop().time
        yield b": open\n\n"
        said = now()
        while True:
            if not self._dropped <= last <= self.seq:
                last = self.seq
                yield f"id: {last}\nevent: reset\ndata: {{}}\n\n".encode()
            while (found := self._next(last)) is not None:
                last = found.id
                if found.owner is None or found.owner == owner:
                    yield found.text
                    said = now()
                if last < self._dropped:
                    break
            else:
                waiting = asyncio.ensure_future(self._news.wait())
                try:
                    is_quiet = not (await asyncio.wait([waiting], timeout=said + quiet - now()))[0]
                finally:
                    waiting.cancel()
                if is_quiet:
                    yield PING
                    said = now()

    def _next(self, last: int) -> Sent | None:
        """The first event that is kept and comes after ``last``. Ids have no gaps."""
        at = last - self._dropped
        return self._kept[at] if at < len(self._kept) else None
