"""Responses that the server keeps in memory, so that a later one may follow them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.errors import ApiError
from app.api.json_text import dumps

MOST_KEPT = 1000
MOST_KEPT_BYTES = 64 * 2**20  # of them and their conversations

Item = Mapping[str, Any]


@dataclass
class Kept:
    """A response that a later one may follow.

    owner     the client that asked for it, as ``memory_of`` tells clients apart
    items     its conversation, the response included
    n_bytes   of both, as JSON
    """

    owner: str
    response: Mapping[str, Any]
    items: Sequence[Item]
    n_bytes: int


class History:
    """Responses in memory, up to a limit. The least recently used are forgotten first. Threads may
    share it: whole responses are made in one of their own."""

    def __init__(self, most: int = MOST_KEPT, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._lock = threading.RLock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._most, self._most_bytes, self._n_bytes = most, most_bytes, 0

    def get(self, id_: str, owner: str) -> Kept:
        """Raises ApiError if it is not kept, or another client's."""
        with self._lock:
            kept = self._kept.get(id_)
            if kept is not None and kept.owner == owner:
                self._kept.move_to_end(id_)
        if kept is None or kept.owner != owner:
            raise ApiError(
                f"there is no response {id_!r:.80}: it was not stored, or has been forgotten. Send "
                "the conversation's items as input",
                404,
                param="previous_response_id",
            )
        return kept

    def add(self, owner: str, response: Mapping[str, Any], items: Sequence[Item]) -> None:
        n_bytes = len(dumps([response, *items]))
        with self._lock:
            self._kept[str(response["id"])] = Kept(owner, response, items, n_bytes)
            self._n_bytes += n_bytes
            while len(self._kept) > self._most or self._n_bytes > self._most_bytes:
                self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes

    def remove(self, id_: str, owner: str) -> None:
        with self._lock:
            self.get(id_, owner)
            self._n_bytes -= self._kept.pop(id_).n_bytes
