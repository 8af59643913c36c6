"""Outbox: writes to the engine's process without making its callers wait."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import IO


class Outbox:
    """Writes lines from any thread to a pipe, in order; those that have gathered go together."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._pipe = pipe
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def put(self, line: bytes) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """End, after what was put before."""
        self._lines.put(None)

    def _send(self) -> None:
        try:
            while True:
                lines = [self._lines.get()]
                try:
                    while True:
                        lines.append(self._lines.get_nowait())
                except Empty:
                    pass
                self._pipe.write(b"".join(line for line in lines if line is not None))
                self._pipe.flush()
                if None in lines:
                    return
        except (OSError, ValueError):  # closed at either end
            pass
