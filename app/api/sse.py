"""Server-sent events, for the endpoint and for the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

PING = b": ping\n\n"


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


async def with_pings(
    events: AsyncIterator[bytes], seconds: float, ping: bytes = PING
) -> AsyncIterator[bytes]:
    """The events, and ``ping`` whenever none comes for so long: clients and proxies give up a
    stream that stays silent."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            if not (await asyncio.wait([coming], timeout=seconds))[0]:
                yield ping
            elif (event := coming.result()) is None:
                return
            else:
                yield event
                coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
