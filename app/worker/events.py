"""Events: what a request to the engine leads to, in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from weakref import WeakKeyDictionary, ref

from app.worker.messages import LAST, Event, Failed


class _Mailbox:
    """Calls from other threads into an event loop, which wakes once for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._calls: deque[tuple[Callable[[Event], object], Event]] = deque()
        self._wakes = False

    def put(self, take: Callable[[Event], object], event: Event) -> None:
        self._calls.append((take, event))
        if not self._wakes:
            self._wakes = True
            loop = self._loop()
            with suppress(RuntimeError):  # the loop has ended, and with it the consumer
                if loop is not None:
                    loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._wakes = False  # first: what is put from here on wakes again
        while self._calls:
            take, event = self._calls.popleft()
            take(event)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


class Events:
    """The events of a request, for one consumer: ``for`` or ``hand_over``.

    The last one is one of ``LAST``. Leaving a loop early stops the request, as ``close`` does.
    """

    def __init__(self, on_close: Callable[[], object]) -> None:
        self.close = on_close
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self._pass_on: Callable[[Event], object] = self._queue.put
        self._lock = threading.Lock()  # held while an event is passed on
        self._taken: Iterator[Event] | None = None

    def put(self, event: Event) -> None:
        with self._lock:
            self._pass_on(event)

    def hand_over(self, take: Callable[[Event], object]) -> None:
        """Call ``take`` with each event in the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _mailboxes:
            _mailboxes[loop] = _Mailbox(loop)
        with self._lock:
            self._pass_on = partial(_mailboxes[loop].put, take)
            with suppress(Empty):
                while True:
                    self._pass_on(self._queue.get_nowait())

    def __iter__(self) -> Iterator[Event]:
        try:
            event: Event | None = None
            while not isinstance(event, LAST):
                event = self._queue.get()
                yield event
        finally:
            self.close()

    def __next__(self) -> Event:
        if self._taken is None:
            self._taken = iter(self)
        return next(self._taken)


def failed(message: str, kind: str) -> Events:
    """The events of a request that reaches no engine."""
    events = Events(lambda: None)
    events.put(Failed(message, message, kind))
    return events
