"""Files that are read in processes with limits."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.page import apart
from app.page.apart import Apart, Unreadable
from tests.support import readers

TOO_MUCH = "that takes too much time or memory"


def read(reader: Callable[[bytes], Iterator[str]], data: bytes = b"") -> list[str]:
    async def ask() -> list[str]:
        return list(await Apart().read(reader, data))

    return asyncio.run(ask())


def test_a_reader_answers_or_says_why_it_cannot() -> None:
    assert read(readers.lines, b"a\nb") == ["a", "b"]
    with pytest.raises(Unreadable, match=r"^it is odd$"):
        read(readers.wrong)
    with pytest.raises(Unreadable, match=TOO_MUCH):
        read(readers.ended)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has no such limit")
def test_a_reader_that_takes_too_much_memory_is_ended() -> None:
    with pytest.raises(Unreadable, match=TOO_MUCH):
        read(readers.large)


async def process_of(file: Path) -> int:
    while not file.exists() or not file.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    return int(file.read_text())


async def until_gone(process: int) -> None:
    while True:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)


def test_a_reader_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "SECONDS", 1.0)

    async def check() -> None:
        reading = asyncio.ensure_future(Apart().read(readers.endless, bytes(tmp_path / "a")))
        with pytest.raises(Unreadable, match=TOO_MUCH):
            list(await reading)
        if (tmp_path / "a").exists():
            await until_gone(await process_of(tmp_path / "a"))

    asyncio.run(asyncio.wait_for(check(), 60))


def test_two_files_are_read_at_a_time_and_a_client_that_leaves_ends_its_own(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        made = Apart()
        names = [tmp_path / name for name in "abc"]
        first, second, third = [
            asyncio.ensure_future(made.read(readers.endless, bytes(name))) for name in names
        ]
        processes = [await process_of(name) for name in names[:2]]
        assert not names[2].exists()
        first.cancel()
        await until_gone(processes[0])
        processes.append(await process_of(names[2]))
        second.cancel()
        third.cancel()
        await asyncio.wait([first, second, third])
        for process in processes:
            await until_gone(process)

    asyncio.run(asyncio.wait_for(check(), 60))
