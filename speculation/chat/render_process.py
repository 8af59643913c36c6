"""Runs a model's chat template in a child process, with limits on time, memory and output length.

A template is untrusted code that comes with the model. One that loops or doubles a string cannot be
stopped inside this process: a single operation such as ``10**10**10`` holds Python's interpreter
lock, and Jinja evaluates constants at compile time. So templates are compiled and rendered only in
``chat.renderer``, a process that can be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from pathlib import Path
from typing import IO, Any

from batching.errors import InvalidParameter, SpeculationError, UnsupportedModel

SECONDS = 5.0
MEMORY = 1 << 30  # bytes of address space
CHARACTERS = 1_000_000  # plus ten times those in the messages
LARGE = 1 << 18  # bytes

_START_SECONDS = 60.0
_RENDERER = Path(__file__).with_name("renderer.py")


class RenderProcess:
    """The child process. Starts with the first request, and again after a failure.

    Thread-safe; runs one request at a time. Requests of more than LARGE bytes go to ``large``, if
    it is given, so that the others do not wait for them.
    """

    def __init__(self, large: RenderProcess | None = None) -> None:
        self._large = large
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        # Waits for the answers. To start a thread for each takes milliseconds beside a decode.
        self._reader: ThreadPoolExecutor

    def render(self, template: str, variables: Mapping[str, Any], n_given: int) -> str:
        """Render a template.

        ``n_given`` is the number of characters in the messages, which sets the output limit.
        Raises InvalidParameter if the template fails, UnsupportedModel if it exceeds a limit.
        """
        request = {"template": template, "variables": variables}
        text: str = self._ask(request, CHARACTERS + 10 * n_given)["text"]
        return text

    def names(self, template: str) -> frozenset[str]:
        """The names of the variables that a template reads. Raises as ``render`` does."""
        return frozenset(self._ask({"template": template}, CHARACTERS)["names"])

    def close(self) -> None:
        """Kill the process, even while it renders. A later request starts a new one."""
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()  # before taking the lock, which a running request holds
        with self._lock:
            self._stop()
        if self._large is not None:
            self._large.close()

    def _ask(self, request: Mapping[str, Any], characters: int) -> dict[str, Any]:
        limits = {"seconds": SECONDS, "memory": MEMORY, "characters": characters}
        try:
            line = json.dumps({**request, **limits}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise InvalidParameter(str(error)) from error
        asked = self._large if self._large is not None and len(line) > LARGE else self
        with asked._lock:
            process = asked._running()
            answer: dict[str, Any] | None = asked._exchange(process, line, SECONDS)
            if answer is None or "exceeded" in answer:
                asked._stop()
        if answer is None:
            raise _exceeded(f"took longer than {SECONDS:g} s")
        if answer.get("exceeded") == "characters":
            raise _exceeded(f"made more than {characters:,} characters")
        if answer.get("exceeded") == "memory":
            raise _exceeded(f"needed more than {MEMORY >> 20:,} MiB of memory")
        if answer.get("exceeded") == "process":
            raise _exceeded("ended the process that renders it")
        if "error" in answer:
            raise InvalidParameter(answer["error"])
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # after a fork: sharing the pipes would mix up answers
            self._process, self._reader = None, ThreadPoolExecutor(1)
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_RENDERER), *map(str, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        if self._exchange(self._process, b"", _START_SECONDS) != "ready":
            self._stop()
            raise _not_started(f"{sys.executable} could not run {_RENDERER}")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, seconds: float) -> Any:
        """The answer to a line; "exceeded" if the process has died, None after ``seconds``: then
        the process must be stopped."""
        assert process.stdin is not None and process.stdout is not None
        asked = self._reader.submit(_write_and_read, process.stdin, process.stdout, line)
        try:
            return json.loads(asked.result(seconds) or b'{"exceeded": "process"}')
        except Timeout:
            return None
        except BaseException:  # such as Ctrl-C: a late answer would go to the next request
            self._stop()
            raise

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unwritten data cannot be flushed
                pipe.close()


def _write_and_read(stdin: IO[bytes], stdout: IO[bytes], line: bytes) -> bytes:
    """Write a line and read the answer; b"" if the process has died."""
    try:
        stdin.write(line)
        stdin.flush()
    except BrokenPipeError:
        return b""
    answer = stdout.readline()
    return answer if answer.endswith(b"\n") else b""


def _exceeded(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model's chat template {what}; choose another model, or generate from plain text "
        f"without the template"
    )


def _not_started(reason: str) -> SpeculationError:
    return SpeculationError(
        f"the process that renders chat templates did not start: {reason}; check that Python "
        f"runs and that Jinja is installed"
    )


RENDERER = RenderProcess(RenderProcess())
atexit.register(RENDERER.close)
