"""What OpenAI's responses and Anthropic's messages share: both are chat completions in other words.

Their requests become a ``ChatCompletion``, and their events are made of its chunks. So tools,
schemas, reasoning, stop reasons and counts are those of a chat completion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from app.api.errors import ApiError
from app.api.json_text import dumps
from app.api.schemas import ChatCompletion
from app.api.service import Stream

SseEvent = dict[str, Any]  # its ``type`` is also the name of the server-sent event


class EventStream(Stream):
    """A stream whose events have names. An event tells that it lives: to Codex, comments do not."""

    ping = 'event: ping\ndata: {"type":"ping"}\n\n'

    def written(self, chunk: Any) -> str:
        if "type" not in chunk:  # an error that nobody expected
            return super().written(chunk)
        return f"event: {chunk['type']}\ndata: {dumps(chunk)}\n\n"


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def chat_completion(fields: Mapping[str, Any]) -> ChatCompletion:
    """The chat completion that another API's request asks for; fields of None are left out.

    Raises RequestValidationError, which names the chat completion's field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in ("n", "n_cmpl", "functions", "function_call"):  # which these APIs do not have
        given.pop(name, None)
    given["stream_options"] = {"include_usage": True}
    try:
        return ChatCompletion.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def defined(tool: dict[str, Any]) -> str:
    """The definition of a chat completion's tool, for a message. The tool is marked, so that the
    prompt's beginning, with the list of tools, stays as it was before and in the cache."""
    tool["in_message"] = True
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return f"<function>{dumps(function)}</function>"


def refuse(field: str, why: str) -> ApiError:
    """The error for a field that would change the reply and is not supported."""
    return ApiError(f"{field} is not supported: {why}", param=field)


@dataclass
class Block:
    """A part of a reply.

    kind     ``reasoning``, ``text`` or ``call``
    index    its place in the reply
    id, name of a call
    text     of the reasoning, of the answer, or the JSON of a call's arguments, so far
    """

    kind: str
    index: int
    id: str = ""
    name: str = ""
    text: str = ""


class Translator(ABC):
    """Turns the deltas of a chat completion into another API's events, block by block."""

    def __init__(self) -> None:
        self._block: Block | None = None
        self._n_blocks = 0

    def take(self, choice: Mapping[str, Any]) -> Iterator[SseEvent]:
        """The events of a chunk's choice."""
        delta, logprobs = choice.get("delta") or {}, choice.get("logprobs") or {}
        if delta.get("reasoning_content"):
            yield from self._more("reasoning", delta["reasoning_content"])
        if delta.get("content") or (logprobs and delta.get("content") == ""):
            yield from self._more("text", delta["content"], logprobs.get("content") or ())
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if call.get("id"):
                yield from self._begin(Block("call", self._n_blocks, call["id"], function["name"]))
            yield from self._more("call", function.get("arguments") or "")

    def finish(self, *, is_whole: bool) -> Iterator[SseEvent]:
        """The events after the last delta. ``is_whole``: the reply was not cut short."""
        if not self._n_blocks:  # clients expect one block at least
            yield from self._begin(Block("text", 0))
        yield from self._end_block(is_whole=is_whole)

    def _more(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> Iterator[SseEvent]:
        if self._block is None or self._block.kind != kind:
            yield from self._begin(Block(kind, self._n_blocks))
        assert self._block is not None
        if text or logprobs:
            self._block.text += text
            yield from self.added(self._block, text, logprobs)

    def _begin(self, block: Block) -> Iterator[SseEvent]:
        yield from self._end_block(is_whole=True)
        self._block = block
        self._n_blocks += 1
        yield from self.begun(block)

    def _end_block(self, *, is_whole: bool) -> Iterator[SseEvent]:
        if self._block is not None:
            block, self._block = self._block, None
            yield from self.ended(block, is_whole=is_whole)

    @abstractmethod
    def begun(self, block: Block) -> Iterator[SseEvent]:
        """The events for a block that begins."""

    @abstractmethod
    def added(self, block: Block, text: str, logprobs: Sequence[Any]) -> Iterator[SseEvent]:
        """The events for more of a block."""

    @abstractmethod
    def ended(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
        """The events for a block that has ended."""


def as_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of a whole chat completion as one chunk of a stream."""
    return {**choice, "delta": choice["message"]}
