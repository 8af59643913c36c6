"""``RemoteBackend``: the engine in a process of its own, which may die without this one.

llama.cpp can end its process over a file or an input. Waiting requests fail with the reason. A new
process loads the model that worked last: at once, or after a pause if several have died in a row.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any

from app.worker.backend import Backend
from app.worker.events import Events, failed
from app.worker.messages import (
    BEAT_SECONDS,
    LAST,
    Beat,
    Cancel,
    ChatRequest,
    Close,
    Failed,
    LoadedModel,
    ModelSpec,
    Question,
    Report,
    Status,
)
from app.worker.process import COMMAND, started
from app.worker.wire import Outbox, message_of, read
from app.worker.wording import failure
from batching.replacing import replacing
from speculation.system.cache_folder import cache_folder
from speculation.system.console import say

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # that the process has to end by itself
SILENT_SECONDS = 60.0  # without a beat, the engine holds Python's lock and blocks its process
N_READ = 40  # last lines, among which the error is named
N_KEPT, KEPT_BYTES = 200, 100_000  # last lines in the file, and its size
# llama.cpp's last words: where it ended itself, an error, or what C++ says of an exception.
_FATAL = re.compile(r"\.(cpp|cuh?|c|hpp?|m):\d+: |\berror\b|Error: |what\(\):", re.IGNORECASE)
# "ggml-cuda.cu:109: CUDA error" comes after the line that says which.
_UNNAMED = re.compile(r":\d+: (\w+ )?error$")
_FOLDERS = re.compile(r"^\S*/(?=[\w.-]+:\d+: )")  # of a source file
# A stopped or blocked process does not see that its parent has gone.
_GUARDIAN = 'read -r line || kill -9 "$0"'
PAUSES = (0, 10, 30, 60, 120, 300)  # seconds before a start, by the deaths in a row before it
AGAIN = "again"  # the id of a load that nobody asked for


class Process:
    """One engine process and the requests it has not ended yet."""

    def __init__(
        self,
        arguments: list[str],
        lock: threading.RLock,
        on_status: Callable[[Process, Status], None],
        on_death: Callable[[Process, str], str],
    ) -> None:
        """``on_death`` is told why the process ended, unless ``close`` ended it, and returns what
        those hear who waited. It is called with the ``lock``, as ``on_status`` is."""
        self._lock = lock
        self._report = Report()  # as the process published it last
        self._on_status = on_status
        self._on_death = on_death
        self._requests: dict[int, tuple[str, Events]] = {}  # with the id that ``stop`` takes
        self._numbers = count(1)
        self._is_closing = False
        self._n_heard = 0
        self._killed_for = ""
        self._last_words: collections.deque[str] = collections.deque(maxlen=N_KEPT)
        self.is_dead = False
        self._process = started(*COMMAND, *arguments)
        self._guardian = _guardian_of(self._process.pid)
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        self._outbox = Outbox(stdin, on_refused=self._refuse)
        self._pipes: tuple[IO[bytes], ...] = (stdin, stdout, stderr)
        self._reading = threading.Thread(target=self._read, args=(stdout,), daemon=True)
        self._hearing = threading.Thread(target=self._hear, args=(stderr,), daemon=True)
        for thread in (self._reading, self._hearing):
            thread.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def ask(self, message: Any, request_id: str = "") -> Events | None:
        """The events of a request; None if the process has died."""
        number = next(self._numbers)
        events = Events(lambda: self._cancel(number))
        with self._lock:
            if self.is_dead:
                return None
            self._requests[number] = request_id, events
            self._outbox.put(number, message)
        return events

    def report(self) -> Report:
        """As the process published it last, without requests whose end has come since."""
        with self._lock:
            asked = {id_ for id_, _ in self._requests.values()}
        running = tuple(id_ for id_ in self._report.running if id_ in asked)
        return replace(self._report, running=running)

    def _refuse(self, number: int, error: Exception) -> None:
        """A request cannot be sent."""
        with self._lock:
            found = self._requests.pop(number, None)
        if found is not None:
            message = f"the request cannot be sent to the engine: {error}"
            is_odd = isinstance(error, TypeError)
            found[1].put(Failed(message, message, "invalid") if is_odd else failure(error))

    def stop(self, request_id: str) -> None:
        with self._lock:
            found = [number for number, (id_, _) in self._requests.items() if id_ == request_id]
        for number in found:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if number in self._requests:
            self._outbox.put(number, Cancel())

    def close(self) -> bool:
        """Let it end; return whether it did within some seconds. It is killed if not."""
        self._is_closing = True
        if not self._n_heard:  # it still starts, and has nothing to lose
            self.kill("")
            return True
        self._outbox.put(0, Close())
        self._reading.join(CLOSE_SECONDS)
        # It may also die, for example because an RPC worker has gone.
        has_ended = not self._reading.is_alive() and self._process.returncode <= 0
        self.kill("")
        return has_ended

    def kill(self, why: str) -> None:
        self._killed_for = why
        self._process.kill()
        self._process.wait()

    def _read(self, pipe: IO[bytes]) -> None:
        while found_message := read(pipe):
            self._n_heard += 1
            number, kind, body = found_message
            message = message_of(kind, body)
            if number:
                with self._lock:
                    found = self._requests.get(number)
                    if isinstance(message, LAST):
                        self._requests.pop(number, None)
                if found is not None:
                    found[1].put(message)
            elif isinstance(message, Report):
                self._report = message
            elif isinstance(message, Status):
                with self._lock:
                    self._on_status(self, message)
            elif isinstance(message, Beat) and message.overdue:
                self.kill(f"it took too long over {message.overdue}")
        self._died()

    def _died(self) -> None:
        code = self._process.wait()
        if self._guardian is not None:
            self._guardian.communicate(b"\n")
        self._hearing.join(1.0)
        words = list(self._last_words)
        why = self._killed_for or _reason(code, words)
        message = f"The engine's process ended: {why}."
        file = None if self._is_closing or not words else _keep(message, words)
        if file is not None:
            message = f"{message} Its last lines are in {file}."
        with self._lock:
            self.is_dead = True
            if not self._is_closing:
                message = self._on_death(self, message)
                log.error("%s", message)
            left = list(self._requests.values())
            self._requests.clear()
            self._report = Report()
        self._outbox.close()
        for _, events in left:
            events.put(Failed(message, message, "no model"))  # clients try again
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # unwritten data cannot be flushed
                pipe.close()

    def _hear(self, pipe: IO[bytes]) -> None:
        """Pass on what the process prints, and keep the end of it: its last words."""
        for line in pipe:
            text = line.decode("utf-8", "replace")
            self._last_words.append(text.rstrip())
            say(text, end="")

    def _watch(self) -> None:
        seconds = 0.0  # by beats: a clock goes on while both processes are stopped
        while not self.is_dead:
            n_heard = self._n_heard
            time.sleep(BEAT_SECONDS)
            seconds = seconds + BEAT_SECONDS if self._n_heard == n_heard else 0.0
            if seconds >= SILENT_SECONDS and self._process.poll() is None:
                self.kill(f"it did not answer for {SILENT_SECONDS:g} s")


def _guardian_of(pid: int) -> subprocess.Popen[bytes] | None:
    """A process that kills process ``pid`` when this one has gone, but ends at a line from it."""
    if sys.platform == "win32":
        return None
    with contextlib.suppress(OSError):  # a container may have no shell
        return subprocess.Popen(
            ["sh", "-c", _GUARDIAN, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it
        )
    return None


class RemoteBackend(Backend):
    """A backend whose engine runs in a process of its own."""

    def __init__(
        self,
        *,
        trace_batches: str | Path | None = None,
        memory: str | Path | None = None,
        common_memory: str | None = "",
        method_file: str = "",
    ) -> None:
        """The first two arguments are as for ``Serving``. ``common_memory`` is the memory of
        requests that name none of their own, as in ``ChatRequest``. ``method_file`` is a method as
        in ``load_method_file``: the engine's process runs its file, too."""
        self._arguments = [str(trace_batches or ""), str(memory or ""), method_file]
        self._common_memory = common_memory
        self._lock = threading.RLock()  # for all below, and in the processes
        self._status = Status()
        self._worked: LoadedModel | None = None  # the last model that did
        self._wanted: ModelSpec | None = None  # asked for, and neither loaded nor refused yet
        self._n_deaths = 0  # since the last load that succeeded
        self._timer = threading.Timer(0, self._restart)
        self._is_closed = False
        with self._lock:
            self._process = self._started()

    def status(self) -> Status:
        return self._status

    def report(self) -> Report:
        return self._process.report()

    def load(self, spec: ModelSpec, request_id: str = "") -> Events:
        with self._lock:
            if self._process.is_dead and not self._is_closed:
                self._process = self._started()
                if self._worked is not None and self._n_deaths < 2:
                    self._process.ask(self._worked.spec)  # it goes on until the new one is there
            elif self._worked is None:
                self._process.stop(AGAIN)  # it may end the process again
            self._n_deaths, self._wanted = 0, spec
            return self._asked(spec, request_id)

    def reply(self, request: ChatRequest) -> Events:
        if request.memory == "":
            request = replace(request, memory=self._common_memory)
        return self._asked(request, request.id)

    def ask(self, question: Question) -> Events:
        return self._asked(question)

    def stop(self, request_id: str) -> None:
        self._process.stop(request_id)

    def close(self) -> bool:
        """Stop everything and end the process; return whether it ended by itself. Idempotent."""
        with self._lock:
            if self._is_closed:
                return True
            self._is_closed = True
            self._timer.cancel()
        # Without the lock, for which the process's own threads may wait.
        return self._process.is_dead or self._process.close()

    def _asked(self, message: ModelSpec | ChatRequest | Question, request_id: str = "") -> Events:
        with self._lock:
            events = self._process.ask(message, request_id)
            return events or failed(self._status.error or "the engine is closed", "no model")

    def _started(self) -> Process:
        return Process(self._arguments, self._lock, self._take_status, self._take_death)

    def _restart(self) -> None:
        """Load the model that worked last, or the first one again: in a new process if the old one
        has ended."""
        with self._lock:
            if self._is_closed or not self._n_deaths:  # a load has come before the timer
                return
            try:
                if self._process.is_dead:
                    self._process = self._started()
            except OSError as error:  # such as too many open files
                log.error("the engine's process does not start: %s", error)
                self._n_deaths += 1
                self._restart_later()
                return
            spec = self._wanted if self._worked is None else self._worked.spec
            if spec is not None:
                self._process.ask(spec, AGAIN)

    @property
    def _pause(self) -> float:
        """Seconds from a failure to the next start."""
        return PAUSES[min(self._n_deaths, len(PAUSES)) - 1]

    def _restart_later(self) -> None:
        """After a failure: at once, or after a pause."""
        self._timer.cancel()
        if not self._pause:
            self._restart()
            return
        self._timer = threading.Timer(self._pause, self._restart)
        self._timer.daemon = True
        self._timer.start()

    def _take_status(self, process: Process, status: Status) -> None:
        if process is not self._process:
            return
        is_down = self._status.is_down
        if status.model is not None:
            self._n_deaths, self._worked = 0, status.model
            if status.error is not None or status.model.spec == self._wanted:
                self._wanted = None
            self._status = status
            return
        has_failed = status.error is not None and self._status.error != status.error
        if status.error is not None:
            is_down, self._wanted = False, None
        model = self._worked if is_down else None
        self._status = replace(status, model=model, is_down=is_down)
        if has_failed and self._worked is not None:
            self._n_deaths += 1
            self._restart_later()

    def _take_death(self, process: Process, message: str) -> str:
        """Plan the next start after a death; returns what those hear who waited."""
        if process is not self._process or self._is_closed:
            return message
        worked, wanted = self._worked, self._wanted
        if worked is not None and wanted is not None:
            # It was the new model, or a request while it was on its way. The old one is no suspect.
            self._n_deaths, self._wanted = 0, None
        self._n_deaths += 1
        spec = wanted if worked is None else worked.spec
        if spec is not None:
            when = f"in {self._pause:g} s" if self._pause else "now"
            message = f"{message} {spec.model} is loaded again {when}."
        failed = wanted.model if wanted is not None else ""
        self._status = Status(worked, error=message, is_down=worked is not None, failed=failed)
        self._restart_later()
        return message


def _reason(code: int, words: Sequence[str]) -> str:
    """Why a process ended, by its exit code and what it printed last."""
    fatal = _fatal(words[-N_READ:])
    said = f" ({re.sub(_FOLDERS, '', fatal)[:200]})" if fatal else ""
    if code < 0:
        try:
            return f"{signal.Signals(-code).name}{said}"
        except ValueError:
            return f"signal {-code}{said}"
    return f"exit code {code}{said}"


def _fatal(words: Sequence[str]) -> str:
    """The last line that names an error, else the last that tells where it was; or empty."""
    fatal = [line for line in words if _FATAL.search(line)]
    named = [line for line in fatal if not _UNNAMED.search(line)]
    return (named or fatal or [""])[-1].strip()


def _keep(message: str, words: Sequence[str]) -> Path | None:
    """Add what a process printed last to a file for the user alone; None if there can be none.

    The file keeps the last ``KEPT_BYTES``.
    """
    path = cache_folder() / "engine.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        text = "\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), message, *words, "", ""])
        with replacing(path, private=True, sync=False) as file:
            file.write((before + text.encode("utf-8", "replace"))[-KEPT_BYTES:])
    except OSError:
        return None
    return path
