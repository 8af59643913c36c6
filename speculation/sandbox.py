"""Runs what comes from outside in child processes, with limits on time, memory and length.

A chat template is code that comes with the model; a grammar, a schema or a regular expression
comes with a request. A single operation of theirs, such as ``10**10**10`` or the intersection of
twenty patterns, cannot be stopped inside this process, and deep nesting overflows its stack. So
templates are rendered, and grammars tried before they are used, in ``sandbox_process``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Timeout
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from batching.errors import GrammarError, InvalidParameter, SpeculationError, UnsupportedModel
from batching.watched import checkpoint

SECONDS = 5.0  # of a processor, for a template
GRAMMAR_SECONDS = 2.0  # … and for all that one request asks of grammars
MOST_GRAMMAR = 1 << 22  # characters
MEMORY = 1 << 30  # bytes of address space
CHARACTERS = 1_000_000  # plus ten times those in the messages
MOST_IDLE = 2  # processes that wait for the next request

_WAIT = 5  # times as long on a busy machine
_START_SECONDS = 60.0
_PROCESS = Path(__file__).with_name("sandbox_process.py")


class _Time(threading.local):
    """What is left of the time for grammars that a thread shares out; None if it does not."""

    left: float | None = None


_time = _Time()


@contextlib.contextmanager
def one_limit() -> Iterator[None]:
    """All grammars that this thread tries inside share GRAMMAR_SECONDS."""
    before = _time.left
    _time.left = GRAMMAR_SECONDS if before is None else before
    try:
        yield
    finally:
        _time.left = before if before is None else _time.left


class Sandbox:
    """The child processes. They start when they are needed, and again after a failure.

    Thread-safe. Each runs one request at a time, so none waits for another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()
        self._owner = os.getpid()

    def render(self, template: str, variables: Mapping[str, Any], n_given: int) -> str:
        """Render a template.

        ``n_given`` is the number of characters in the messages, which sets the output limit.
        Raises InvalidParameter if the template fails, UnsupportedModel if it exceeds a limit.
        """
        request = {"template": template, "variables": variables}
        text: str = self._ask(request, SECONDS, _template_exceeded, CHARACTERS + 10 * n_given)[
            "text"
        ]
        return text

    def names(self, template: str) -> frozenset[str]:
        """The names of the variables that a template reads. Raises as ``render`` does."""
        return frozenset(self._ask({"template": template}, SECONDS, _template_exceeded)["names"])

    def try_grammar(self, grammar: str, special: Mapping[str, int] | None, n_vocab: int) -> str:
        """As ``problem_of``."""
        checkpoint()
        if len(grammar) > MOST_GRAMMAR:
            raise _grammar_exceeded(f"has {len(grammar):,} characters of {MOST_GRAMMAR:,} at most")
        request = {"grammar": grammar, "special": special, "n_vocab": n_vocab}
        with one_limit():
            assert _time.left is not None
            if _time.left <= 0:
                raise _grammar_exceeded(f"took longer than {GRAMMAR_SECONDS:.2g} s")
            answer = self._ask(request, _time.left, _grammar_exceeded)
            _time.left -= answer["seconds"]
        problem: str = answer["problem"]
        return problem

    def close(self) -> None:
        """Kill the processes, even while they work. A later request starts new ones."""
        with self._lock:
            processes, self._idle = [*self._idle, *self._running], []
        for process in processes if self._owner == os.getpid() else ():
            process.stop()

    def _ask(
        self,
        request: Mapping[str, Any],
        seconds: float,
        exceeded: Callable[[str], SpeculationError],
        characters: int = CHARACTERS,
    ) -> dict[str, Any]:
        limits = {"seconds": seconds, "memory": MEMORY, "characters": characters}
        try:
            line = json.dumps({**request, **limits}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise InvalidParameter(str(error)) from error
        with self._taken() as process:
            answer: dict[str, Any] = process.exchange(line, seconds * _WAIT)
        what = {
            "time": f"took longer than {seconds:.2g} s",
            "characters": f"made more than {characters:,} characters",
            "memory": f"needed more than {MEMORY >> 20:,} MiB of memory",
            "process": "ended the process that tried it",
        }
        if "exceeded" in answer:
            raise exceeded(what[answer["exceeded"]])
        if "error" in answer:
            raise InvalidParameter(answer["error"])
        return answer

    @contextlib.contextmanager
    def _taken(self) -> Iterator[_Process]:
        """A process for one request. It goes on to the next one unless it has been stopped."""
        if self._owner != os.getpid():  # after a fork: sharing the pipes would mix up answers
            Sandbox.__init__(self)
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.is_alive:
            process.stop()  # which closes its pipes
            process = None
        process = process or _Process()
        with self._lock:
            self._running.add(process)
        try:
            yield process
        except BaseException:  # such as Ctrl-C: a late answer would go to the next request
            process.stop()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
                is_kept = process.is_alive and len(self._idle) < MOST_IDLE
                if is_kept:
                    self._idle.append(process)
            if not is_kept:
                process.stop()


class _Process:
    """A child process, which is ready. Raises SpeculationError if it does not start."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROCESS), *map(str, sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        # Waits for the answers. To start a thread for each takes milliseconds beside a decode.
        self._reader = ThreadPoolExecutor(1)
        if self.exchange(b"", _START_SECONDS) != "ready":
            self.stop()
            raise _not_started(f"{sys.executable} could not run {_PROCESS}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, line: bytes, seconds: float) -> Any:
        """The answer to a line. After a limit is exceeded, the process is stopped."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            written = self._reader.submit(_write_and_read, stdin, stdout, line).result(seconds)
        except Timeout:
            self.stop()
            return {"exceeded": "time"}
        if written:
            answer = json.loads(written)
            if "exceeded" in answer:
                self.stop()
            return answer
        is_late = self._process.wait() == -getattr(signal, "SIGPROF", 0)
        self.stop()
        return {"exceeded": "time" if is_late else "process"}

    def stop(self) -> None:
        """Kill it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._reader.shutdown(wait=False)
        for pipe in (self._process.stdin, self._process.stdout):
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


def _template_exceeded(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model's chat template {what}; choose another model, or generate from plain text "
        f"without the template"
    )


def _grammar_exceeded(what: str) -> GrammarError:
    return GrammarError(
        f"the grammar, schema or regular expression {what}; make it simpler: fewer rules or "
        f"patterns, less nesting, smaller counts"
    )


def _not_started(reason: str) -> SpeculationError:
    return SpeculationError(
        f"the process for chat templates and grammars did not start: {reason}; check that Python "
        f"runs and that Jinja and llguidance are installed"
    )


SANDBOX = Sandbox()
atexit.register(SANDBOX.close)


@lru_cache(maxsize=64)
def problem_of(
    grammar: str, special: tuple[tuple[str, int], ...] | None = None, n_vocab: int = 0
) -> str:
    """What is wrong with a grammar in llguidance's form; empty if nothing is.

    With ``special``, the tokens by name that it may use, it is tried whether a text can be begun;
    ``n_vocab`` is more than the highest id in it. Raises GrammarError if a limit is exceeded.
    """
    return SANDBOX.try_grammar(grammar, special if special is None else dict(special), n_vocab)
