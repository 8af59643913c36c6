"""ReplyText: tokens become whole characters, and what may become a stop string is kept back."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from batching.errors import InvalidParameter
from batching.llama.model import Model
from batching.tree import NO_LIMIT


class Token(NamedTuple):
    """A generated token.

    text     the characters that it completed: whole ones, so possibly none yet
    drafted  whether it came from a draft (else from the target itself)
    """

    id: int
    text: str
    drafted: bool


class ReplyText:
    """What was generated: ``take`` it in step by step, ``release`` what can be shown of it.

    ids      the tokens, an end-of-generation token included
    ends     those it may end with for another reason than its length
    stopped  whether a stop string is complete; the text ends before it
    """

    def __init__(self, model: Model, stop: Sequence[str] = (), max_tokens: int | None = None):
        """Raises InvalidParameter for a stop string that is empty."""
        stop = [stop] if isinstance(stop, str) else stop
        if any(not text for text in stop):
            raise InvalidParameter("a stop string is empty; leave it out")
        self.ids: list[int] = []
        self.ends: Container[int] = range(model.n_vocab) if stop else model.ends
        self.stopped = False
        self._model = model
        self._stop = tuple(stop)
        self._most = NO_LIMIT if max_tokens is None else max_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # no character is unfinished
        self._pieces: list[str] = []  # characters that each token completed
        self._joined = ""  # the first so many of them
        self._n_joined = 0
        self._held: list[tuple[int, str, bool]] = []  # id, text, drafted: not released yet
        self._n_released = 0  # tokens that were released or are held
        self._n_shown = 0  # characters that were released, where there are stop strings

    @property
    def shown(self) -> str:
        """The text so far, without a stop string and without control tokens at its end."""
        if self._n_joined < len(self._pieces):
            self._joined += "".join(self._pieces[self._n_joined :])
            self._n_joined = len(self._pieces)
        return self._joined

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Take in what a step yielded: how many of the tokens belong to the text, and why it ends
        with the last of these (``stop``, ``length``), or None."""
        if self._is_whole and not self._stop and len(self.ids) + len(tokens) < self._most:
            texts = self._model.texts(tokens)
            if texts is not None:
                self.ids += tokens
                self._pieces += texts
                return len(tokens), None
        for n, token in enumerate(tokens, 1):
            reason = self._take(token)
            if reason is not None:
                return n, reason
        return len(tokens), None

    def _take(self, token: int) -> str | None:
        self.ids.append(token)
        if token in self._model.ends:
            self._pieces.append("")
            return "stop"
        piece = self._decoder.decode(self._model.piece(token))
        self._is_whole = not self._decoder.getstate()[0]
        self._pieces.append(piece)
        if self._stop and self._completes_stop(piece):
            return "stop"
        return "length" if len(self.ids) >= self._most else None

    def _completes_stop(self, piece: str) -> bool:
        """Whether a stop string is complete with the text's last ``piece``; cuts it off then."""
        before = len(self._joined)
        for stop in self._stop:
            at = self.shown.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.stopped = True
                self._joined = self._joined[:at]
        return self.stopped

    def release(self, n: int, n_drafted: int) -> Iterable[Token]:
        """The tokens that can be shown now that the next ``n`` of those taken in are due, the first
        ``n_drafted`` of them from drafts."""
        first = self._n_released
        self._n_released += n
        ids, pieces = self.ids[first : first + n], self._pieces[first : first + n]
        drafted = [True] * n_drafted + [False] * (n - n_drafted)
        if not self._stop:  # nothing is ever kept back
            return map(Token, ids, pieces, drafted)
        self._held += zip(ids, pieces, drafted, strict=True)
        if self.stopped:
            return self._cut()
        keep = max(_overlap(self._joined, stop) for stop in self._stop)
        n_free = len(self._joined) - keep
        found = []
        while self._held and self._n_shown + len(self._held[0][1]) <= n_free:
            found.append(self._pop(self._held[0][1]))
        return found

    def rest(self) -> Iterator[Token]:
        """What was kept back, once the text has ended; an unfinished character shows as U+FFFD."""
        tail = self._decoder.decode(b"", final=True)
        if tail and not self.stopped:
            self._pieces.append(tail)
            if self._held:
                token, text, drafted = self._held[-1]
                self._held[-1] = (token, text + tail, drafted)
            elif self.ids:
                self._held.append((self.ids[-1], tail, False))
                self._n_shown = len(self.shown) - len(tail)
        yield from self._cut()

    def _cut(self) -> Iterator[Token]:
        while self._held:
            room = len(self.shown) - self._n_shown
            yield self._pop(self._held[0][1][: max(0, room)])

    def _pop(self, text: str) -> Token:
        token, _, drafted = self._held.pop(0)
        self._n_shown += len(text)
        return Token(token, text, drafted)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
