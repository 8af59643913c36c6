"""Idle texts on disk: those that main memory has no room for, and all when the engine is closed.

Restoring a text from disk, check included, was this many times as quick as reading it again (texts
of 200, 1,000 and 4,000 tokens; two cores, F16 cache, medians of five on a busy machine):

    14M, 16 KB a token           11, 20, 45     35, 46, 59 if the system still has it in memory
    SmolLM2-135M, 23 KB          132, 183, 148
    500M in Q4_0, 46 KB          78, 104, 225

Writing 4,000 tokens of SmolLM2-135M (92 MB) took 250 ms, so another thread does it. Beside that, a
token took 29 ms as before, and the longest of 27 took 74 ms instead of 44 (one thread). A slow disk
loses texts instead of holding up replies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
import time
import uuid
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from batching.cache import common_prefix
from batching.gguf.reader import fingerprint
from batching.llama.devices import devices
from batching.llama.hardware import build_info
from batching.pages import pages
from batching.replacing import replacing
from speculation.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

SPEED = 50  # tokens restored from disk while one is read again, about
CLOSE_SECONDS = 5.0  # that writes may take when the engine is closed
_MAX_AGE = 7 * 24 * 3600  # seconds since a text was used last, after which it is removed
_MAX_UNWRITTEN = 2**30  # bytes that wait for the disk
_VERSION = 3  # of the files
_SUFFIX = ".text"
_ALL = f"*{_SUFFIX}*"  # with those that were not written to their ends
# Magic, identity, number of the tokens, of those of the prompt, and of the states, CRC-32 of what
# follows up to the states, bytes and CRC-32 of these. Then the tokens as 32-bit numbers, the tokens
# and the bytes of each state as 64-bit numbers, then the states.
_HEADER = struct.Struct("<8s16sIIIIQI")
_MAGIC = b"SPECTEXT"


@dataclass(eq=False)
class IdleText:
    """A text's tokens, and what the cache had of it.

    n_prompt  how many of the tokens a continuation brings again; the others are the reply's
    states    (n_tokens, array of bytes), ascending: those of ``SequenceCache.saved``, then a copy
              of the whole text. None in place of the arrays if they are on disk alone
    on_disk   whether it may go to disk
    used      when it was copied, in seconds since 1970
    path      its file
    """

    tokens: tuple[int, ...]
    n_prompt: int
    states: Sequence[tuple[int, Any]]
    on_disk: bool = True
    used: float = field(default_factory=time.time)
    path: Path = Path()

    @property
    def n_bytes(self) -> int:
        return sum([len(state) for _, state in self.states if state is not None])


def begins(tokens: Sequence[int], other: Sequence[int]) -> bool:
    """Whether ``other`` begins with ``tokens``."""
    return common_prefix(tokens, other) == len(tokens)


def is_continued(text: IdleText, tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` go on after the prompt of a text. Not all of the reply need come back:
    templates drop reasoning."""
    return common_prefix(text.tokens, tokens) >= text.n_prompt


def identity_of(model: Path, kv_type: str, *, flash_attn: bool, exact: bool = False) -> str:
    """What a state depends on, as 16 hex digits: the model's file, its KV cache, and llama.cpp."""
    build = build_info(), [device.description for device in devices()]
    facts = (_VERSION, fingerprint(model), kv_type, flash_attn, exact, build)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def texts_folder() -> Path:
    """The folder of all texts on disk."""
    return cache_folder() / "texts"


class TextFiles:
    """The texts of one model in a folder, which may have those of other models, too.

    A file that is damaged, or is not what its name says, is removed. Write errors are only logged.

    texts  what there is, also while it is being written
    """

    def __init__(self, folder: Path, identity: str, max_bytes: int) -> None:
        """``identity`` has 16 characters. ``max_bytes`` limits the folder with all its models; half
        of the disk stays free in any case.

        Raises OSError if the folder cannot be used.
        """
        self._folder, self._identity = folder, identity
        self._writer = ThreadPoolExecutor(1, "texts")
        self._written: Future[None] | None = None  # the last of them
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        n_used = sum([size for _, size, _ in _by_age(folder, _ALL)])
        self._max_bytes = min(max_bytes, (shutil.disk_usage(folder).free + n_used) // 2)
        _make_room(folder, self._max_bytes)
        found = [self._read(path) for path in folder.glob(f"{identity}-*{_SUFFIX}")]
        self.texts = [text for text in found if text is not None]

    def put(self, text: IdleText) -> None:
        """Write a text in another thread, after the one before. It replaces those it continues."""
        kept = [other for other in self.texts if other.n_bytes or other.path.exists()]
        self.texts = [other for other in kept if not is_continued(other, text.tokens)]
        if any(begins(text.tokens, other.tokens) for other in kept):
            self.texts = kept
            return
        replaced = [other.path for other in kept if other not in self.texts]
        path = self._folder / f"{self._identity}-{uuid.uuid4().hex}{_SUFFIX}"
        self.texts.append(new := replace(text, path=path))
        self._written = self._writer.submit(self._write, new, replaced)

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that more should not."""
        return sum([text.n_bytes for text in self.texts]) > _MAX_UNWRITTEN

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all is written, at most so long."""
        if self._written is not None:
            wait_for([self._written], seconds)

    def close(self) -> None:
        """Give up what is not being written after ``CLOSE_SECONDS``."""
        self.wait(CLOSE_SECONDS)
        self._writer.shutdown(cancel_futures=True)

    def read(self, text: IdleText) -> IdleText | None:
        """A text with its states, which now is the one used last; None if its file is gone or
        damaged.

        Takes 10 to 20 ms for 1,000 tokens of SmolLM2-135M.
        """
        states = text.states  # another thread may have written them by now
        if states[-1][1] is not None:
            return replace(text, states=states, used=time.time())
        if (read := self._read(text.path, whole=True)) is None:
            self.texts.remove(text)
            return None
        with suppress(OSError):
            os.utime(text.path)
        return read

    def _read(self, path: Path, *, whole: bool = False) -> IdleText | None:
        """The text in a file, with its states if ``whole``. If damaged, it is removed: None."""
        with suppress(OSError, struct.error), path.open("rb") as file:
            magic, identity, n_tokens, n_prompt, n_states, check, n_bytes, state_check = (
                _HEADER.unpack(file.read(_HEADER.size))
            )
            n_begin = 4 * n_tokens + 16 * n_states
            begin, size = file.read(n_begin), _HEADER.size + n_begin + n_bytes
            found = magic, identity, size, check
            actual = os.fstat(file.fileno()).st_size, zlib.crc32(begin)
            if found == (_MAGIC, self._identity.encode(), *actual):
                tokens = tuple(np.frombuffer(begin, "<i4", n_tokens).tolist())
                table = np.frombuffer(begin, "<i8", offset=4 * n_tokens).reshape(2, -1)
                ends, sizes = table.tolist()
                states: list[Any] = [pages(n) if whole else None for n in sizes]
                for state in states if whole else ():
                    file.readinto(state)
                if not whole or _check(states) == state_check:
                    return IdleText(tokens, n_prompt, [*zip(ends, states, strict=True)], path=path)
        with suppress(OSError):
            path.unlink()
        return None

    def _write(self, text: IdleText, replaced: Sequence[Path]) -> None:
        ends, states = zip(*text.states, strict=True)
        table = np.asarray([ends, [len(state) for state in states]], "<i8")
        begin = np.asarray(text.tokens, "<i4").tobytes() + table.tobytes()
        counts = len(text.tokens), text.n_prompt, len(states)
        checks = zlib.crc32(begin), text.n_bytes, _check(states)
        begin = _HEADER.pack(_MAGIC, self._identity.encode(), *counts, *checks) + begin
        n_bytes = len(begin) + text.n_bytes
        try:
            for path in replaced:
                path.unlink(missing_ok=True)
            if n_bytes <= self._max_bytes:
                _make_room(self._folder, self._max_bytes - n_bytes)
                with replacing(text.path, private=True, sync=False) as file:
                    file.write(begin)
                    file.writelines(states)
                os.utime(text.path, (text.used, text.used))
        except OSError as error:
            log.warning("cannot keep a text in %s: %s", self._folder, error.strerror or error)
        finally:
            text.states = [(end, None) for end in ends]


def _check(states: Iterable[Any]) -> int:
    """The CRC-32 of all states, one after another."""
    found = 0
    for state in states:
        found = zlib.crc32(state, found)
    return found


def _by_age(folder: Path, names: str) -> list[tuple[int, int, Path]]:
    """When files were last used, their bytes and paths, the oldest first."""
    found = []
    for path in folder.glob(names):
        with suppress(FileNotFoundError):  # another engine may use the folder
            found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    return sorted(found)


def _make_room(folder: Path, max_bytes: int) -> None:
    """Remove old texts, of any model, and those used least recently until the others fit."""
    found = _by_age(folder, _ALL)
    n_bytes = sum([size for _, size, _ in found])
    oldest = (time.time() - _MAX_AGE) * 1e9
    for used, size, path in found:
        if n_bytes > max_bytes or used < oldest:
            path.unlink(missing_ok=True)
            n_bytes -= size
