"""What the server tells of requests for text: a line at the end of each, how far a long prompt is,
and figures of the last ones, for the page. Their texts only to an owner who has asked for them.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from dataclasses import replace
from pathlib import PurePath
from time import perf_counter, time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.facts import Gathered
from app.worker.messages import ChatRequest, Event, Failed, LoadedModel, Prefill
from speculation.meter import rate
from speculation.system.console import say

PROGRESS_SECONDS = 5.0  # between two lines about one prompt
MOST_KEPT = 200
MOST_TEXT = 50_000  # characters of a prompt or a reply that are kept
_PAGE = ("/page/", "/gradio_api/", "/assets/", "/static/")  # asked for all the time


class Call:
    """A request to the server.

    owner    whose it is, as in ``Owners``
    choices  what came of each reply that it asked for
    failed   the kind of the failure that ended them
    latest   the last requests for text, the newest first
    texts    its prompt and reply when it has ended; None if they are not kept
    """

    def __init__(self, name: str = "", client: str = "", latest: Latest | None = None) -> None:
        self.status, self.owner, self.failed = 0, "", ""
        self.choices: list[Gathered] = []
        self.latest = Latest() if latest is None else latest
        self.texts: dict[str, str] | None = None
        self._name, route = name, name.partition(" ")[2]
        self._about = {"id": id(self), "at": time(), "route": route, "client": client}
        self._kept: dict[str, Any] | None = None  # when it has ended
        self._began = self._told = perf_counter()

    def writes(self, model: LoadedModel | None, owner: str = "", route: str = "") -> None:
        """It asks for text, so it is one of the last that did. ``route`` is what the page calls
        its own."""
        self.owner = owner or self.owner
        self._about["route"] = route or self._about["route"]
        self._about["model"] = "" if model is None else PurePath(model.spec.model).name
        self.texts = {} if self.owner in self.latest.readers else None
        self.latest.appendleft(self)

    def asked(self, request: ChatRequest) -> ChatRequest:
        """What the backend is asked for: with the prompt's text, if that is kept."""
        return request if self.texts is None else replace(request, show_prompt=True)

    def take(self, event: Event) -> None:
        """An event of the replies that the page asks for, one after the other."""
        if not self.choices or self.choices[-1].done is not None:
            self.choices.append(Gathered())
        self.choices[-1].take(event)
        if isinstance(event, Failed):
            self.failed = event.kind

    def hear(self, event: Event, n_reused: int) -> None:
        """Tell how much of a prompt is read, now and then."""
        now = perf_counter()
        if isinstance(event, Prefill) and now - self._told > PROGRESS_SECONDS:
            self._told, total = now, event.total + 1
            cached = f", {n_reused:,} of them from the cache" if n_reused else ""
            share = 100 * event.done // total
            say(f"{self._name}: {event.done:,} of {total:,} prompt tokens read ({share}%){cached}")

    def end(self) -> None:
        """Print the line of a request that has ended, if anybody wants to know of it. A reply of
        the page goes on."""
        is_quiet = any(part in self._name for part in _PAGE)
        is_look = not self._name.startswith("POST ")
        is_fine = self.status < (500 if is_quiet else 400) and (is_quiet or is_look)
        if not (is_fine or (is_look and self.status == 503)):  # it asks whether a model is there
            told = self._figures() + self._ending()
            say(f"{self._name} {self.status or 'no answer'}: {'; '.join(told)}")
        if not is_quiet:
            self.close()

    def close(self) -> None:
        """Nothing more comes: keep the figures, and the texts if they are wanted."""
        self._kept = {**self.as_json(), "end": ", ".join(self._ending()), "is_running": False}
        if self.texts is not None:
            prompts = {one.done.prompt: None for one in self.choices if one.done is not None}
            texts = {"prompt": prompts, "reply": [one.text for one in self.choices]}
            self.texts = {name: "\n\n".join(one)[-MOST_TEXT:] for name, one in texts.items()}
        self.choices = []

    def as_json(self) -> dict[str, Any]:
        """Its figures so far."""
        if self._kept is not None:
            return self._kept
        found = [one.done or one.so_far for one in self.choices]
        names = ("n_prompt", "n_reused", "n_tokens", "n_accepted")
        sums = {name: sum(getattr(one, name) for one in found) for name in names}
        seconds = sum(one.decode_seconds + one.first_seconds for one in found)
        per_second = rate(sums["n_tokens"], sum(bool(one.n_tokens) for one in found), seconds)
        read = [one.prefill for one in self.choices if one.prefill is not None and not one.ids]
        now = f"reading, {read[0].done:,} of {read[0].total + 1:,}" if read else "waiting"
        return {
            **self._about,
            **sums,
            "per_second": round(per_second, 1),
            "read_seconds": sum(one.prefill_seconds - one.first_seconds for one in found),
            "end": "writing" if any(one.ids for one in self.choices) else now,
            "is_running": True,
        }

    def _figures(self) -> list[str]:
        sums = self.as_json()
        n_prompt, n_reused, n_tokens = sums["n_prompt"], sums["n_reused"], sums["n_tokens"]
        if not n_prompt:
            return [f"{perf_counter() - self._began:.2f} s"]
        seconds = sums["read_seconds"]
        read = f", read at {(n_prompt - n_reused) / seconds:.1f}/s" if seconds > 0 else ""
        told = [f"{n_prompt:,} prompt tokens, {n_reused:,} cached{read}"]
        if firsts := [one.first for one in self.choices if one.ids]:
            speed = f" at {sums['per_second']:.1f}/s" if sums["per_second"] else ""
            unit = "token" if n_tokens == 1 else "tokens"
            share = 100 * sums["n_accepted"] // max(1, n_tokens)
            told.append(f"first token after {min(firsts) - self._began:.2f} s")
            told.append(f"{n_tokens:,} {unit}{speed}, {share}% drafted")
        return told

    def _ending(self) -> list[str]:
        if self.failed:
            return [f"failed: {self.failed}"]
        reasons = {one.done.finish_reason if one.done else "client left" for one in self.choices}
        return sorted(reasons)


class Latest(deque[Call]):
    """The last requests for text, the newest first. New ones of ``readers`` keep their texts."""

    def __init__(self, most: int = 0) -> None:
        super().__init__(maxlen=most)
        self.readers: set[str] = set()


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call:
    """The request that is being answered here."""
    return _current.get() or Call()


class RequestLog:
    """ASGI middleware, the outermost: keeps its requests for text, and prints their lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._latest = Latest(MOST_KEPT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # As it was sent: without control characters, which a terminal would obey.
        path = scope.get("raw_path", b"").decode("ascii", "replace")
        program = Headers(scope=scope).get("user-agent", "").partition(" ")[0]
        client = f"{(scope.get('client') or ('',))[0]} {program:.40}".strip()
        call = Call(f"{scope['method']} {path:.100}", client, self._latest)
        _current.set(call)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            call.end()
