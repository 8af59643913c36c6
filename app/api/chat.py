"""``/v1/chat/completions`` and ``/v1/completions``, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.body import Call
from app.api.facts import legacy_logprobs, times, timings, token_logprobs, usage
from app.api.infill import before_suffix
from app.api.json_text import as_json
from app.api.replies import Gathered, Shown, answer
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


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router = APIRouter(route_class=Call)

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions")
    async def chat(asked: ChatCompletion, http: Request) -> Response:
        requests = await service.chat_requests(asked, http)
        return await answered(ChatReply(service, asked, requests))

    @router.post("/v1/chat/completions/input_tokens")
    @router.post("/chat/completions/input_tokens")
    async def count(asked: ChatCompletion, http: Request) -> dict[str, Any]:
        request = (await service.chat_requests(asked, http))[0]
        found = await answer(service.backend, Render(request))
        return {"object": "response.input_tokens", "input_tokens": found.n_tokens}

    @router.post("/v1/completions")
    async def complete(asked: Completion, http: Request) -> Response:
        if asked.suffix:
            asked = await before_suffix(service, asked, http)
        requests, _ = await service.completion_requests(asked, http)
        return await answered(TextReply(service, asked, requests))

    return router


async def answered(reply: ChatReply | TextReply) -> Response:
    """The answer to a call, as a stream if it asks for one."""
    if reply.asked.stream:
        await reply.replies.start()
        return reply.stream_type(reply.replies, reply.chunks())
    await reply.replies.finish()
    return await as_json(reply.whole)


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
        return [self._chunk([], **self._figures())]

    def _figures(self) -> dict[str, Any]:
        choices = self.replies.choices
        found = {"usage": usage(choices, self.asked.n_choices)}
        if len(choices) == 1 and choices[0].done is not None:
            found["timings"] = timings(choices[0].done)
        return found


class ChatReply(_Reply):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    asked: ChatCompletion

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, gathered in enumerate(self.replies.choices):
            parser = _parser(self.asked, Opening(gathered.opening, gathered.calls))
            deltas = joined([*parser.feed(gathered.text), *parser.finish()])
            message, called = message_of(deltas)
            reason = _reason(gathered.done, called is not None and not parser.in_call)
            if self.asked.functions:
                message, reason = _in_old_form(message), _OLD.get(reason, reason)
            choice = {"index": number, "message": message, "finish_reason": reason}
            if self.asked.n_probs is not None:
                shown = [token.chances for token in gathered.shown]
                choice["logprobs"] = {"content": token_logprobs(shown)}
            choices.append(choice)
        more = self._figures()
        if self.asked.verbose:
            first = self.replies.choices[0]
            prompt = first.done.prompt if first.done is not None else ""
            more["__verbose"] = {"prompt": prompt, "content": first.text}
        return {**self._head, "choices": choices, **more}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | str]:
        streams = [ChatStream(self.asked) for _ in self.replies.choices]
        for number in range(len(streams)):
            delta = {"role": "assistant", "content": None}
            yield self._chunk([{"index": number, "delta": delta, "finish_reason": None}])
        async for number, event in self.replies.events():
            gathered = self.replies.choices[number]
            if self.asked.return_progress and (progress := gathered.progress(event)):
                choice = {"index": number, "delta": {}, "finish_reason": None}
                more = times(gathered, self.asked)
                yield self._chunk([choice], prompt_progress=progress, **more)
            shown = gathered.shown if self.asked.n_probs is not None else None
            for choice in streams[number].take(event, shown):
                yield self._chunk([{"index": number, **choice}], **times(gathered, self.asked))
        for chunk in self._end():
            yield chunk
        yield DONE


def _parser(asked: ChatCompletion, opening: Opening) -> ReplyParser:
    return ReplyParser(opening.calls if asked.uses_tools else None, opening.mark, asked.tools)


class ChatStream:
    """The chunks of one choice."""

    def __init__(self, asked: ChatCompletion) -> None:
        self._asked = asked
        self._in_old_form = bool(asked.functions)
        self._parser = _parser(asked, Opening(""))
        self._n_calls = 0
        self._n_shown = 0  # tokens whose probabilities have appeared in a chunk

    def take(self, event: Event, shown: Sequence[Shown] | None = None) -> list[dict[str, Any]]:
        """The chunks for an event. ``shown`` are the reply's tokens, if they give probabilities."""
        deltas: list[Delta] = []
        if isinstance(event, Opening):
            self._parser = _parser(self._asked, event)
        elif isinstance(event, Tokens):
            deltas = self._parser.feed("".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            deltas = self._parser.finish()
            if shown is not None and len(shown) > self._n_shown and not deltas:
                deltas = [Content("")]
        choices = []
        for fields in map(self._fields, deltas):
            if self._in_old_form:
                fields = _in_old_form(fields)
            choice: dict[str, Any] = {"delta": fields, "finish_reason": None}
            if shown is not None:
                more = [token.chances for token in shown[self._n_shown :]]
                choice["logprobs"] = {"content": token_logprobs(more)}
                self._n_shown = len(shown)
            choices.append(choice)
        if isinstance(event, Done):
            reason = _reason(event, self._n_calls > 0 and not self._parser.in_call)
            reason = _OLD.get(reason, reason) if self._in_old_form else reason
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


def _reason(done: Done | None, has_calls: bool = False) -> str:
    """Why a reply ended. ``has_calls`` if it has some, and they are complete."""
    if done is None or done.finish_reason != "stop":
        return "length"
    return "tool_calls" if has_calls else "stop"


_OLD = {"tool_calls": "function_call"}


def _in_old_form(message: dict[str, Any]) -> dict[str, Any]:
    """A message, or a part of one, whose call has the form that OpenAI's API had before tools."""
    calls = message.pop("tool_calls", None)
    return {**message, "function_call": calls[0]["function"]} if calls else message


class TextReply(_Reply):
    kind = chunk_kind = "text_completion"
    asked: Completion

    def whole(self) -> dict[str, Any]:
        choices = [
            TextStream(number, request).choice(gathered.text, gathered, _reason(gathered.done))
            for number, (request, gathered) in enumerate(self._all())
        ]
        return {**self._head, "choices": choices, **self._figures()}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | str]:
        streams = [TextStream(number, request) for number, (request, _) in enumerate(self._all())]
        for stream, (request, gathered) in zip(streams, self._all(), strict=True):
            if request.echo and request.logprobs is None:
                yield self._chunk([stream.choice("", gathered)])
        async for number, event in self.replies.events():
            stream, gathered = streams[number], self.replies.choices[number]
            if isinstance(event, Tokens):
                text = "".join(text for text, _ in event.pieces)
                yield self._chunk([stream.choice(text, gathered)])
            elif isinstance(event, Done):
                yield self._chunk([stream.choice("", gathered, _reason(event))])
        for chunk in self._end():
            yield chunk
        yield DONE

    def _all(self) -> Iterable[tuple[ChatRequest, Gathered]]:
        return zip(self.replies.requests, self.replies.choices, strict=True)


class TextStream:
    """The chunks of one choice. Each has the tokens that came after the one before it; the first
    begins with the prompt, if that is wanted."""

    def __init__(self, number: int, request: ChatRequest) -> None:
        self._number, self._has_logprobs = number, request.logprobs is not None
        self._echo = request.echo or ""
        self._at = len(self._echo)  # the character at which the reply goes on
        self._n_prompt = self._n_shown = 0  # tokens of the prompt and the reply that have appeared

    def choice(self, text: str, gathered: Gathered, reason: str | None = None) -> dict[str, Any]:
        text, self._echo = self._echo + text, ""
        prompt, shown = gathered.prompt[self._n_prompt :], gathered.shown[self._n_shown :]
        self._n_prompt, self._n_shown = len(gathered.prompt), len(gathered.shown)
        # The prompt's tokens may have more than its text, at the start: BOS, or a space.
        start = self._at - sum(len(token.text) for token in prompt)
        self._at += sum(len(token.text) for token in shown)
        tokens = [*prompt, *shown]
        return {
            "index": self._number,
            "text": text,
            "logprobs": legacy_logprobs(tokens, start) if self._has_logprobs and tokens else None,
            "finish_reason": reason,
        }
