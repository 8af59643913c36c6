"""IdleTexts: texts copied out of the cache, for requests that go on with them.

A text that nobody writes costs time in the cache: attention passes over its cells. SmolLM2-135M
took 28% longer for a token beside 6,000 idle cells on two cores, and three times as long without
flash attention. Copying 1,000 tokens out and in takes a few milliseconds, reading them again
seconds. What does not fit goes to disk, if that is wanted (``files``), and all when the engine is
closed.

From a GPU's memory llama.cpp copies each token that was written beside others by itself, layer by
layer, while many are read at once. So copies are timed there, and end if reading is quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from batching.cache import n_kept
from batching.llama.hardware import available_memory
from speculation.average import Average
from speculation.idle.files import SPEED, IdleText, TextFiles, begins, is_continued

_MAX_BYTES = 2**33  # of main memory, and at most a quarter of what is available
_USUALLY_AVAILABLE = 2**32  # bytes, where the system does not tell
WORTH_KEEPING = 32  # tokens; fewer are read as quickly


class IdleTexts:
    """Keeps the texts used last, up to a number of bytes; older ones in ``files``, if given."""

    def __init__(
        self,
        max_bytes: int | None = None,
        files: TextFiles | None = None,
        read_seconds: float = inf,
        *,
        is_limited: bool = False,
    ) -> None:
        """``max_bytes``: None = by the memory that is available. ``read_seconds``: what a copy of a
        token must not take; by default it always pays. ``is_limited`` as in ``SequenceCache``."""
        if max_bytes is None:
            max_bytes = min(_MAX_BYTES, (available_memory() or _USUALLY_AVAILABLE) // 4)
        self._max_bytes, self.files, self._read_seconds = max_bytes, files, read_seconds
        self._is_limited = is_limited
        self._texts: list[IdleText] = []  # least recently used first
        self._token_seconds = Average(0.001)  # of copying

    @property
    def pays(self) -> bool:
        """Whether copies so far took no more time than they may."""
        return self._token_seconds.value <= self._read_seconds

    def put(
        self,
        tokens: Sequence[int],
        n_prompt: int,
        copy: Callable[[], Any],
        saved: Sequence[tuple[int, Any]] = (),
        *,
        on_disk: bool = True,
        is_last: bool = False,
    ) -> None:
        """Keep a text if it is worth a copy, which ``copy`` makes: if it is not short, not here
        already, and a copy pays or ``is_last``. It replaces those that it continues, but none that
        may go to disk by one that may not. ``saved`` as in ``SequenceCache``, the rest as in
        ``IdleText``.
        """
        is_here = any(
            begins(tokens, text.tokens) and text.on_disk >= on_disk for text in self._texts
        )
        if len(tokens) < WORTH_KEEPING or is_here or not (self.pays or is_last):
            return
        with self._token_seconds.timing(len(tokens)):
            new = IdleText(tuple(tokens), n_prompt, [*saved, (len(tokens), copy())], on_disk)
        self._texts = [
            text for text in self._texts if text.on_disk > on_disk or not is_continued(text, tokens)
        ]
        self._append(new)

    def _append(self, new: IdleText) -> None:
        self._texts.append(new)
        while self._n_bytes > self._max_bytes:
            oldest = self._texts.pop(0)
            if self.files is not None and not self.files.is_behind:
                self._write(oldest)

    @property
    def _n_bytes(self) -> int:
        """Texts that began alike have states in common."""
        states = {id(state): len(state) for text in self._texts for _, state in text.states}
        return sum(states.values())

    def _write(self, text: IdleText) -> None:
        if self.files is not None and text.on_disk:
            self.files.put(text)

    def best(self, prompt: Sequence[int], more_than: int = 0) -> tuple[IdleText | None, int]:
        """The text that saves most of reading ``prompt``, and how many tokens they share.

        None unless it saves some more than ``more_than`` tokens, what restoring it costs deducted.
        """
        files = self.files.texts if self.files is not None else []
        found: list[tuple[int, int, IdleText]] = []
        for i, text in enumerate([*self._texts, *files]):
            n = n_kept(text.tokens, prompt, text.states if self._is_limited else None)
            cost = len(text.tokens) // SPEED if i >= len(self._texts) else 0
            found.append((n - cost, n, text))
        for gain, n, best in sorted(found, key=lambda item: item[0], reverse=True):
            if gain < more_than + WORTH_KEEPING:
                break
            if self.files is None or best not in files:
                return best, n
            read = self.files.read(best)
            if read is not None:
                return read, n
        return None, 0

    def use(self, text: IdleText, prompt: Sequence[int]) -> None:
        """A text went back into the cache. If ``prompt`` continues it, it goes on there."""
        if text in self._texts:
            self._texts.remove(text)
        if not is_continued(text, prompt):
            self._append(text)

    def close(self) -> None:
        """Write the texts to ``files``, if there are any: as many as there is time for, those used
        last first."""
        for text in reversed(self._texts):
            self._write(text)
        if self.files is not None:
            self.files.close()
