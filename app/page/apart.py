"""Reads what users bring, PDFs and exports of chats, in processes with limits.

Such a file may take any time and memory, and nobody else waits for it.
``python -m app.page.apart MODULE FUNCTION`` reads the file from stdin.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
PLACES = 2  # processes at a time; who comes first is served first
SECONDS = 30.0  # of a processor; twice as many by the clock
MEMORY = 2 << 30  # bytes of address space


class Unreadable(Exception):
    """What a file's reader raised, or that it exceeded a limit. The message is for the user."""


class Apart:
    """The processes of a server, used in its event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)

    async def read(self, reader: Callable[[bytes], Iterator[T]], data: bytes) -> list[T]:
        """What a module's function yields for a file. If this is cancelled, its process is killed.

        Raises Unreadable.
        """
        async with self._places:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", __name__, reader.__module__, reader.__name__),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is the server's business
            )
            try:
                made, _ = await asyncio.wait_for(process.communicate(data), 2 * SECONDS)
            except asyncio.TimeoutError:
                made = b""
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        found, why = [], "that takes too much time or memory"  # and its process was ended
        if process.returncode == 0:
            with suppress(EOFError, pickle.UnpicklingError):
                found, why = pickle.loads(made)
        if why:
            raise Unreadable(why)
        return found


def main() -> None:
    """Write what the function yields, and why it failed, or nothing."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    module, function = sys.argv[1:]
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # what is printed is no answer
    found: list[Any] = []
    why = ""
    try:
        found += getattr(import_module(module), function)(sys.stdin.buffer.read())
    except MemoryError:
        raise
    except Exception as error:  # readers raise almost anything over a damaged file
        why = str(error) or type(error).__name__
    out.write(pickle.dumps((found, why)))
    out.flush()


if __name__ == "__main__":
    main()
