"""The engine's process: runs a ``LocalBackend`` for the process that started it.

Reads calls from stdin and writes events to what was stdout. Ends with the process that started it,
whatever the engine does then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

from app.worker.backend import LocalBackend
from app.worker.events import Events
from app.worker.frames import Outbox, received
from app.worker.jobs import failure
from app.worker.remote import BEAT_SECONDS, Beat, Call, Closed, StatusChanged, Stop
from batching.watched import overdue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and tells this one
        signal.signal(number, signal.SIG_IGN)
    # What prints to stdout, llama.cpp included, must not come between the messages.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    outbox = Outbox(pipe, lambda: os._exit(0))
    trace, memory = (argument or None for argument in sys.argv[1:3])
    backend = LocalBackend(
        trace_batches=trace,
        memory=memory,
        on_status=lambda status: outbox.put(StatusChanged(status)),
    )
    threading.Thread(target=_beat, args=(outbox,), daemon=True).start()
    open_events: dict[int, Events] = {}

    def pass_on(number: int, event: Any) -> None:
        outbox.put((number, event))
        if event is None:
            open_events.pop(number, None)

    for item in received(sys.stdin.buffer):
        if isinstance(item, Call):
            try:
                events: Events = getattr(backend, item.name)(*item.arguments)
            except Exception as error:  # arguments of other types
                pass_on(item.number, failure(error))
                pass_on(item.number, None)
                continue
            open_events[item.number] = events
            events.forward(partial(pass_on, item.number))
        elif isinstance(item, Stop):
            if item.number is not None:
                found = open_events.get(item.number)
                if found is not None:
                    found.close()
            else:
                backend.stop(item.request_id)
        elif isinstance(item, Closed):
            has_ended = backend.close()
            outbox.put(Closed(has_ended))
            outbox.close(1.0)
            os._exit(0 if has_ended else 1)
    os._exit(0)  # the parent has gone


def _beat(outbox: Outbox) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        outbox.put(Beat(overdue(BEAT_SECONDS)))


if __name__ == "__main__":
    main()
