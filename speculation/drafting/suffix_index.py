"""SuffixIndex: finds earlier occurrences of the end of a text.

Hash chains, as in an LZ77 match finder, for the last 1, 2, 4 and 8 tokens. A suffix automaton finds
the longest match directly (SAM-Decoding, arXiv 2411.10666), but in Python its states and
transitions take several times the memory. These tables take 36 bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LENGTHS = (1, 2, 4, 8)  # of the suffixes that are looked up
LONGEST_CONTEXT = 32  # longer common contexts count as this
LONGEST_COPY = 256
SEPARATOR = -1  # ends a text; no copy goes beyond it
_SEPARATOR_BYTES = b"\xff\xff\xff\xff"
_BITS = 30  # of a hash: products then fit 64 bits
_MASK = (1 << _BITS) - 1
_FACTOR = 0x2545F491
_PROBED = 8  # positions to visit for a single match
_BULK = 64  # tokens from which NumPy is faster
_CHUNK = 1 << 16  # tokens at a time, which bounds NumPy's temporary arrays
_FIRST_CAPACITY, _GROWTH = 1 << 10, 4

Ints = npt.NDArray[np.int64]


class SuffixIndex:
    """Tokens, and where each suffix length's n-grams occur in them.

    A position is an index into ``tokens``. For each length, ``heads`` has the latest position after
    the n-grams of a hash, and ``previous`` the one before each position; 0 ends a chain. Entries
    are verified against the tokens. Looking up and appending take the same time however many tokens
    there are.

    >>> index = SuffixIndex([7, 8, 9, 7, 8])
    >>> [index.copy(position, 3) for position in index.matches(1, index.tokens, 4)]
    [array('i', [9, 7, 8])]
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = array("i")
        self._make_tables(_FIRST_CAPACITY)
        self.extend(tokens)

    def _make_tables(self, capacity: int) -> None:
        self._capacity, self._shift = capacity, _BITS - (capacity.bit_length() - 1)
        self._heads = [array("i", bytes(4 * capacity)) for _ in LENGTHS]
        self._previous = [array("i", bytes(4 * capacity)) for _ in LENGTHS]

    @property
    def n_bytes(self) -> int:
        """Memory of the tables, in bytes."""
        tables = (self.tokens, *self._heads, *self._previous)
        return sum(table.itemsize * len(table) for table in tables)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. An n-gram is indexed once a token follows it."""
        n = len(self.tokens) + len(tokens)
        if n > self._capacity:
            while n > self._capacity:
                self._capacity *= _GROWTH
            self._make_tables(self._capacity)
            tokens, self.tokens = [*self.tokens, *tokens], array("i")
        if len(tokens) < _BULK:
            for token in tokens:
                self._append(token)
        else:
            for start in range(0, len(tokens), _CHUNK):
                self._append_bulk(tokens[start : start + _CHUNK])

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        for n, head, previous in zip(LENGTHS, self._heads, self._previous, strict=True):
            bucket = _hash(self.tokens[-n:]) >> self._shift
            previous[position] = head[bucket]
            head[bucket] = position
        self.tokens.append(token)

    def _append_bulk(self, new: Sequence[int]) -> None:
        first, n, before = len(self.tokens), len(new), LENGTHS[-1]
        self.tokens.extend(new)
        tokens: Ints = np.zeros(before + n, np.int64)  # those before each new one
        known = self.tokens[max(0, first - before) : -1]
        tokens[len(tokens) - len(known) :] = known
        values, factor = tokens * _FACTOR & _MASK, _FACTOR
        positions = np.arange(first, first + n)
        for length, head, previous in zip(LENGTHS, self._heads, self._previous, strict=True):
            _link(head, previous, values[before:] >> self._shift, positions)
            # The hash of twice as many tokens, from those of its halves.
            values[length:] = (values[:-length] * factor + values[length:]) & _MASK
            factor = factor * factor & _MASK

    def matches(self, level: int, text: Sequence[int], limit: int, n_visited: int = 0) -> list[int]:
        """Up to ``limit`` positions after the last ``LENGTHS[level]`` tokens of ``text``.

        Latest first, each followed by a token of the same text. Visits at most ``n_visited``
        positions, by default twice the limit, since other n-grams may have the same hash.
        """
        n, tokens, previous = LENGTHS[level], self.tokens, self._previous[level]
        suffix = array("i", text[-n:])
        position = self._heads[level][_hash(suffix) >> self._shift]
        found: list[int] = []
        for _ in range(n_visited or 2 * limit):
            if not position:
                break
            if tokens[position - n : position] == suffix and tokens[position] != SEPARATOR:
                found.append(position)
                if len(found) == limit:
                    break
            position = previous[position]
        return found

    def longest(self, text: Sequence[int], shortest: int = 0) -> tuple[int, int]:
        """The highest level, from ``shortest``, at which the end of ``text`` occurs, and the latest
        position after it; (-1, 0) = none."""
        found = -1, 0
        for level in range(shortest, len(LENGTHS)):
            positions = self.matches(level, text, 1, _PROBED) if len(text) >= LENGTHS[level] else ()
            if not positions:
                break
            found = level, positions[0]
        return found

    def common_context(self, position: int, text: array[int]) -> int:
        """How many tokens before ``position`` equal the end of ``text``, up to 32."""
        tokens, n = self.tokens, 0
        most = min(position, len(text), LONGEST_CONTEXT)
        if tokens[position - most : position] == text[len(text) - most :]:  # often, and faster
            return most
        while n < most and tokens[position - 1 - n] == text[-1 - n]:
            n += 1
        return n

    def copy(self, position: int, length: int) -> array[int]:
        """Up to ``length`` tokens from ``position``, at most 256, to the end of their text.

        At the end of the index, continues with the copy itself, so a short period is repeated.
        """
        copied = self.tokens[position : position + length]
        # Searching bytes is faster. Only a separator has four bytes 255 in a row.
        if (at := copied.tobytes().find(_SEPARATOR_BYTES)) >= 0:
            return copied[: (at + 3) // 4]
        if copied and len(copied) < length:
            return (copied * (length // len(copied) + 1))[:length]
        return copied


def _hash(tokens: Sequence[int]) -> int:
    value = 0
    for token in tokens:
        value = (value + token) * _FACTOR
    return value & _MASK


def _link(head: array[int], previous: array[int], buckets: Ints, positions: Ints) -> None:
    """Add ``positions``, ascending, to the chains of their ``buckets``."""
    heads, links = np.frombuffer(head, np.int32), np.frombuffer(previous, np.int32)
    order = buckets.argsort(kind="stable")
    buckets, positions = buckets[order], positions[order]
    is_last = np.append(buckets[1:] != buckets[:-1], True)
    is_first = np.append(True, is_last[:-1])
    links[positions] = np.where(is_first, heads[buckets], np.append(0, positions[:-1]))
    heads[buckets[is_last]] = positions[is_last]


def agreement(copies: Sequence[array[int]]) -> int:
    """Length of the longest prefix that all ``copies`` share."""
    first, n = copies[0], len(copies[0])
    for copy in copies:
        if copy[:n] == first[:n]:
            continue
        pairs = enumerate(zip(first[:n], copy, strict=False))
        n = next((i for i, (a, b) in pairs if a != b), min(n, len(copy)))
    return n
