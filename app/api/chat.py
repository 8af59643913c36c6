"""``/v1/chat/completions`` and ``/v1/completions``, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.body import Call
from app.api.facts import legacy_logprobs, times, timings, token_logprobs, usage
from app.api.infill import before_suffix
from app.api.replies import Gathered, Shown, answer
from app.api.reply import Chunk, Conversation, Reply, reason_of
from app.api.schemas import ChatCompletion, Completion
from app.api.service import FINGERPRINT, Service
from app.worker.messages import ChatRequest, Done, Event, Render, Tokens
from speculation.chat.reply_parser import CallArguments, CallStart, Content, Delta, Reasoning

DONE = "[DONE]"


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router = APIRouter(route_class=Call)

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions")
    async def chat(asked: ChatCompletion, http: Request) -> Response:
        requests = await service.chat_requests(asked, http)
        return await ChatReply(service, asked, requests).answer()

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
        return await TextReply(service, asked, requests).answer()

    return router


class _Written:
    """What OpenAI's two forms of an answer have in common."""

    def __init__(self, kind: str, chunk_kind: str, reply: ChatReply | TextReply) -> None:
        self._reply = reply
        self._chunk_kind = chunk_kind
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": reply.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self._chunk_kind, "choices": [*choices], **more}

    def whole(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices, **self._figures()}

    def end(self) -> Iterator[Chunk]:
        options = self._reply.asked.stream_options
        if options is not None and options.include_usage:
            yield self.chunk(**self._figures())
        yield DONE

    def _figures(self) -> dict[str, Any]:
        choices = self._reply.replies.choices
        found = {"usage": usage(choices, self._reply.asked.n)}
        if len(choices) == 1 and choices[0].done is not None:
            found["timings"] = timings(choices[0].done)
        return found


class ChatReply(Conversation):
    """The answer as a chat completion."""

    def __init__(
        self, service: Service, asked: ChatCompletion, requests: Sequence[ChatRequest]
    ) -> None:
        super().__init__(service, asked, requests)
        self._written = _Written("chat.completion", "chat.completion.chunk", self)

    def start(self) -> Iterator[Chunk]:
        for number in range(len(self.replies.choices)):
            delta = {"role": "assistant", "content": None}
            choice = {"index": number, "delta": delta, "finish_reason": None}
            yield self._written.chunk(choice)

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterator[Chunk]:
        yield self._chunk(number, {}, prompt_progress=progress)

    def delta(self, number: int, delta: Delta, shown: Sequence[Shown]) -> Iterator[Chunk]:
        fields: dict[str, Any]
        if isinstance(delta, Content):
            fields = {"content": delta.text}
        elif isinstance(delta, Reasoning):
            fields = {"reasoning_content": delta.text}
        elif isinstance(delta, CallStart):
            fields = {"tool_calls": [{"index": delta.index, **_call(delta.name)}]}
        else:
            more = {"index": delta.index, "function": {"arguments": delta.text}}
            fields = {"tool_calls": [more]}
        yield self._chunk(number, {"delta": fields, **self._logprobs(shown)})

    def ended(self, number: int, reason: str) -> Iterator[Chunk]:
        yield self._chunk(number, {"finish_reason": reason})

    def end(self) -> Iterator[Chunk]:
        return self._written.end()

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, gathered in enumerate(self.replies.choices):
            deltas, reason = self.parsed(number)
            choice = {"index": number, "message": message_of(deltas), "finish_reason": reason}
            choices.append({**choice, **self._logprobs(gathered.shown)})
        found = self._written.whole(choices)
        if self.asked.verbose:
            first = self.replies.choices[0]
            prompt = first.done.prompt if first.done is not None else ""
            found["__verbose"] = {"prompt": prompt, "content": first.text}
        return found

    def _chunk(self, number: int, fields: Mapping[str, Any], **more: Any) -> Chunk:
        choice = {"index": number, "delta": {}, "finish_reason": None, **fields}
        return self._written.chunk(
            choice, **more, **times(self.replies.choices[number], self.asked)
        )

    def _logprobs(self, shown: Sequence[Shown]) -> dict[str, Any]:
        if self.asked.n_probs is None:
            return {}
        return {"logprobs": {"content": token_logprobs([token.chances for token in shown])}}


def _call(name: str) -> dict[str, Any]:
    """A call whose arguments follow."""
    function = {"name": name, "arguments": ""}
    return {"id": call_id(), "type": "function", "function": function}


def call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message of a whole reply."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, Reasoning):
            reasoning += delta.text
        elif isinstance(delta, CallArguments):
            calls[-1]["function"]["arguments"] += delta.text
        else:
            calls.append(_call(delta.name))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "content": content or None, "tool_calls": calls} if calls else message


class TextReply(Reply):
    """The answer as OpenAI's older completion."""

    def __init__(
        self, service: Service, asked: Completion, requests: Sequence[ChatRequest]
    ) -> None:
        super().__init__(service, asked, requests)
        self.asked = asked
        self._written = _Written("text_completion", "text_completion", self)
        self._choices = [_Text(number, request) for number, request in enumerate(requests)]

    def start(self) -> Iterator[Chunk]:
        for number, request in enumerate(self.replies.requests):
            if request.echo and request.logprobs is None:
                yield self._chunk(number, "")

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if isinstance(event, Tokens):
            yield self._chunk(number, "".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            yield self._chunk(number, "", reason_of(event))

    def end(self) -> Iterable[Chunk]:
        return self._written.end()

    def whole(self) -> dict[str, Any]:
        found = zip(self._choices, self.replies.choices, strict=True)
        return self._written.whole(
            [
                choice.more(gathered.text, gathered, reason_of(gathered.done))
                for choice, gathered in found
            ]
        )

    def _chunk(self, number: int, text: str, reason: str | None = None) -> Chunk:
        more = self._choices[number].more(text, self.replies.choices[number], reason)
        return self._written.chunk(more)


class _Text:
    """The parts of one choice. Each has the tokens that came after the one before it; the first
    begins with the prompt, if that is wanted."""

    def __init__(self, number: int, request: ChatRequest) -> None:
        self._number, self._has_logprobs = number, request.logprobs is not None
        self._echo = request.echo or ""
        self._at = len(self._echo)  # the character at which the reply goes on
        self._n_prompt = self._n_shown = 0  # tokens of the prompt and the reply that have appeared

    def more(self, text: str, gathered: Gathered, reason: str | None = None) -> dict[str, Any]:
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
