"""JSON for the endpoint: compact, and without the infinities that JSON does not have."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from fastapi.responses import Response

FEW = 16  # of which each may be large

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    try:
        return _encode(value)
    except ValueError:  # an infinity, which is rare
        return _encode(finite(value))


async def as_json(make: Callable[[], Any]) -> Response:
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
