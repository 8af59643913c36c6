"""The engine's process: runs a ``Serving`` for the process that started it.

Reads messages from stdin and writes messages to what was stdout, as ``wire`` has them. Ends with
the process that started it, whatever the engine does then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from app.worker.messages import BEAT_SECONDS, Beat, Cancel, Close
from app.worker.serving import Serving
from app.worker.wire import Outbox, message_of, read
from app.worker.wording import failure
from batching.watched import overdue
from speculation.methods import load_method_file
from speculation.sandbox import SANDBOX

REPORT_SECONDS = 0.1  # between two reports
# After how long a thread lets others run Python. Back from a decode, the engine's waits so long for
# one that prepares a request; Python's 5 ms are as much as a decode on a GPU.
SWITCH_SECONDS = 0.0005


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and tells this one
        signal.signal(each, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    # What prints to stdout, llama.cpp included, must not come between the messages.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    outbox = Outbox(
        pipe,
        on_broken=lambda: os._exit(0),  # the parent has gone
        on_refused=lambda number, error: outbox.put(number, failure(error)),
    )
    threading.Thread(target=SANDBOX.names, args=("",), daemon=True).start()  # so its process starts
    trace, memory, method_file = sys.argv[1:4]
    load_method_file(method_file)
    has_changed = threading.Event()
    serving = Serving(
        outbox.put, trace_batches=trace or None, memory=memory or None, on_change=has_changed.set
    )
    threading.Thread(target=_beat, args=(outbox,), daemon=True).start()
    threading.Thread(target=_report, args=(outbox, serving, has_changed), daemon=True).start()
    while found := read(sys.stdin.buffer):
        number, kind, body = found
        try:
            message = message_of(kind, body)
        except RecursionError as error:
            outbox.put(number, failure(error))
            continue
        if isinstance(message, Cancel):
            serving.cancel(number)
        elif isinstance(message, Close):
            has_ended = serving.close()
            outbox.close(1.0)
            os._exit(0 if has_ended else 1)
        else:
            serving.take_in(number, message, body)
    os._exit(0)  # the parent has gone


def _beat(outbox: Outbox) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        outbox.put(0, Beat(overdue(BEAT_SECONDS)))


def _report(outbox: Outbox, serving: Serving, has_changed: threading.Event) -> None:
    while True:
        has_changed.wait()
        has_changed.clear()
        outbox.put(0, serving.report())
        time.sleep(REPORT_SECONDS)


if __name__ == "__main__":
    main()
