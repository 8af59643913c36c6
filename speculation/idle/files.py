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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from batching.cache import common_prefix
from batching.gguf.reader import fingerprint
from batching.llama.context_params import ContextParams
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
_VERSION = 2  # of the files
_SUFFIX = ".text"
_ALL = f"*{_SUFFIX}*"  # with those that were not written to their ends
# Magic, identity, number of the tokens, of those of the prompt and CRC-32 of all, bytes and CRC-32
# of the state. Then the tokens as 32-bit numbers, then the state.
_HEADER = struct.Struct("<8s16sIIIQI")
_MAGIC = b"SPECTEXT"


@dataclass(eq=False)
class TextFile:
    """A text's tokens and its file; the state is here, too, until it is written.

    n_prompt  as in ``IdleText``
    """

    tokens: tuple[int, ...]
    n_prompt: int
    path: Path
    state: Any = None


def begins(tokens: Sequence[int], other: Sequence[int]) -> bool:
    """Whether ``other`` begins with ``tokens``."""
    return common_prefix(tokens, other) == len(tokens)


class _Begun(Protocol):
    tokens: tuple[int, ...]
    n_prompt: int


def is_continued(text: _Begun, tokens: Sequence[int]) -> bool:
    """Whether ``tokens`` go on after the prompt of a text. Not all of the reply need come back:
    templates drop reasoning."""
    return common_prefix(text.tokens, tokens) >= text.n_prompt


def identity_of(model: Path, kv_type: str, *, flash_attn: bool, exact: bool = False) -> str:
    """What a state depends on, as 16 hex digits: the model's file, its KV cache, and llama.cpp."""
    build = build_info(), [device.description for device in devices()]
    facts = (_VERSION, fingerprint(model), kv_type, flash_attn, exact, build)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def usual_flash_attn(folder: Path, model: Path, params: ContextParams) -> str:
    """Flash attention as for the text of the model that was used last: on or off.

    As in ``params`` if that is not auto, or if there is no text. What auto measures may differ from
    load to load, and the states differ with it.
    """
    if params.flash_attn != "auto" or params.exact:
        return params.flash_attn
    last = [(0, "auto")]
    for name in ("on", "off"):
        identity = identity_of(model, params.kv_type, flash_attn=name == "on")
        last += [(used, name) for used, _, _ in _by_age(folder, f"{identity}-*{_SUFFIX}")]
    return max(last)[1]


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
        found = {path: self._read(path) for path in folder.glob(f"{identity}-*{_SUFFIX}")}
        self.texts = [TextFile(*read[:2], path) for path, read in found.items() if read is not None]

    def put(self, tokens: Sequence[int], n_prompt: int, state: Any, used: float) -> None:
        """Write a text that was last ``used`` then, in another thread, after the one before. It
        replaces those it continues."""
        kept = [text for text in self.texts if text.state is not None or text.path.exists()]
        self.texts = [text for text in kept if not is_continued(text, tokens)]
        if any(begins(tokens, text.tokens) for text in kept):
            self.texts = kept
            return
        replaced = [text.path for text in kept if text not in self.texts]
        path = self._folder / f"{self._identity}-{uuid.uuid4().hex}{_SUFFIX}"
        new = TextFile(tuple(tokens), n_prompt, path, state)
        self.texts.append(new)
        self._written = self._writer.submit(self._write, new, replaced, used)

    @property
    def is_behind(self) -> bool:
        """Whether so much waits to be written that more should not."""
        waiting = [text.state for text in self.texts]
        return sum([len(state) for state in waiting if state is not None]) > _MAX_UNWRITTEN

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all is written, at most so long."""
        if self._written is not None:
            wait_for([self._written], seconds)

    def close(self) -> None:
        """Give up what is not being written after ``CLOSE_SECONDS``."""
        self.wait(CLOSE_SECONDS)
        self._writer.shutdown(cancel_futures=True)

    def read(self, text: TextFile) -> Any:
        """The state of a text, which now is the one used last; None if its file is gone or damaged.

        Takes 10 to 20 ms for 1,000 tokens of SmolLM2-135M.
        """
        if (state := text.state) is not None:
            return state
        if (read := self._read(text.path, whole=True)) is None:
            self.texts.remove(text)
            return None
        with suppress(OSError):
            os.utime(text.path)
        return read[2]

    def _read(self, path: Path, *, whole: bool = False) -> tuple[tuple[int, ...], int, Any] | None:
        """The tokens in a file, how many are the prompt's and, if ``whole``, the state. If damaged,
        it is removed: None."""
        with suppress(OSError, struct.error), path.open("rb") as file:
            magic, identity, n_tokens, n_prompt, check, n_bytes, state_check = _HEADER.unpack(
                file.read(_HEADER.size)
            )
            size = _HEADER.size + 4 * n_tokens + n_bytes
            found, expected = (magic, identity, size), (_MAGIC, self._identity.encode())
            if found == (*expected, os.fstat(file.fileno()).st_size):
                tokens = file.read(4 * n_tokens)
                state = pages(n_bytes if whole else 0)
                file.readinto(state)
                is_intact = not whole or zlib.crc32(state) == state_check
                if is_intact and zlib.crc32(tokens) == check:
                    return tuple(np.frombuffer(tokens, "<i4").tolist()), n_prompt, state
        with suppress(OSError):
            path.unlink()
        return None

    def _write(self, text: TextFile, replaced: Sequence[Path], used: float) -> None:
        state, tokens = text.state, np.asarray(text.tokens, "<i4").tobytes()
        sizes = len(text.tokens), text.n_prompt, zlib.crc32(tokens), len(state), zlib.crc32(state)
        begin = _HEADER.pack(_MAGIC, self._identity.encode(), *sizes) + tokens
        n_bytes = len(begin) + len(state)
        try:
            for path in replaced:
                path.unlink(missing_ok=True)
            if n_bytes <= self._max_bytes:
                _make_room(self._folder, self._max_bytes - n_bytes)
                with replacing(text.path, private=True, sync=False) as file:
                    file.write(begin)
                    file.write(state)
                os.utime(text.path, (used, used))
        except OSError as error:
            log.warning("cannot keep a text in %s: %s", self._folder, error.strerror or error)
        finally:
            text.state = None


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
