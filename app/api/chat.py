"""``/v1/chat/completions`` and ``/v1/completions``, as OpenAI's API has them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.body import Call
from app.api.facts import Gathered, Shown, legacy_logprobs, timings, token_logprobs, usage
from app.api.infill import before_suffix
from app.api.reply import Asked, Block, Chunk, Conversation, Reply, reason_of
from app.api.requests import ChatCompletion, Completion
from app.api.service import FINGERPRINT, Engine
from app.worker.messages import ChatRequest, Done, Event, Tokens

router = APIRouter(route_class=Call)


@router.post("/v1/chat/completions")
@router.post("/chat/completions")
async def chat(asked: ChatCompletion, http: Request, service: Engine) -> Response:
    return await ChatReply(service, asked, await service.chat_requests(asked, http)).answer()


@router.post("/v1/chat/completions/input_tokens")
@router.post("/chat/completions/input_tokens")
async def count(asked: ChatCompletion, http: Request, service: Engine) -> dict[str, Any]:
    n_tokens = (await service.rendered(asked, http)).n_tokens
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.post("/v1/completions")
async def complete(asked: Completion, http: Request, service: Engine) -> Response:
    if asked.suffix:
        asked = await before_suffix(service, asked, http)
    requests, _ = await service.completion_requests(asked, http)
    return await TextReply(service, asked, requests).answer()


class _Written(Reply[Asked]):
    """What OpenAI's two forms of an answer have in common."""

    names: ClassVar = ("cmpl", "text_completion", "text_completion")  # of ids, answers, chunks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._head: dict[str, Any] = {
            "id": f"{self.names[0]}-{uuid4().hex}",
            "object": self.names[1],
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, *choices: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self.names[2], "choices": [*choices], **more}

    def end(self) -> Iterator[Chunk]:
        if self.asked.stream_options.include_usage:
            yield self.chunk(**self._figures())
        yield "[DONE]"

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(*each) for each in enumerate(self.replies.choices)]
        return {**self._head, "choices": choices, **self._figures()}

    def choice(self, number: int, gathered: Gathered) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def _figures(self) -> dict[str, Any]:
        choices = self.replies.choices
        found = {"usage": usage(choices, self.asked.n)}
        if len(choices) == 1 and choices[0].done is not None:
            found["timings"] = timings(choices[0].done)
        return found


class ChatReply(_Written[ChatCompletion], Conversation[ChatCompletion]):
    """The answer as a chat completion."""

    names: ClassVar = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def start(self) -> Iterator[Chunk]:
        for number in range(len(self.replies.choices)):
            delta = {"role": "assistant", "content": None}
            yield self.chunk({"index": number, "delta": delta, "finish_reason": None})

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterator[Chunk]:
        yield self._part(number, prompt_progress=progress)

    def begun(self, number: int, block: Block, shown: Sequence[Shown]) -> Iterator[Chunk]:
        if block.kind == "call":
            call = {"index": block.n_calls, **_call(block)}
            yield self._part(number, {"delta": {"tool_calls": [call]}, **self._logprobs(shown)})

    def added(
        self, number: int, block: Block, text: str, shown: Sequence[Shown]
    ) -> Iterator[Chunk]:
        delta: dict[str, Any] = {_NAMES.get(block.kind, ""): text}
        if block.kind == "call":
            more = {"index": block.n_calls, "function": {"arguments": text}}
            delta = {"tool_calls": [more]}
        yield self._part(number, {"delta": delta, **self._logprobs(shown)})

    def ended(self, number: int, reason: str, done: Done) -> Iterator[Chunk]:
        yield self._part(number, {"finish_reason": reason})

    def choice(self, number: int, gathered: Gathered) -> dict[str, Any]:
        written = self.written[number]
        texts = {"text": "", "reasoning": ""}
        for block in written.blocks:
            if block.kind in texts:
                texts[block.kind] += block.text
        calls = [_call(block) for block in written.blocks if block.kind == "call"]
        message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message |= {"content": texts["text"] or None, "tool_calls": calls}
        choice = {"index": number, "message": message, "finish_reason": written.reason}
        return {**choice, **self._logprobs(gathered.shown)}

    def whole(self) -> dict[str, Any]:
        found, first = super().whole(), self.replies.choices[0]
        if self.asked.verbose and first.done is not None:
            found["__verbose"] = {"prompt": first.done.prompt, "content": first.text}
        return found

    def _part(self, number: int, fields: Mapping[str, Any] | None = None, **more: Any) -> Chunk:
        choice = {"index": number, "delta": {}, "finish_reason": None, **(fields or {})}
        return self.chunk(choice, **more, **self.times(self.replies.choices[number]))

    def _logprobs(self, shown: Sequence[Shown]) -> dict[str, Any]:
        if self.requests[0].logprobs is None:
            return {}
        return {"logprobs": {"content": token_logprobs(shown)}}


_NAMES = {"text": "content", "reasoning": "reasoning_content"}


def _call(block: Block) -> dict[str, Any]:
    """A call with its arguments so far."""
    function = {"name": block.name, "arguments": block.text}
    return {"id": block.id, "type": "function", "function": function}


class TextReply(_Written[Completion]):
    """The answer as OpenAI's older completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choices = [_Text(number, request) for number, request in enumerate(self.requests)]

    def start(self) -> Iterator[Chunk]:
        for number, request in enumerate(self.requests):
            if request.echo and request.logprobs is None:
                yield self._chunk(number, "")

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterable[Chunk]:
        if isinstance(event, Tokens):
            yield self._chunk(number, "".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            yield self._chunk(number, "", reason_of(event))

    def choice(self, number: int, gathered: Gathered) -> dict[str, Any]:
        whole = _Text(number, self.requests[number])
        return whole.more(gathered.text, gathered, reason_of(gathered.done))

    def _chunk(self, number: int, text: str, reason: str | None = None) -> Chunk:
        return self.chunk(self._choices[number].more(text, self.replies.choices[number], reason))


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
