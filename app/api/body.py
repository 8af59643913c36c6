"""Bodies of requests: their JSON as pydantic models, and a limit to what is read of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, model_validator

from app.api.errors import ApiError
from app.api.replies import while_connected

MOST_VALUES = 5 * 2**18  # 1.3 million take half a second; the longest list of tokens has fewer


class Posted(BaseModel):
    """A request, or a part of one. A null is as good as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Limited(APIRoute):
    """A route whose bodies have at most MOST_VALUES values, counted by commas and brackets. Those
    in texts count too: a text with so many fits no context."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_limited(http: Request) -> Response:
            body = await http.body()
            n = sum(map(body.count, (b",", b"[", b"{"))) if len(body) > MOST_VALUES else 0
            if n > MOST_VALUES:
                raise ApiError(
                    f"the body has {n:,} commas and brackets; send at most {MOST_VALUES:,}", 413
                )
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
