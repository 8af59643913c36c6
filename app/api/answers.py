"""Answers as JSON, compact and without the infinities that it lacks, and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

FEW = 16  # of which each may be large
PING = b": ping\n\n"  # an event that says nothing

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError:  # an infinity, which is rare
        return _encode(finite(value))


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The value as an answer. Half of a character, which JSON may have but UTF-8 has not, becomes
    a question mark."""
    return Response(encoded(dumps(value)), status, headers, "application/json")


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


async def as_json_in_thread(make: Callable[[], Any]) -> Response:
    """What ``make`` returns, made and written in a thread: the probabilities of a long reply, or
    many vectors, take seconds, in which other calls go on."""
    text = await asyncio.to_thread(lambda: "".join(_pieces(make())))
    return Response(text, media_type="application/json")


def _pieces(value: Any) -> Iterator[str]:
    """``dumps(value)`` in pieces, between which others run: each is one call of C."""
    if isinstance(value, dict) and value and all(type(key) is str for key in value):
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{dumps(key)}:"
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list) and len(value) > FEW:
        for i in range(0, len(value), FEW):
            yield f"{',' if i else '['}{dumps(value[i : i + FEW])[1:-1]}"
        yield "]"
    else:
        yield dumps(value)


def finite(value: Any) -> Any:
    """The value with None for every infinity, as llama-server gives it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class EventStream(StreamingResponse):
    """An answer of events; ``on_end`` is called when they, or the client, have gone."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        always = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(
            events, headers={**always, **(headers or {})}, media_type="text/event-stream"
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
