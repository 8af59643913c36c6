"""The written form of the messages between the server and the engine's process.

A message is a head and a body. The head has the length of the body, the number of the message's
kind in ``KINDS``, and that of its request (0 = it belongs to none). The body has the fields of the
kind's dataclass in MessagePack.

``messages`` says what each of them asks for or tells: to the engine's process go a ``ModelSpec``, a
``ChatRequest``, a ``Question``, ``Cancel`` and ``Close``; from it come events, ``Status``,
``Report`` and ``Beat``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from queue import SimpleQueue
from struct import Struct
from typing import IO, Any, get_args

import msgspec

from app.worker import messages as m

_TO_ENGINE = (m.ModelSpec, m.ChatRequest, *get_args(m.Question), m.Cancel, m.Close)
KINDS: tuple[type[Any], ...] = (*_TO_ENGINE, *get_args(m.Event), m.Status, m.Report, m.Beat)
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_HEAD = Struct(">IBI")


def written(number: int, message: Any) -> bytes:
    """A message's head and body.

    Raises TypeError for a field that has no written form, RecursionError if one is nested too
    deep, UnicodeEncodeError if one has half a character.
    """
    if type(message) not in KINDS:
        raise TypeError(f"{type(message).__name__} is no message")
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body), KINDS.index(type(message)), number) + body


def read(pipe: IO[bytes]) -> tuple[int, type[Any], bytes] | None:
    """The next message's number, kind and body; None if the pipe ends before it does."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    n_bytes, kind, number = _HEAD.unpack(head)
    body = pipe.read(n_bytes)
    return (number, KINDS[kind], body) if len(body) == n_bytes else None


def message_of(kind: type[Any], body: bytes) -> Any:
    """The message of this kind. Raises RecursionError."""
    return _DECODERS[KINDS.index(kind)].decode(body)


def naming(*fields: str) -> re.Pattern[bytes]:
    """Finds these fields in a body, also in a schema that is a text."""
    names = [re.escape(msgspec.msgpack.encode(name)) for name in fields]
    in_text = rf'"(?:{"|".join(map(re.escape, fields))})\\*":'
    return re.compile(b"|".join([*names, in_text.encode()]))


class Outbox:
    """Messages on their way into a pipe. A thread writes them, so a full pipe holds up nobody else:
    not an event loop with a large request, and not the engine when the server is stopped."""

    def __init__(
        self,
        pipe: IO[bytes],
        on_broken: Callable[[], object] = lambda: None,
        on_refused: Callable[[int, Exception], object] = lambda number, error: None,
    ) -> None:
        """``on_broken`` is called when nobody reads any more, ``on_refused`` with the number of a
        message that cannot be written, and what ``written`` raises."""
        self._messages: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._pipe, self._on_broken, self._on_refused = pipe, on_broken, on_refused
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def put(self, number: int, message: Any) -> None:
        self._messages.put((number, message))

    def close(self, seconds: float = 0.0) -> None:
        """Send no more; wait so long at most until all is written."""
        self._messages.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        for number, message in iter(self._messages.get, None):
            try:
                frame = written(number, message)
            except (TypeError, RecursionError, UnicodeEncodeError) as error:
                self._on_refused(number, error)
                continue
            try:
                self._pipe.write(frame)
                self._pipe.flush()
            except (OSError, ValueError):  # closed at either end
                self._on_broken()
                return
