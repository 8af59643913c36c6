"""Channel: items from one thread to others, to an event loop, or to a listener."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


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
        while (item := self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def __aiter__(self) -> AsyncIterator[T]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[T | Exception | None] = asyncio.Queue()

        def hand_over(item: T | Exception | None) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it the consumer
                loop.call_soon_threadsafe(items.put_nowait, item)

        self.forward(hand_over)
        while (item := await items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
