"""Events: what a request to the engine leads to, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from app.worker.messages import Event
from speculation.system.channel import Channel


class Events(Channel[Event]):
    """The events of a request, to be taken by ``for``, ``async for`` or ``forward``.

    Leaving a loop early stops the request, as ``close`` does.
    """

    def __init__(self, on_close: Callable[[], object]) -> None:
        super().__init__()
        self.on_close = on_close
        self._taken: Iterator[Event] | None = None

    def close(self) -> None:
        """Stop the request. Does nothing if it has ended."""
        self.on_close()

    def __iter__(self) -> Iterator[Event]:
        try:
            yield from super().__iter__()
        finally:
            self.close()

    def __next__(self) -> Event:
        if self._taken is None:
            self._taken = iter(self)
        return next(self._taken)

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for event in super().__aiter__():
                yield event
        finally:
            self.close()
