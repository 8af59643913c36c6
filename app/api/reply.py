"""The answer to a call, as a stream or as a whole. Each API has a class that writes it;
``Conversation`` is what all chats have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from fastapi.responses import Response

from app.api.answers import PING, EventStream, as_json_in_thread, dumps, encoded
from app.api.errors import ApiError, error_body
from app.api.facts import Gathered, Shown, timings
from app.api.sampling import Sampling
from app.api.service import Service
from app.worker.messages import ChatRequest, Done, Event, Opening, Tokens
from speculation.chat.reply_parser import CallStart, Content, Delta, Reasoning, ReplyParser

Asked = TypeVar("Asked", bound=Sampling)

Chunk = Mapping[str, Any] | str


def new_id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


@dataclass
class Reply(ABC, Generic[Asked]):
    """A call's answer.

    has_names  whether a stream's events have their ``type`` as a name. While such a stream is
               silent, an event tells that it lives: to Codex, a comment does not
    """

    service: Service
    asked: Asked
    requests: Sequence[ChatRequest]
    has_names: ClassVar = False

    def __post_init__(self) -> None:
        self.replies = self.service.replies(self.requests)
        self.model = self.service.name()

    async def answer(self) -> Response:
        """The answer, as a stream if the call asks for one. A whole one is made of the same
        events."""
        if self.asked.stream:
            await self.replies.start()
            return EventStream(self._chunks(), on_end=self.replies.close)
        try:
            async for number, event in self.replies.events():
                if event is not None:
                    for _ in self.take(number, event, self.replies.choices[number]):
                        pass
        finally:
            self.replies.close()
        return await as_json_in_thread(self.whole)

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self.start():
                yield self._written(chunk)
            async for number, event in self.replies.events():
                if event is None:
                    yield self._written({"type": "ping"}) if self.has_names else PING
                    continue
                for chunk in self.take(number, event, self.replies.choices[number]):
                    yield self._written(chunk)
            for chunk in self.end():
                yield self._written(chunk)
        except ApiError as error:
            for chunk in self.failed(error):
                yield self._written(chunk)
        except Exception as error:
            yield self._written(error_body(str(error), 500))
            raise

    def _written(self, chunk: Chunk) -> bytes:
        """An event as it is sent."""
        data = f"data: {chunk if isinstance(chunk, str) else dumps(chunk)}\n\n"
        if self.has_names and "type" in chunk:  # not an error that nobody expected
            data = f"event: {chunk['type']}\n{data}"  # type: ignore[index]
        return encoded(data)

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

    def times(self, gathered: Gathered) -> dict[str, Any]:
        """The field of a chunk with the times so far, if they are asked for."""
        return {"timings": timings(gathered.so_far)} if self.asked.timings_per_token else {}


@dataclass
class Block:
    """A part of a reply.

    kind     ``reasoning``, ``text`` or ``call``
    index    its place in the reply
    n_calls  how many calls come before it
    id, name of a call
    text     of the reasoning, of the answer, or the JSON of a call's arguments, so far
    """

    kind: str
    index: int
    n_calls: int
    id: str = ""
    name: str = ""
    text: str = ""


@dataclass
class _Choice:
    """How far a choice of a conversation is read."""

    parser: ReplyParser
    n_shown: int = 0  # tokens whose probabilities have appeared
    blocks: list[Block] = field(default_factory=list)
    reason: str = ""  # for its end, in OpenAI's words


class Conversation(Reply[Asked]):
    """The answer to a chat, in any API's words, written block by block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.written: dict[int, _Choice] = {}  # by number, once the engine takes the tools

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if self.asked.return_progress and (progress := gathered.progress(event)):
            yield from self.progress(number, progress)
        if number not in self.written:
            self.written[number] = _Choice(self._parser(Opening("")))
        choice, deltas = self.written[number], list[Delta]()
        if isinstance(event, Opening):
            choice.parser = self._parser(event)
        elif isinstance(event, Tokens):
            deltas = choice.parser.feed("".join(text for text, _ in event.pieces))
        elif isinstance(event, Done):
            deltas = choice.parser.finish()
            if len(gathered.shown) > choice.n_shown and not deltas:
                deltas = [Content("")]
        for delta in deltas:
            shown = gathered.shown[choice.n_shown :]
            choice.n_shown += len(shown)
            yield from self._more(number, delta, shown)
        if isinstance(event, Done):
            has_calls = any(block.kind == "call" for block in choice.blocks)
            choice.reason = reason_of(event, has_calls and not choice.parser.in_call)
            if not choice.blocks:  # clients expect one block at least
                yield from self._begin(number, "text")
            yield from self.closed(choice.blocks[-1], is_whole=choice.reason != "length")
            yield from self.ended(number, choice.reason, event)

    def _parser(self, opening: Opening) -> ReplyParser:
        tools, choice = self.requests[0].tools, self.requests[0].tool_choice
        return ReplyParser(
            opening.calls if tools and choice != "none" else None, opening.mark, tools
        )

    def _more(self, number: int, delta: Delta, shown: Sequence[Shown]) -> Iterator[Chunk]:
        if isinstance(delta, CallStart):
            yield from self._begin(number, "call", delta.name, shown)
            return
        blocks = self.written[number].blocks
        kind = {Content: "text", Reasoning: "reasoning"}.get(type(delta), "call")
        if not blocks or blocks[-1].kind != kind:
            yield from self._begin(number, kind)
        blocks[-1].text += delta.text
        yield from self.added(number, blocks[-1], delta.text, shown)

    def _begin(
        self, number: int, kind: str, name: str = "", shown: Sequence[Shown] = ()
    ) -> Iterator[Chunk]:
        blocks = self.written[number].blocks
        if blocks:
            yield from self.closed(blocks[-1], is_whole=True)
        n_calls = sum(block.kind == "call" for block in blocks)
        id_ = f"call_{uuid4().hex[:24]}" if kind == "call" else ""
        blocks.append(Block(kind, len(blocks), n_calls, id_, name))
        yield from self.begun(number, blocks[-1], shown)

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterable[Chunk]:
        """The events for a part of the prompt that was read."""
        return ()

    def begun(self, number: int, block: Block, shown: Sequence[Shown]) -> Iterable[Chunk]:
        """The events for a block that begins. ``shown`` are the tokens that came with it, if their
        probabilities are asked for."""
        return ()

    @abstractmethod
    def added(
        self, number: int, block: Block, text: str, shown: Sequence[Shown]
    ) -> Iterable[Chunk]:
        """The events for more of a block."""

    def closed(self, block: Block, *, is_whole: bool) -> Iterable[Chunk]:
        """The events for a block that has ended."""
        return ()

    @abstractmethod
    def ended(self, number: int, reason: str, done: Done) -> Iterable[Chunk]:
        """The events for the end of a choice, for a ``reason`` in OpenAI's words."""


def reason_of(done: Done | None, has_calls: bool = False) -> str:
    """Why a reply ended, in OpenAI's words. ``has_calls`` if it has some, and they are complete."""
    if done is None or done.finish_reason != "stop":
        return "length"
    return "tool_calls" if has_calls else "stop"
