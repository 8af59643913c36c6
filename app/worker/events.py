"""Events: what a request to the engine leads to, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from app.worker.messages import LAST, Event, Failed
from speculation.system.channel import Channel


class Events(Channel[Event]):
    """The events of a request, for one consumer: ``for`` or ``hand_over``.

    The last one is one of ``LAST``. Leaving a loop early stops the request, as ``close`` does.
    """

    def __init__(self, on_close: Callable[[], object]) -> None:
        super().__init__()
        self.close = on_close
        self._iterator: Iterator[Event] | None = None

    def __iter__(self) -> Iterator[Event]:
        try:
            for event in super().__iter__():
                yield event
                if isinstance(event, LAST):
                    return
        finally:
            self.close()

    def __next__(self) -> Event:
        self._iterator = self._iterator or iter(self)
        return next(self._iterator)


def failed(message: str, kind: str) -> Events:
    """The events of a request that reaches no engine."""
    events = Events(lambda: None)
    events.put(Failed(message, message, kind))
    return events
