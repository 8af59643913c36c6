"""Responses that the server keeps in memory, so that a later one may follow them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.api.answers import dumps
from app.api.errors import ApiError

MOST_BYTES = 64 * 2**20  # of responses and their conversations


class Kept(NamedTuple):
    """A response, the items of its conversation with its own, and the bytes of both as JSON."""

    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    n_bytes: int


class History:
    """Responses in memory, up to a limit. The least recently used are forgotten first. Each has an
    ``owner``, as ``memory_of`` tells clients apart."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._most_bytes, self._n_bytes = most_bytes, 0

    def get(self, id_: str, owner: str, *, remove: bool = False) -> Kept:
        """Raises ApiError if it is not kept, or another client's."""
        kept = self._kept.pop((owner, id_), None)
        if kept is None:
            raise ApiError(
                f"there is no response {id_!r:.80}: it was not stored, or has been forgotten. Send "
                "the conversation's items as input",
                404,
                param="previous_response_id",
            )
        if remove:
            self._n_bytes -= kept.n_bytes
        else:
            self._kept[owner, id_] = kept  # as the one used last
        return kept

    def add(
        self, owner: str, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        kept = Kept(response, items, len(dumps([response, *items])))
        self._kept[owner, str(response["id"])] = kept
        self._n_bytes += kept.n_bytes
        while self._n_bytes > self._most_bytes:
            self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes
