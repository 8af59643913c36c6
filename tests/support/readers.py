"""Readers of files that go wrong, to be called in another process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path


def lines(data: bytes) -> Iterator[str]:
    yield from data.decode().splitlines()


def wrong(data: bytes) -> Iterator[str]:
    print("not an answer")
    yield "a"
    raise ValueError("it is odd")


def endless(data: bytes) -> Iterator[str]:
    """Tells its process in a file, whose name is ``data``."""
    Path(os.fsdecode(data)).write_text(f"{os.getpid()}\n", encoding="utf-8")
    while True:
        time.sleep(1)
    yield ""


def large(data: bytes) -> Iterator[str]:
    yield "x" * (3 << 30)


def ended(data: bytes) -> Iterator[str]:
    yield "a"
    os._exit(0)
