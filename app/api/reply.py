"""The answer to a call, as a stream or as a whole. Each API has a class that writes it;
``Conversation`` is what all chats have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import ApiError, error_body
from app.api.json_text import as_json, dumps
from app.api.replies import Gathered, Shown
from app.api.schemas import ChatCompletion, Completion
from app.api.service import Service
from app.worker.messages import ChatRequest, Done, Event, Opening, Tokens
from speculation.chat.reply_parser import CallStart, Content, Delta, ReplyParser, joined

PING_SECONDS = 2.0  # clients and proxies give up a stream that stays silent
Chunk = Mapping[str, Any] | str


class Reply(ABC):
    """A call's answer.

    has_names  whether a stream's events have their ``type`` as a name. While such a stream is
               silent, an event tells that it lives: to Codex, a comment does not
    """

    has_names = False

    def __init__(
        self, service: Service, asked: ChatCompletion | Completion, requests: Sequence[ChatRequest]
    ) -> None:
        self.replies = service.replies(requests)
        self.model = service.name()
        self._streams = asked.stream

    async def answer(self) -> Response:
        """The answer, as a stream if the call asks for one."""
        if self._streams:
            await self.replies.start()
            return _Stream(self)
        await self.replies.finish()
        return await as_json(self.whole)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The stream's events."""
        try:
            for chunk in self.start():
                yield chunk
            async for number, event in self.replies.events():
                for chunk in self.take(number, event, self.replies.choices[number]):
                    yield chunk
            for chunk in self.end():
                yield chunk
        except ApiError as error:
            for chunk in self.failed(error):
                yield chunk

    def start(self) -> Iterable[Chunk]:
        return ()

    @abstractmethod
    def take(self, number: int, event: Event, gathered: Gathered) -> Iterable[Chunk]:
        """The stream's events for an event of one choice."""

    def end(self) -> Iterable[Chunk]:
        """The stream's events after all choices have ended."""
        return ()

    def failed(self, error: ApiError) -> Iterable[Chunk]:
        """The stream's events for an error that ends it."""
        return [error.body]

    @abstractmethod
    def whole(self) -> Any:
        """The answer, once the replies have ended."""


@dataclass
class _Parsing:
    """How far a choice of a conversation is read."""

    parser: ReplyParser
    n_shown: int = 0  # tokens whose probabilities have appeared
    has_calls: bool = False


class Conversation(Reply):
    """The answer to a chat completion, in any API's words."""

    def __init__(
        self, service: Service, asked: ChatCompletion, requests: Sequence[ChatRequest]
    ) -> None:
        super().__init__(service, asked, requests)
        self.asked = asked
        self._parsing: dict[int, _Parsing] = {}  # by number, once the engine takes the tools

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if self.asked.return_progress and (progress := gathered.progress(event)):
            yield from self.progress(number, progress)
        if number not in self._parsing:
            self._parsing[number] = _Parsing(self._parser(Opening("")))
        state, deltas = self._parsing[number], list[Delta]()
        if isinstance(event, Opening):
            state.parser = self._parser(event)
        elif isinstance(event, Tokens):
            deltas = state.parser.feed("".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            deltas = state.parser.finish()
            if len(gathered.shown) > state.n_shown and not deltas:
                deltas = [Content("")]
        for delta in deltas:
            shown = gathered.shown[state.n_shown :]
            state.n_shown += len(shown)
            state.has_calls |= isinstance(delta, CallStart)
            yield from self.delta(number, delta, shown)
        if isinstance(event, Done):
            has_calls = state.has_calls and not state.parser.in_call
            yield from self.ended(number, reason_of(event, has_calls))

    def parsed(self, number: int) -> tuple[list[Delta], str]:
        """A whole choice, and why it ended."""
        gathered = self.replies.choices[number]
        parser = self._parser(Opening(gathered.opening, gathered.calls))
        deltas = joined([*parser.feed(gathered.text), *parser.finish()])
        has_calls = any(isinstance(delta, CallStart) for delta in deltas)
        return deltas, reason_of(gathered.done, has_calls and not parser.in_call)

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterable[Chunk]:
        """The events for a part of the prompt that was read."""
        return ()

    @abstractmethod
    def delta(self, number: int, delta: Delta, shown: Sequence[Shown]) -> Iterable[Chunk]:
        """The events for more of a choice. ``shown`` are the tokens that came with it, if their
        probabilities are asked for."""

    @abstractmethod
    def ended(self, number: int, reason: str) -> Iterable[Chunk]:
        """The events for the end of a choice."""

    def _parser(self, opening: Opening) -> ReplyParser:
        calls = opening.calls if self.asked.uses_tools else None
        return ReplyParser(calls, opening.mark, self.asked.tools)


def reason_of(done: Done | None, has_calls: bool = False) -> str:
    """Why a reply ended, in OpenAI's words. ``has_calls`` if it has some, and they are complete."""
    if done is None or done.finish_reason != "stop":
        return "length"
    return "tool_calls" if has_calls else "stop"


class _Stream(StreamingResponse):
    """Server-sent events. A client that goes away ends the work."""

    def __init__(self, reply: Reply) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__((), headers=headers, media_type="text/event-stream")
        self._reply = reply
        self._n_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.replies.close()

    async def stream_response(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async for chunk in self._reply.chunks():
                self._n_sent += 1
                await send(self._written(chunk))
        except Exception as error:
            await send(self._written(error_body(str(error), 500)))
            raise
        finally:
            pinging.cancel()
        await send({"type": "http.response.body", "body": b""})

    def _written(self, chunk: Chunk) -> Message:
        """An event as it is sent."""
        data = f"data: {chunk if isinstance(chunk, str) else dumps(chunk)}\n\n"
        if self._reply.has_names and "type" in chunk:  # not an error that nobody expected
            data = f"event: {chunk['type']}\n{data}"  # type: ignore[index]
        return {"type": "http.response.body", "body": data.encode(), "more_body": True}

    async def _ping(self, send: Send) -> None:
        while True:
            n_sent = self._n_sent
            await asyncio.sleep(PING_SECONDS)
            if self._n_sent == n_sent:
                comment = {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
                await send(self._written({"type": "ping"}) if self._reply.has_names else comment)
