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
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from app.worker.loading import Task
from app.worker.messages import (
    BEAT_SECONDS,
    Beat,
    Cancel,
    ChatRequest,
    Close,
    Closed,
    ModelSpec,
)
from app.worker.serving import Serving
from app.worker.wire import head, read, written
from app.worker.wording import failure
from batching.watched import overdue
from speculation.methods import load_method_file

REPORT_SECONDS = 0.1  # between two reports

Send = Callable[[int, Any], None]


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and tells this one
        signal.signal(each, signal.SIG_IGN)
    # What prints to stdout, llama.cpp included, must not come between the messages.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    send = _sender(pipe)
    trace, memory, method_file = sys.argv[1:4]
    load_method_file(method_file)
    has_changed = threading.Event()
    serving = Serving(
        trace_batches=trace or None,
        memory=memory or None,
        on_status=partial(send, 0),
        on_change=has_changed.set,
    )
    threading.Thread(target=_beat, args=(send,), daemon=True).start()
    threading.Thread(target=_report, args=(send, serving, has_changed), daemon=True).start()
    tasks: dict[int, Task] = {}
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            break
        kind, number, text = head(line)
        try:
            message = read(kind, text)
        except RecursionError as error:
            send(number, failure(error))
            continue
        if isinstance(message, Cancel):
            if number in tasks:
                serving.cancel(tasks[number])
        elif isinstance(message, Close):
            has_ended = serving.close()
            send(0, Closed(has_ended))
            os._exit(0 if has_ended else 1)
        else:
            tasks = {key: task for key, task in tasks.items() if not task.has_ended}
            tasks[number] = _started(serving, message, partial(send, number))
    os._exit(0)  # the parent has gone


def _started(serving: Serving, message: Any, pass_on: Callable[[Any], None]) -> Task:
    if isinstance(message, ModelSpec):
        return serving.load(message, pass_on)
    if isinstance(message, ChatRequest):
        return serving.reply(message, pass_on)
    return serving.ask(message, pass_on)


def _sender(pipe: IO[bytes]) -> Send:
    """A function that writes a message to ``pipe``, from any thread.

    The engine's thread writes, too: to hand each token to another thread takes longer.
    """
    lock = threading.Lock()

    def send(number: int, message: Any) -> None:
        line = written(number, message)
        try:
            with lock:
                pipe.write(line)
                pipe.flush()
        except OSError:  # the parent has gone
            os._exit(0)

    return send


def _beat(send: Send) -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        send(0, Beat(overdue(BEAT_SECONDS)))


def _report(send: Send, serving: Serving, has_changed: threading.Event) -> None:
    while True:
        has_changed.wait()
        has_changed.clear()
        send(0, serving.report())
        time.sleep(REPORT_SECONDS)


if __name__ == "__main__":
    main()
