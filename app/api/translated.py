"""What OpenAI's responses and Anthropic's messages share: both are chat completions in other words.

Their requests become a ``ChatCompletion``, and their events are made of the same deltas. So tools,
schemas, reasoning, stop reasons and counts are those of a chat completion.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from app.api.chat import call_id
from app.api.errors import ApiError
from app.api.facts import usage
from app.api.json_text import dumps
from app.api.replies import Shown
from app.api.reply import Conversation
from app.api.schemas import ChatCompletion
from app.api.service import Service
from app.worker.messages import ChatRequest, Done
from speculation.chat.reply_parser import CallArguments, CallStart, Content, Delta, Reasoning

SseEvent = dict[str, Any]  # its ``type`` is also the name of the server-sent event


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def chat_completion(fields: Mapping[str, Any]) -> ChatCompletion:
    """The chat completion that another API's request asks for; fields of None are left out.

    Raises RequestValidationError, which names the chat completion's field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in ("n", "n_cmpl"):  # which these APIs do not have
        given.pop(name, None)
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


class Blocks(Conversation):
    """Writes a chat's reply block by block.

    body  the reply so far
    """

    has_names = True

    def __init__(
        self,
        service: Service,
        asked: ChatCompletion,
        requests: Sequence[ChatRequest],
        body: dict[str, Any],
    ) -> None:
        super().__init__(service, asked, requests)
        self.body = body
        self._block: Block | None = None
        self._n_blocks = 0
        self._reason = ""

    def delta(self, number: int, delta: Delta, shown: Sequence[Shown]) -> Iterator[SseEvent]:
        if isinstance(delta, CallStart):
            yield from self._begin(Block("call", self._n_blocks, call_id(), delta.name))
        elif isinstance(delta, CallArguments):
            yield from self._more("call", delta.text)
        elif isinstance(delta, Reasoning):
            yield from self._more("reasoning", delta.text)
        elif delta.text or shown:
            yield from self._more("text", delta.text, shown)

    def ended(self, number: int, reason: str) -> Iterator[SseEvent]:
        self._reason = reason
        return iter(())

    def end(self) -> Iterator[SseEvent]:
        if not self._n_blocks:  # clients expect one block at least
            yield from self._begin(Block("text", 0))
        yield from self._end_block(is_whole=self._reason != "length")
        choice = self.replies.choices[0]
        assert choice.done is not None
        yield from self.finished(self._reason, usage([choice]), choice.done)

    def whole(self) -> dict[str, Any]:
        deltas, self._reason = self.parsed(0)
        shown: Sequence[Shown] = self.replies.choices[0].shown
        for delta in deltas:
            is_text = isinstance(delta, Content)
            for _ in self.delta(0, delta, shown if is_text else ()):
                pass
            shown = () if is_text else shown
        for _ in self.end():
            pass
        return self.body

    def _more(self, kind: str, text: str, shown: Sequence[Shown] = ()) -> Iterator[SseEvent]:
        if self._block is None or self._block.kind != kind:
            yield from self._begin(Block(kind, self._n_blocks))
        assert self._block is not None
        if text or shown:
            self._block.text += text
            yield from self.added(self._block, text, shown)

    def _begin(self, block: Block) -> Iterator[SseEvent]:
        yield from self._end_block(is_whole=True)
        self._block = block
        self._n_blocks += 1
        yield from self.begun(block)

    def _end_block(self, *, is_whole: bool) -> Iterator[SseEvent]:
        if self._block is not None:
            block, self._block = self._block, None
            yield from self.closed(block, is_whole=is_whole)

    @abstractmethod
    def begun(self, block: Block) -> Iterator[SseEvent]:
        """The events for a block that begins."""

    @abstractmethod
    def added(self, block: Block, text: str, shown: Sequence[Shown]) -> Iterator[SseEvent]:
        """The events for more of a block."""

    @abstractmethod
    def closed(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
        """The events for a block that has ended."""

    @abstractmethod
    def finished(self, reason: str, counts: Mapping[str, Any], done: Done) -> Iterator[SseEvent]:
        """The last events. ``reason`` and ``counts`` are a chat completion's."""
