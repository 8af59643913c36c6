"""ReplyText: incremental detokenization into whole characters, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from batching.errors import InvalidParameter
from batching.llama.model import Model
from batching.tree import NO_LIMIT
from speculation.chat.reasoning import LONGEST_MARK, start_of_answer


class Token(NamedTuple):
    """A generated token.

    text     the characters it completed; empty if it ends inside a character. One that is not
             complete becomes U+FFFD with the next token, or with the last one
    drafted  whether it was an accepted draft token
    """

    id: int
    text: str
    drafted: bool


class ReplyText:
    """The generated text. ``take`` adds the tokens of a step, ``release`` returns those to show.

    Text that may turn out to be part of a stop string is held back. Stop strings count only in
    the answer, not in the reasoning before it.

    ids      the tokens, including an end-of-generation token
    ends     tokens after which the text may end for a reason other than its length
    stopped_by  the stop string that occurred, before which the text ends; empty while there is none
    """

    def __init__(
        self,
        model: Model,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        opening: str = "",
    ) -> None:
        """``opening`` is the opening mark of the reasoning if the prompt ended with it.

        Raises InvalidParameter for an empty stop string.
        """
        stop = [stop] if isinstance(stop, str) else stop
        if any(not text for text in stop):
            raise InvalidParameter("a stop string is empty; leave it out")
        self.ids: list[int] = []
        self.ends: Container[int] = range(model.n_vocab) if stop else model.ends
        self.stopped_by = ""
        self._model = model
        self._stop = tuple(stop)
        self._opening = opening
        self._answer: int | None = 0  # where the answer starts; None while the model reasons
        self._is_settled = not stop  # that does not change any more
        self._max_tokens = NO_LIMIT if max_tokens is None else int(max_tokens)  # NumPy's, too
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # the text does not end inside a character
        self._pieces: list[str] = []  # characters that each token completed
        self._joined = ""  # the first ``_n_joined`` pieces
        self._n_joined = 0
        self._held: list[tuple[int, str, bool]] = []  # id, text, drafted: not released yet
        self._n_released = 0  # tokens released or held
        self._n_shown = 0  # characters released; counted only if there are stop strings

    @property
    def shown(self) -> str:
        """The text so far, without a stop string and without control tokens at its end."""
        if self._n_joined < len(self._pieces):
            self._joined += "".join(self._pieces[self._n_joined :])
            self._n_joined = len(self._pieces)
        return self._joined

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Add a step's tokens. Returns how many of them belong to the text, and why the text ends
        after those (``stop``, ``length``), or None."""
        if self._is_whole and not self._stop and len(self.ids) + len(tokens) < self._max_tokens:
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
            self._pieces.append(self._decoder.decode(b"", final=True))
            return "stop"
        is_last = len(self.ids) >= self._max_tokens
        piece = self._decoder.decode(self._model.piece(token), final=is_last)
        self._is_whole = not self._decoder.getstate()[0]
        self._pieces.append(piece)
        if self._stop and self._completes_stop(piece):
            return "stop"
        return "length" if is_last else None

    def _completes_stop(self, piece: str) -> bool:
        """Whether the last ``piece`` completes a stop string; if so, cuts the text before it."""
        before = len(self._joined)
        if not self._is_settled:
            self._answer = start_of_answer(self.shown, self._opening, before)
            if self._answer is None:
                return False
            before = max(before, self._answer)
            self._is_settled = self._answer > 0 or len(self._joined) > LONGEST_MARK
        for stop in self._stop:
            at = self.shown.find(stop, max(self._answer or 0, before - len(stop) + 1))
            if at >= 0:
                self.stopped_by = stop
                self._joined = self._joined[:at]
        return bool(self.stopped_by)

    def release(self, n: int, n_drafted: int) -> Iterable[Token]:
        """Release the next ``n`` tokens, of which the first ``n_drafted`` were drafted; returns all
        that can be shown now."""
        first = self._n_released
        self._n_released += n
        ids, pieces = self.ids[first : first + n], self._pieces[first : first + n]
        drafted = [True] * n_drafted + [False] * (n - n_drafted)
        if not self._stop:  # nothing is ever held back
            return map(Token, ids, pieces, drafted)
        self._held += zip(ids, pieces, drafted, strict=True)
        if self.stopped_by:
            return self.rest()
        answer = len(self._joined) if self._answer is None else self._answer
        keep = max(_overlap(self._joined[answer:], stop) for stop in self._stop)
        n_free = len(self._joined) - keep
        found = []
        while self._held and self._n_shown + len(self._held[0][1]) <= n_free:
            found.append(self._pop(self._held[0][1]))
        return found

    def rest(self) -> Iterator[Token]:
        """What is still held back, after the text has ended."""
        while self._held:
            room = len(self.shown) - self._n_shown
            yield self._pop(self._held[0][1][: max(0, room)])

    def _pop(self, text: str) -> Token:
        token, _, drafted = self._held.pop(0)
        self._n_shown += len(text)
        return Token(token, text, drafted)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
