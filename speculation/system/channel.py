"""Channel: items from one thread to others, to an event loop, or to a listener."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from batching.errors import SpeculationError

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
    """Items in order, for one consumer at a time: ``for``, ``async for`` or ``forward``.

    None ends it; an exception is raised where the items are taken. Whoever comes afterwards gets
    the end, too.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | Exception | None] = SimpleQueue()
        self._lock = threading.Lock()  # held while an item is passed on
        self._listener: Callable[[T | Exception | None], object] | None = None

    def put(self, item: T | Exception | None) -> None:
        with self._lock:
            if self._listener is not None:
                self._listener(item)
            if self._listener is None or _is_end(item):
                self._queue.put(item)

    def forward(self, listener: Callable[[T | Exception | None], object]) -> None:
        """Call ``listener`` with each item, in the thread that puts it; first with those here.

        Raises SpeculationError while another one gets them.
        """
        with self._lock:
            if self._listener is not None and self._queue.empty():
                raise SpeculationError(
                    "its tokens are being read by another reader; use that one's"
                )
            self._listener = listener
            with suppress(Empty):
                while True:
                    item = self._queue.get_nowait()
                    listener(item)
                    if _is_end(item):
                        self._queue.put(item)
                        break

    def __iter__(self) -> Iterator[T]:
        while (item := self.get()) is not None:
            yield item

    def get(self) -> T | None:
        """Wait for the next item; None at the end. Raises an exception that ended it."""
        while True:
            with suppress(Empty):  # on Windows, Ctrl-C does not interrupt a wait without an end
                item = self._queue.get(timeout=1.0)
                if _is_end(item):
                    self._queue.put(item)
                if isinstance(item, Exception):
                    raise item
                return item

    def hand_over(self, take: Callable[[Any], object]) -> None:
        """Call ``take`` with each item in the running event loop."""
        into_loop = _mailbox()
        self.forward(lambda item: into_loop.put(partial(take, item)))

    def __aiter__(self) -> AsyncIterator[T]:
        items: asyncio.Queue[T | Exception | None] = asyncio.Queue()
        self.hand_over(items.put_nowait)
        return self._taken(items)

    async def _taken(self, items: asyncio.Queue[T | Exception | None]) -> AsyncIterator[T]:
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._listener = None


def _is_end(item: object) -> bool:
    return item is None or isinstance(item, Exception)
