"""Messages between this process and the engine's: pickled items, one after another.

The engine's process is a child that runs this program, so its pickles are trusted.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import IO, Any


class Outbox:
    """Sends items from any thread, in order; those that have gathered go together."""

    def __init__(self, pipe: IO[bytes], on_failure: Callable[[], object]) -> None:
        """``on_failure`` is called if nobody reads them any more."""
        self._items: SimpleQueue[bytes | None] = SimpleQueue()
        self._pipe = pipe
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Send an item. Raises whatever ``pickle`` raises for it."""
        self._items.put(pickle.dumps(item))

    def close(self, seconds: float) -> None:
        """Send what is left, within ``seconds``."""
        self._items.put(None)
        self._thread.join(seconds)

    def _send(self) -> None:
        try:
            while True:
                items = [self._items.get()]
                try:
                    while True:
                        items.append(self._items.get_nowait())
                except Empty:
                    pass
                self._pipe.write(b"".join(item for item in items if item is not None))
                self._pipe.flush()
                if None in items:
                    return
        except (OSError, ValueError):  # closed at either end
            self._on_failure()


def received(pipe: IO[bytes]) -> Iterator[Any]:
    """The items that arrive, until the other side ends."""
    while True:
        try:
            item = pickle.load(pipe)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return
        yield item
