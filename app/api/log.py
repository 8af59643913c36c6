"""What the server prints of requests to the endpoint: a line at the end of each, and how far a long
prompt is. Never their texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.facts import Gathered
from app.worker.messages import Done, Event, Prefill
from speculation.meter import rate
from speculation.system.console import say

PROGRESS_SECONDS = 5.0  # between two lines about one prompt
_PAGE = ("/page/", "/gradio_api/", "/assets/", "/static/")  # asked for all the time


class Call:
    """A request to the server.

    choices  what came of each reply that it asked for
    failed   the kind of the failure that ended them
    """

    def __init__(self, name: str = "") -> None:
        self.status = 0
        self.choices: Sequence[Gathered] = ()
        self.failed = ""
        self._name = name
        self._began = self._told = perf_counter()

    def hear(self, event: Event, n_reused: int) -> None:
        """Tell how much of a prompt is read, now and then."""
        now = perf_counter()
        if isinstance(event, Prefill) and now - self._told > PROGRESS_SECONDS:
            self._told, total = now, event.total + 1
            share = 100 * event.done // total
            cached = f", {n_reused:,} of them from the cache" if n_reused else ""
            say(f"{self._name}: {event.done:,} of {total:,} prompt tokens read ({share}%){cached}")

    def end(self) -> None:
        """Print the line of a request that has ended, if anybody wants to know of it."""
        is_quiet = any(part in self._name for part in _PAGE)
        is_look = not self._name.startswith("POST ")
        is_asking = is_look and self.status == 503  # whether the model is loaded
        if is_asking or (self.status < (500 if is_quiet else 400) and (is_quiet or is_look)):
            return
        status = self.status or "no answer"
        say(f"{self._name} {status}: {'; '.join([*self._figures(), *self._ending()])}")

    def _figures(self) -> list[str]:
        found = [one.done or one.so_far for one in self.choices]
        writing = [one for one in self.choices if one.ids]
        if not any(one.n_prompt for one in found):
            return [f"{perf_counter() - self._began:.2f} s"]
        told = [
            f"{sum(one.n_prompt for one in found):,} prompt tokens, "
            f"{sum(one.n_reused for one in found):,} cached"
        ]
        if writing:
            told.append(
                f"first token after {min(one.first for one in writing) - self._began:.2f} s"
            )
            told.append(_written(found))
        return told

    def _ending(self) -> list[str]:
        if self.failed:
            return [f"failed: {self.failed}"]
        reasons = {one.done.finish_reason if one.done else "client left" for one in self.choices}
        return sorted(reasons)


def _written(found: Sequence[Done]) -> str:
    n_tokens, n_accepted = sum(one.n_tokens for one in found), sum(one.n_accepted for one in found)
    seconds = sum(one.decode_seconds + one.first_seconds for one in found)
    per_second = rate(n_tokens, sum(bool(one.n_tokens) for one in found), seconds)
    speed = f" at {per_second:.1f}/s" if per_second else ""
    unit = "token" if n_tokens == 1 else "tokens"
    return f"{n_tokens:,} {unit}{speed}, {100 * n_accepted // max(1, n_tokens)}% drafted"


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call:
    """The request that is being answered here."""
    return _current.get() or Call()


class RequestLog:
    """ASGI middleware, the outermost: prints the lines of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # As it was sent: without control characters, which a terminal would obey.
        path = scope.get("raw_path", b"").decode("ascii", "replace")
        call = Call(f"{scope['method']} {path:.100}")
        _current.set(call)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            call.end()
