"""What the commands share: output to any console, exit codes, and errors in one line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import EPIPE
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from batching.errors import SpeculationError

OK, FAILED, INTERRUPTED = 0, 2, 130
VERSION = f"speculation {version('speculation')} (llama-cpp-python {version('llama-cpp-python')})"
FLAGS = {
    "model": "--model",
    "draft_model": "--draft-model",
    "heads": "--heads",
    "embedding_model": "--embedding-model",
    "n_ctx": "--ctx",
    "n_gpu_layers": "--gpu-layers",
    "n_cpu_moe": "--n-cpu-moe",
    "exact": "--exact",
    "device": "--device",
    "kv_type": "--kv-type",
    "parallel": "--parallel",
    "keep_texts": "--keep-texts",
}


def open_missing() -> None:
    """Give a program that was started without stdin, stdout or stderr ones that lead nowhere.

    What it opens next, such as a socket, would get their numbers, and what C code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (stays open)


def replace_unencodable() -> None:
    """Print ``?`` for characters that a console or pipe cannot encode.

    Texts and file names can have any character; a Windows pipe encodes about 200.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write to stderr, or to ``stream``. A server goes on if nobody reads that, or the disk is
    full."""
    stream = stream or sys.stderr
    try:
        stream.write(text + end)
        stream.flush()
    except (OSError, ValueError):
        if stream is sys.stdout:
            drop_output()


def drop_output() -> None:
    """Let Python write what is left on stdout and stderr to nowhere when it exits, if it must."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # noqa: PERF203 (each by itself)
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def worded(error: Exception) -> str:
    """The error's message, with settings named by their command-line flags."""
    return error.worded(FLAGS) if isinstance(error, SpeculationError) else str(error)


def run_command(
    command: Callable[[], int | None], interrupted: str = "interrupted; nothing was written"
) -> int:
    """Run a command; return its exit code: its own, or 2 after an error, 130 after Ctrl-C.

    Errors end with one line on stderr; ``interrupted`` is that for Ctrl-C.
    """
    replace_unencodable()
    try:
        code = command() or OK
        sys.stdout.flush()  # a reader that has gone is noticed now
        return code
    except KeyboardInterrupt:
        say(interrupted)
        return INTERRUPTED
    except (SpeculationError, OSError) as error:
        if getattr(error, "errno", None) != EPIPE:  # else the reader has gone
            say(f"error: {worded(error)}")
        drop_output()
        return FAILED
