"""SuffixMemory: the texts that an engine read and wrote, up to a number of tokens.

In memory only, unless it is saved to a file. The file has a header with the model's fingerprint,
and the tokens as little-endian 32-bit integers; -1 ends a text.
"""

from __future__ import annotations

import logging
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from batching.errors import InvalidParameter
from batching.replacing import replacing
from speculation.drafting.suffix_index import (
    LENGTHS,
    LONGEST_CONTEXT,
    LONGEST_COPY,
    SEPARATOR,
    SuffixIndex,
    agreement,
)

log = logging.getLogger(__name__)

N_TOKENS = 1 << 20  # 38 MB with the index
_HEADER = struct.Struct("<8s16sQ")  # format and version, fingerprint, number of tokens
_MAGIC = b"SUFFIX 1"
_LONGEST = len(LENGTHS) - 1
_OVERLAP = LENGTHS[_LONGEST]
_CANDIDATES = 64  # places where a known text may go on: many begin alike


class SuffixMemory:
    """The latest tokens of finished texts, at most ``capacity``, and their index.

    A text is remembered when it ends. Of a text that begins like earlier ones, as a chat's next
    turn does, only the rest is added. Where there is no room, the older half is forgotten.
    """

    def __init__(self, capacity: int = N_TOKENS) -> None:
        self.capacity = capacity
        self._is_off = False
        self.clear()

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a text, unless it is off."""
        if self._is_off:
            return
        n_known = self._n_known(tokens)
        if n_known < len(tokens):
            # The context lets matches continue from what is known to what is new.
            self._add([*tokens[max(0, n_known - LONGEST_CONTEXT) :], SEPARATOR])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remember nothing meanwhile; lookups still find what was remembered before."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    @classmethod
    def off(cls) -> SuffixMemory:
        """A memory that remembers nothing."""
        memory = cls()
        memory._is_off = True
        return memory

    def clear(self) -> None:
        """Forget everything."""
        self.index = SuffixIndex()

    def _add(self, tokens: Sequence[int]) -> None:
        if len(self.index.tokens) + len(tokens) > self.capacity:
            half = self.capacity // 2
            self.index = SuffixIndex(self.index.tokens[-half:])
            tokens = tokens[-half:]
        self.index.extend(tokens)

    def _n_known(self, tokens: Sequence[int]) -> int:
        """How many tokens from the first are in the memory already; 0 if fewer than 8 are.

        They may be in several texts: a chat's turns were added one by one. Each part begins with
        the last 8 tokens of the part before.
        """
        text, n = array("i", tokens), _OVERLAP
        while n <= len(text):
            positions = self.index.matches(_LONGEST, text[n - _OVERLAP : n], _CANDIDATES)
            if not positions:
                return n if n > _OVERLAP else 0
            following = text[n : n + LONGEST_COPY]
            copies = [self.index.copy(position, LONGEST_COPY) for position in positions]
            longest = max([agreement((following, copy)) for copy in copies])
            if not longest:
                return n
            n += longest
        return 0

    def save(self, path: Path, fingerprint: str) -> None:
        """Write the texts to ``path``, of the model with this ``fingerprint``; only its owner can
        read it. Raises OSError."""
        tokens = np.asarray(self.index.tokens, "<i4")
        with replacing(path, private=True) as file:
            file.write(_HEADER.pack(_MAGIC, fingerprint.encode(), len(tokens)))
            file.write(tokens.tobytes())

    @classmethod
    def load(cls, path: Path, fingerprint: str, n_vocab: int) -> SuffixMemory:
        """Read the texts of the model with this ``fingerprint``. Raises InvalidParameter.

        A million tokens take about half a second. A damaged file is put aside for a new one.
        """
        way_out = "give another file, or delete it to start a new one"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidParameter(f"cannot read {path}: {error.strerror}; {way_out}") from None
        if content[: len(_MAGIC)] != _MAGIC or len(content) < _HEADER.size:
            raise InvalidParameter(f"{path} is not a memory file of this version; {way_out}")
        _, owner, n = _HEADER.unpack_from(content)
        if owner != fingerprint.encode():
            raise InvalidParameter(f"{path} has the memory of another model; {way_out}")
        memory, tokens = cls(), np.zeros(0, np.int32)
        is_sound = len(content) == _HEADER.size + 4 * n
        if is_sound and n:
            tokens = np.frombuffer(content, "<i4", offset=_HEADER.size).astype(np.int32)
            is_sound = bool(tokens.min() >= SEPARATOR and tokens.max() < n_vocab)
        if not is_sound:
            aside = path.with_name(f"{path.name}.damaged")
            log.warning("%s is damaged: it is kept as %s, and a new memory begins", path, aside)
            with suppress(OSError):
                path.replace(aside)
            return memory
        memory._add(array("i", tokens.tobytes()))
        return memory
