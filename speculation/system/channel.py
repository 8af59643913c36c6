"""Channel: items from one thread to others, to an event loop, or to a listener."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")


class _Mailbox:
    """Calls from other threads into an event loop, which wakes once for all that come together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._calls: deque[Callable[[], object]] = deque()
        self._wakes = False

    def put(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        if not self._wakes:
            self._wakes = True
            loop = self._loop()
            with suppress(RuntimeError):  # the loop has ended, and with it the consumer
                if loop is not None:
                    loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._wakes = False  # first: what is put from here on wakes again
        while self._calls:
            self._calls.popleft()()


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


def _mailbox() -> _Mailbox:
    """That of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _mailboxes:
        _mailboxes[loop] = _Mailbox(loop)
    return _mailboxes[loop]


class Channel(Generic[T]):
    """Items in order, for one consumer: ``for``, ``async for`` or ``forward``.

    None ends it; an exception is raised where the items are taken.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | Exception | None] = SimpleQueue()
        self._lock = threading.Lock()  # held while an item is passed on
        self._pass_on: Callable[[T | Exception | None], object] = self._queue.put

    def put(self, item: T | Exception | None) -> None:
        with self._lock:
            self._pass_on(item)

    def forward(self, listener: Callable[[T | Exception | None], object]) -> None:
        """Call ``listener`` with each item, in the thread that puts it; first with those here."""
        with self._lock:
            self._pass_on = listener
            with suppress(Empty):
                while True:
                    listener(self._queue.get_nowait())

    def __iter__(self) -> Iterator[T]:
        while (item := self._get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def _get(self) -> T | Exception | None:
        while True:
            with suppress(Empty):  # on Windows, Ctrl-C does not interrupt a wait without an end
                return self._queue.get(timeout=1.0)

    def hand_over(self, take: Callable[[T | Exception | None], object]) -> None:
        """Call ``take`` with each item in the running event loop."""
        into_loop = _mailbox()
        self.forward(lambda item: into_loop.put(partial(take, item)))

    async def __aiter__(self) -> AsyncIterator[T]:
        items: asyncio.Queue[T | Exception | None] = asyncio.Queue()
        self.hand_over(items.put_nowait)
        while (item := await items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
