"""What all routes do with a body before it is read: a limit, and an end with the client."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from app.api.errors import ApiError
from app.api.replies import while_connected

MOST_VALUES = 5 * 2**18  # 1.3 million take half a second; the longest list of tokens has fewer
# In JSON: an escaped backslash, a character in two halves, or half a character.
_HALVES = re.compile(
    rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89a-fA-F][0-9a-fA-F]{2}", re.DOTALL
)


class Limited(APIRoute):
    """A route whose bodies have at most MOST_VALUES values, counted by commas and brackets. Those
    in texts count too: a text with so many fits no context. Half a character, as programs send
    that cut a text inside one, becomes U+FFFD."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_limited(http: Request) -> Response:
            body = await http.body()
            n = sum(map(body.count, (b",", b"[", b"{"))) if len(body) > MOST_VALUES else 0
            if n > MOST_VALUES:
                raise ApiError(
                    f"the body has {n:,} commas and brackets; send at most {MOST_VALUES:,}", 413
                )
            if b"\\u" in body:
                http._body = _HALVES.sub(_whole, body)
            return await handle(http)

        return handle_limited


class Call(Limited):
    """A route of the endpoint: work on its answer ends when the client leaves."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_connected(http: Request) -> Response:
            await http.body()  # which comes before the client can be seen to leave
            return await while_connected(http, handle(http))

        return handle_connected


def _whole(found: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if len(found[0]) == len(r"\ud800") else found[0]
