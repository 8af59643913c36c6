"""``/v1/chat/completions`` and ``/v1/completions``, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.api.facts import legacy_logprobs, timings, token_logprobs, usage
from app.api.json_text import finite
from app.api.replies import answer, while_connected
from app.api.schemas import ChatCompletion, Completion
from app.api.service import DONE, FINGERPRINT, Service, Stream
from app.worker.messages import ChatRequest, Done, Event, Opening, Render, Tokens
from speculation.chat.reply_parser import (
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
    ReplyParser,
    joined,
)
from speculation.chat.tools import ToolFormat, tool_format


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions")
    async def chat(asked: ChatCompletion, http: Request) -> Response:
        requests = await service.chat_requests(asked, http)
        return await answered(ChatReply(service, asked, requests), http)

    @router.post("/v1/chat/completions/input_tokens")
    @router.post("/chat/completions/input_tokens")
    async def count(asked: ChatCompletion, http: Request) -> dict[str, Any]:
        request = (await service.chat_requests(asked, http))[0]
        found = await answer(service.backend, Render(request))
        return {"object": "response.input_tokens", "input_tokens": found.n_tokens}

    @router.post("/v1/completions")
    async def complete(asked: Completion, http: Request) -> Response:
        requests, _ = await service.completion_requests(asked, http)
        return await answered(TextReply(service, asked, requests), http)

    return router


async def answered(reply: ChatReply | TextReply, http: Request) -> Response:
    """The answer to a call, as a stream if it asks for one."""
    if reply.asked.stream:
        await while_connected(http, reply.replies.start())
        return reply.stream_type(reply.replies, reply.chunks())
    await while_connected(http, reply.replies.finish())
    return JSONResponse(finite(reply.whole()))


class _Reply:
    """A call's answer: what its chunks and its whole have in common."""

    kind: str
    chunk_kind: str
    stream_type = Stream
    asked: ChatCompletion | Completion

    def __init__(
        self, service: Service, asked: ChatCompletion | Completion, requests: Sequence[ChatRequest]
    ) -> None:
        self.replies = service.replies(requests)
        self.asked = asked
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.kind.startswith('chat') else 'cmpl'}-{uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": service.name(),
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices, **more}

    def _end(self) -> list[dict[str, Any]]:
        """The chunks after the last choice has ended."""
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._chunk([], usage=usage(self.replies.choices), **self._timings())]

    def _timings(self) -> dict[str, Any]:
        done = [choice.done for choice in self.replies.choices]
        return {"timings": timings(done[0])} if len(done) == 1 and done[0] is not None else {}


class ChatReply(_Reply):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    asked: ChatCompletion

    def __init__(
        self, service: Service, asked: ChatCompletion, requests: Sequence[ChatRequest]
    ) -> None:
        super().__init__(service, asked, requests)
        uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        template = service.facts.tool_template
        self._format: ToolFormat | None = tool_format(template) if uses_tools else None

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, gathered in enumerate(self.replies.choices):
            parser = ReplyParser(self._format, gathered.opening)
            deltas = joined([*parser.feed(gathered.text), *parser.finish()])
            message, reason = message_of(deltas)
            choice = {
                "index": number,
                "message": message,
                "finish_reason": reason or _reason(gathered.done),
            }
            if self.asked.n_probs is not None:
                choice["logprobs"] = {"content": token_logprobs(gathered.chances)}
            choices.append(choice)
        more: dict[str, Any] = {"usage": usage(self.replies.choices), **self._timings()}
        if self.asked.verbose:
            first = self.replies.choices[0]
            prompt = first.done.prompt if first.done is not None else ""
            more["__verbose"] = {"prompt": prompt, "content": first.text}
        return {**self._head, "choices": choices, **more}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | str]:
        streams = [ChatStream(self._format) for _ in self.replies.choices]
        for number in range(len(streams)):
            delta = {"role": "assistant", "content": None}
            yield self._chunk([{"index": number, "delta": delta, "finish_reason": None}])
        async for number, event in self.replies.events():
            gathered = self.replies.choices[number]
            if self.asked.return_progress and (progress := gathered.progress(event)):
                choice = {"index": number, "delta": {}, "finish_reason": None}
                yield self._chunk([choice], prompt_progress=progress)
            for choice in streams[number].take(event, self.asked.n_probs is not None):
                yield self._chunk([{"index": number, **choice}])
        for chunk in self._end():
            yield chunk
        yield DONE


class ChatStream:
    """The chunks of one choice."""

    def __init__(self, format_: ToolFormat | None) -> None:
        self._format = format_
        self._parser = ReplyParser(format_)
        self._n_calls = 0
        self._chances: list[Any] = []  # of tokens that have not appeared in a chunk yet

    def take(self, event: Event, with_logprobs: bool) -> list[dict[str, Any]]:
        deltas: list[Delta] = []
        if isinstance(event, Opening):
            self._parser = ReplyParser(self._format, event.mark)
        elif isinstance(event, Tokens):
            self._chances += event.chances
            deltas = self._parser.feed("".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            deltas = self._parser.finish()
            if with_logprobs and self._chances and not deltas:
                deltas = [Content("")]
        choices = []
        for fields in map(self._fields, deltas):
            choice: dict[str, Any] = {"delta": fields, "finish_reason": None}
            if with_logprobs:
                choice["logprobs"] = {"content": token_logprobs(self._chances)}
                self._chances = []
            choices.append(choice)
        if isinstance(event, Done):
            reason = "tool_calls" if self._n_calls else _reason(event)
            choices.append({"delta": {}, "finish_reason": reason})
        return choices

    def _fields(self, delta: Delta) -> dict[str, Any]:
        """The fields of a chunk's ``delta``."""
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallArguments):
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
        self._n_calls += 1
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.index, "id": _call_id(), "type": "function", "function": function}
        return {"tool_calls": [call]}


def _call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def message_of(deltas: Sequence[Delta]) -> tuple[dict[str, Any], str | None]:
    """The message of a whole reply, and ``tool_calls`` as the reason for its end if it has some."""
    content, reasoning, calls = "", "", []
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, Reasoning):
            reasoning += delta.text
        elif isinstance(delta, CallStart):
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": _call_id(), "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += delta.text  # type: ignore[index]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if not calls:
        return message, None
    return {**message, "content": content or None, "tool_calls": calls}, "tool_calls"


def _reason(done: Done | None) -> str:
    return "stop" if done is not None and done.finish_reason == "stop" else "length"


class TextReply(_Reply):
    kind = chunk_kind = "text_completion"
    asked: Completion

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(
                number, self._echo(number) + gathered.text, gathered.chances, _reason(gathered.done)
            )
            for number, gathered in enumerate(self.replies.choices)
        ]
        figures: Mapping[str, Any] = {"usage": usage(self.replies.choices), **self._timings()}
        return {**self._head, "choices": choices, **figures}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | str]:
        for number in range(len(self.replies.choices)):
            if self._echo(number):
                yield self._chunk([self._choice(number, self._echo(number), [], None)])
        async for number, event in self.replies.events():
            if isinstance(event, Tokens):
                text = "".join(text for text, _ in event.pieces)
                yield self._chunk([self._choice(number, text, list(event.chances), None)])
            elif isinstance(event, Done):
                yield self._chunk([self._choice(number, "", [], _reason(event))])
        for chunk in self._end():
            yield chunk
        yield DONE

    def _echo(self, number: int) -> str:
        if not self.asked.echo:
            return ""
        return "".join(p for p in self.replies.requests[number].prompt if isinstance(p, str))

    def _choice(
        self, number: int, text: str, chances: list[Any], reason: str | None
    ) -> dict[str, Any]:
        has_logprobs = self.replies.requests[number].logprobs is not None and chances
        return {
            "index": number,
            "text": text,
            "logprobs": legacy_logprobs(chances) if has_logprobs else None,
            "finish_reason": reason,
        }
