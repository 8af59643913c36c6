"""SuffixIndex: finds earlier occurrences of the end of a text, in the last N tokens.

Hash chains, as in an LZ77 match finder, for the last 1, 2, 4 and 8 tokens. A suffix automaton finds
the longest match directly (SAM-Decoding, arXiv 2411.10666), but it cannot forget, and in Python its
states and transitions take several times the memory. These tables take 36 bytes a token, and new
tokens overwrite the oldest.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Lengths of the suffixes that are looked up, and factors for their hashes: the hash of 2n tokens is
# that of the first n times the factor of n, plus that of the last n.
_LEVELS = ((1, 0x1B873593), (2, 0x2C1B3C6D), (4, 0x19D699A5), (8, 0))
LENGTHS = tuple(n for n, _ in _LEVELS)
LONGEST_CONTEXT = 32  # longer common contexts count as this
LONGEST_COPY = 256
SEPARATOR = -1  # ends a text; no copy goes beyond it
_SEPARATOR_BYTES = b"\xff\xff\xff\xff"
_BITS = 30  # of a hash: products then fit 64 bits
_MASK = (1 << _BITS) - 1
_TOKEN_FACTOR = 0x2545F491
_PROBED = 8  # positions to visit for a single match
_BULK = 64  # tokens from which NumPy is faster
_CHUNK = 1 << 16  # tokens at a time, which bounds NumPy's temporary arrays

Ints = npt.NDArray[np.int64]


class SuffixIndex:
    """The last ``capacity`` tokens, and where each suffix length's n-grams occur in them.

    Tokens are in a ring; a position is an index into it. For each length, ``head`` has the latest
    position after the n-grams of a hash, and ``previous`` the one before each position. Entries
    are verified against the tokens, so what is overwritten needs no removal. Looking up and
    appending take the same time however many tokens there are. The ring's ends are repeated on
    both sides, so that contexts and copies are contiguous.

    >>> index = SuffixIndex(1024)
    >>> index.extend([7, 8, 9, 7, 8])
    >>> [index.copy(position, 3) for position in index.matches(1, index, 4)]
    [array('i', [9, 7, 8])]
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` is a power of two from 512."""
        bits = capacity.bit_length() - 1
        self.capacity = capacity
        self.hashes = [0] * len(LENGTHS)  # of the last 1, 2, 4, … tokens
        self.end = LONGEST_CONTEXT  # position of the next token
        self.n_tokens = 0  # in the ring
        self._tokens = array("i", bytes(4 * (LONGEST_CONTEXT + capacity + LONGEST_COPY)))
        self._shift = _BITS - bits
        # For each length n: head, previous, the n latest hashes, and the factor. The first of the
        # n hashes is that of the n tokens before the last n: the first half of the next length.
        self._levels = [
            (
                array("i", bytes(4 * capacity)),
                array("i", bytes(4 * (LONGEST_CONTEXT + capacity))),
                deque([0] * n, maxlen=n),
                factor,
            )
            for n, factor in _LEVELS
        ]

    @property
    def n_bytes(self) -> int:
        """Memory of the tables, in bytes."""
        tables = [table for level in self._levels for table in level[:2]]
        return sum(table.itemsize * len(table) for table in (self._tokens, *tables))

    @property
    def tail(self) -> array[int]:
        """The last 32 tokens; before the first token, zeros."""
        return self._tokens[self.end - LONGEST_CONTEXT : self.end]

    def tokens(self) -> array[int]:
        """All tokens in the ring, oldest first."""
        first, end = LONGEST_CONTEXT, self.end
        if self.n_tokens < self.capacity:
            return self._tokens[first:end]
        return self._tokens[end : first + self.capacity] + self._tokens[first:end]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``. An n-gram is indexed once a token follows it."""
        if len(tokens) < _BULK:
            for token in tokens:
                self._append(token)
        else:
            n = min(_CHUNK, self.capacity)
            for start in range(0, len(tokens), n):
                self._append_bulk(np.array(tokens[start : start + n], np.int64))
        self.n_tokens = min(self.capacity, self.n_tokens + len(tokens))

    def _append(self, token: int) -> None:
        position, shift, ring, hashes = self.end, self._shift, self._tokens, self.hashes
        value = token * _TOKEN_FACTOR & _MASK
        for i, (head, previous, recent, factor) in enumerate(self._levels):
            bucket = hashes[i] >> shift
            previous[position] = head[bucket]
            head[bucket] = position
            hashes[i] = value
            first_half = recent[0]
            recent.append(value)
            value = (first_half * factor + value) & _MASK
        ring[position] = token
        if position < LONGEST_CONTEXT + LONGEST_COPY:
            ring[position + self.capacity] = token
        if position >= self.capacity:
            position -= self.capacity
            ring[position] = token
            if position < LONGEST_CONTEXT - 1:
                position += self.capacity
        self.end = position + 1

    def _append_bulk(self, tokens: Ints) -> None:
        n, capacity = len(tokens), self.capacity
        first, ring = LONGEST_CONTEXT, np.frombuffer(self._tokens, np.int32)
        positions = (np.arange(self.end - first, self.end - first + n) & (capacity - 1)) + first
        ring[positions] = tokens
        ring[:first] = ring[capacity : capacity + first]
        ring[capacity + first :] = ring[first : first + len(ring) - capacity - first]
        values = tokens * _TOKEN_FACTOR & _MASK
        for i, (head, previous, recent, factor) in enumerate(self._levels):
            buckets = np.concatenate(([self.hashes[i]], values[:-1])) >> self._shift
            _link(head, previous, buckets, positions)
            self.hashes[i] = int(values[-1])
            padded = np.concatenate((np.array(recent), values))
            recent.extend(padded[n:].tolist())
            values = (padded[:n] * factor + values) & _MASK
        self.end = int(positions[-1] - first + 1) % capacity + first

    def matches(self, level: int, text: SuffixIndex, limit: int, n_visited: int = 0) -> list[int]:
        """Up to ``limit`` positions after the last ``LENGTHS[level]`` tokens of ``text``.

        Latest first, each followed by a token of the same text. Visits at most ``n_visited``
        positions, by default twice the limit, since other n-grams may have the same hash.
        """
        n = LENGTHS[level]
        suffix = text._tokens[text.end - n : text.end]
        tokens, end, mask = self._tokens, self.end, self.capacity - 1
        head, previous, _, _ = self._levels[level]
        position = head[text.hashes[level] >> self._shift]
        found: list[int] = []
        age = 0
        for _ in range(n_visited or 2 * limit):
            last_age, age = age, (end - position) & mask
            if age <= last_age:  # overwritten by a later token, or the end of the chain
                break
            if tokens[position - n : position] == suffix and tokens[position] != SEPARATOR:
                found.append(position)
                if len(found) == limit:
                    break
            position = previous[position]
        return found

    def longest(self, text: SuffixIndex, shortest: int = 0) -> tuple[int, int]:
        """The highest level, from ``shortest``, at which the end of ``text`` occurs, and the latest
        position after it; (-1, 0) = none."""
        found = -1, 0
        for level in range(shortest, len(LENGTHS)):
            if LENGTHS[level] > text.n_tokens:
                break
            positions = self.matches(level, text, 1, _PROBED)
            if not positions:
                break
            found = level, positions[0]
        return found

    def common_context(self, position: int, tail: array[int], n: int) -> int:
        """How many tokens before ``position`` equal the end of ``tail``; ``n`` are known to."""
        tokens = self._tokens
        most = 2 * n
        if n == LENGTHS[-1]:
            most = LONGEST_CONTEXT
            if tokens[position - most : position] == tail:
                return most
        while n < most and tokens[position - 1 - n] == tail[-1 - n]:
            n += 1
        return n

    def token(self, position: int) -> int:
        return self._tokens[position]

    def copy(self, position: int, length: int) -> array[int]:
        """Up to ``length`` tokens from ``position``, at most 256, to the end of their text.

        At the end of the index, continues with the copy itself, so a short period is repeated.
        """
        n = (self.end - position) & (self.capacity - 1)
        if n >= length:
            n = length
        copied = self._tokens[position : position + n]
        # Searching bytes is faster. Only a separator has four bytes 255 in a row.
        if (at := copied.tobytes().find(_SEPARATOR_BYTES)) >= 0:
            return copied[: (at + 3) // 4]
        if n < length:
            return (copied * (length // n + 1))[:length]
        return copied


def _link(head: array[int], previous: array[int], buckets: Ints, positions: Ints) -> None:
    """Add ``positions``, oldest first, to the chains of their ``buckets``."""
    heads, links = np.frombuffer(head, np.int32), np.frombuffer(previous, np.int32)
    keys = np.sort(buckets << 32 | np.arange(len(buckets)))  # several times faster than argsort
    buckets, positions = keys >> 32, positions[keys & 0xFFFFFFFF]
    is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    before = np.concatenate(([0], positions[:-1]))
    before[is_first] = heads[buckets[is_first]]
    links[positions] = before
    heads[buckets[is_last]] = positions[is_last]


def agreement(copies: Sequence[array[int]]) -> int:
    """Length of the longest prefix that all ``copies`` share."""
    first, n = copies[0], len(copies[0])
    for copy in copies:
        if copy == first or copy[:n] == first[:n]:
            continue
        start, n = 0, min(n, len(copy))
        while n:  # the first difference is at most n tokens after start
            half = (n + 1) // 2
            if copy[start : start + half] == first[start : start + half]:
                start, n = start + half, n - half
            else:
                n = half - 1
        n = start
    return n
