"""``/v1/responses``, OpenAI's newer API: a chat completion whose history the server can keep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AliasChoices, BeforeValidator, Field, PrivateAttr, model_validator

from app.api.answers import as_json
from app.api.body import Call
from app.api.errors import ApiError, unsupported
from app.api.facts import Gathered, Shown, timings, token_logprobs
from app.api.history import History
from app.api.reply import Block, Chunk, Conversation, new_id
from app.api.requests import (
    MOST_LISTED,
    MOST_MESSAGES,
    Called,
    Chat,
    Choice,
    Content,
    Message,
    Part,
    Parts,
    Talk,
    Tool,
    ToolCall,
)
from app.api.response_tools import Offered
from app.api.sampling import OneReply, Posted, ResponseFormat, Tagged
from app.api.service import Engine, memory_of
from app.worker.messages import Done
from speculation.chat.reasoning import find_reasoning
from speculation.chat.tools import object_of

router = APIRouter(route_class=Call)


class TextConfig(Posted):
    format: ResponseFormat | None = None


class ReasoningConfig(Posted):
    effort: str | None = None


class Item(Tagged):
    """A part of a conversation."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str | dict[str, Any] = Field(default_factory=dict)
    input: str = ""
    output: Content = ""
    tools: list[Tool] = Field([], max_length=MOST_LISTED)
    needs: ClassVar = {"message": "role", "function_call": "name", "custom_tool_call": "name"}


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(Chat):
    """A request for a response."""

    input: Annotated[list[Item], Field(max_length=MOST_MESSAGES), BeforeValidator(_as_items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_tokens: int = Field(
        -1, ge=1, validation_alias=AliasChoices("max_output_tokens", "n_predict", "max_tokens")
    )
    include: list[str] = Field(default_factory=list)
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_LISTED)
    tool_choice: Choice = "auto"
    metadata: dict[str, Any] = Field(default_factory=dict)
    n: OneReply = 1
    # These would change what is answered, or when.
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    _before: list[Item] = PrivateAttr([])  # the items of the responses before it
    _offered: Offered

    @model_validator(mode="after")
    def _in_our_words(self) -> ResponsesRequest:
        self.response_format, self.reasoning_effort = self.text.format, self.reasoning.effort
        return self

    @property
    def n_probs(self) -> int | None:
        return self.top_logprobs if "message.output_text.logprobs" in self.include else None

    def follow(self, history: History, owner: str) -> None:
        """Go on from the response before it. Raises ApiError if that is not kept."""
        if self.previous_response_id is not None:
            before = history.get(self.previous_response_id, owner).items
            self._before = [Item.model_validate(item) for item in before]

    @property
    def items(self) -> list[Item]:
        """All items of the conversation."""
        return [*self._before, *self.input]

    def call(self, name: str) -> dict[str, Any]:
        """The item of a call, by the name that the model knows."""
        return self._offered.call(name)

    def talk(self) -> Talk:
        if self.background:
            raise unsupported("background", "stream the response instead")
        if self.conversation is not None:
            raise unsupported("conversation", "give previous_response_id, or all items as input")
        if self.prompt is not None:
            raise unsupported("prompt", "this server keeps no prompts; give instructions and input")
        given = [item.tools for item in self.items if item.type != "tool_search_output"]
        self._offered = Offered(chain(self.tools, *given))
        messages = messages_of(self.items, self._offered)
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        choice = self._offered.choice(self.tool_choice)
        return Talk(messages=messages, tools=self._offered.functions, tool_choice=choice)


def messages_of(items: Sequence[Item], tools: Offered) -> list[Message]:
    """The messages of a conversation. Reasoning, text and calls in a row are one message."""
    messages: list[Message] = []

    def turn(more: Parts) -> Message:
        """The assistant's message that is being put together, with more content."""
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant", content=[]))
        told = messages[-1]
        assert isinstance(told.content, list)
        told.content += more
        return told

    for item in items:
        parts: Parts = item.content if isinstance(item.content, list) else [item.content]
        if item.type == "message" and item.role == "assistant":
            turn(parts)
        elif item.type == "message":
            messages.append(Message(role=item.role, content=parts))
        elif item.type == "reasoning":
            texts = [part if isinstance(part, str) else part.text for part in parts or item.summary]
            turn([Part(type="reasoning", text=text) for text in texts])
        elif item.type in ("function_call", "custom_tool_call", "tool_search_call"):
            is_text = item.type == "custom_tool_call"
            name = tools.name(item.namespace, item.name or "tool_search")
            given = {"input": item.input} if is_text else item.arguments
            told, function = turn([]), Called(name=name, arguments=given)
            told.tool_calls = told.tool_calls or []
            told.tool_calls.append(ToolCall(id=item.call_id, function=function))
        elif item.type == "tool_search_output":
            found = tools.define(item.tools) or "No tools were found."
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=found))
        elif item.type != "additional_tools":
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
    return messages


@router.post("/v1/responses")
@router.post("/responses")
async def respond(asked: ResponsesRequest, http: Request, service: Engine) -> Response:
    asked.follow(service.history, memory_of(http))
    requests = await service.chat_requests(asked, http)
    return await ResponseReply(service, asked, requests, memory_of(http)).answer()


@router.post("/v1/responses/input_tokens")
@router.post("/responses/input_tokens")
async def count(asked: ResponsesRequest, http: Request, service: Engine) -> dict[str, Any]:
    asked.follow(service.history, memory_of(http))
    n_tokens = (await service.rendered(asked, http)).n_tokens
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.get("/v1/responses/{id_}")
async def retrieve(id_: str, http: Request, service: Engine) -> Response:
    return as_json(service.history.get(id_, memory_of(http)).response)


@router.delete("/v1/responses/{id_}")
async def delete(id_: str, http: Request, service: Engine) -> dict[str, Any]:
    service.history.get(id_, memory_of(http), remove=True)
    return {"id": id_, "object": "response", "deleted": True}


@dataclass
class ResponseReply(Conversation[ResponsesRequest]):
    """The answer as a response; its ``owner`` may go on from it later."""

    owner: str
    has_names: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        asked, sampling = self.asked, self.requests[0].sampling
        given = asked.model_dump(
            include={"tool_choice", "tools", "text"}, exclude_unset=True, by_alias=True
        )
        self._response: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.limit,
            "metadata": asked.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": asked.store,
            "temperature": sampling.get("temperature"),
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": asked.top_logprobs,
            "top_p": sampling.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }
        self._n_events = 0
        self._item: dict[str, Any] = {}
        self._logprobs: list[Any] = []

    def start(self) -> Iterator[Chunk]:
        for kind in ("created", "in_progress"):
            yield self._whole(f"response.{kind}")

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterator[Chunk]:
        yield {**self._whole("response.in_progress"), "prompt_progress": progress}

    def whole(self) -> dict[str, Any]:
        return self._response

    def ended(self, number: int, reason: str, done: Done) -> Iterator[Chunk]:
        status = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        choice = self.replies.choices[number]
        counts = {
            "input_tokens": done.n_prompt,
            "input_tokens_details": {"cached_tokens": done.n_reused, "cache_write_tokens": 0},
            "output_tokens": done.n_tokens,
            "output_tokens_details": {"reasoning_tokens": _n_reasoning(choice)},
            "total_tokens": done.n_prompt + done.n_tokens,
        }
        self._response |= {"status": status, "usage": counts, "completed_at": int(time.time())}
        if self.asked.store:
            before = [item.model_dump(exclude_unset=True) for item in self.asked.items]
            items = [*before, *self._response["output"]]
            self.service.history.add(self.owner, self._response, items)
        yield {**self._whole(f"response.{status}"), "timings": timings(done)}

    def failed(self, error: ApiError) -> Iterator[Chunk]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"code": error.facts.get("code", code), "message": error.message}
        yield self._event("error", **told, param=error.facts.get("param"))
        self._response |= {"status": "failed", "error": told}
        yield self._whole("response.failed")

    def begun(self, number: int, block: Block, shown: Sequence[Shown]) -> Iterator[Chunk]:
        if block.kind == "call":
            item: dict[str, Any] = self.asked.call(block.name)
            kind = {"function_call": "fc", "custom_tool_call": "ctc"}.get(item["type"], "tsc")
            item |= {"id": new_id(kind), "call_id": block.id}
        elif block.kind == "text":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        self._item, self._logprobs = {**item, "status": "in_progress"}, []
        self._response["output"].append(self._item)
        yield self._event("response.output_item.added", output_index=block.index, item=self._item)
        if block.kind != "call":
            yield self._part("response.content_part.added", block, part=self._content(block))

    def added(
        self, number: int, block: Block, text: str, shown: Sequence[Shown]
    ) -> Iterator[Chunk]:
        if block.kind == "call":
            if self._item["type"] == "function_call":  # others' JSON holds what the client gets
                yield self._of("response.function_call_arguments.delta", block, delta=text)
        elif block.kind == "text":
            logprobs = token_logprobs(shown)
            self._logprobs += logprobs
            yield self._part("response.output_text.delta", block, delta=text, logprobs=logprobs)
        else:
            yield self._part("response.reasoning_text.delta", block, delta=text)

    def closed(self, block: Block, *, is_whole: bool) -> Iterator[Chunk]:
        item = self._item
        item["status"] = "completed" if is_whole else "incomplete"
        if item["type"] == "function_call":
            item["arguments"] = block.text
            name = "response.function_call_arguments.done"
            yield self._of(name, block, name=item["name"], arguments=block.text)
        elif item["type"] == "custom_tool_call":
            text = item["input"] = str(object_of(block.text).get("input", ""))
            yield self._of("response.custom_tool_call_input.delta", block, delta=text)
            yield self._of("response.custom_tool_call_input.done", block, input=text)
        elif item["type"] == "tool_search_call":
            item["arguments"] = object_of(block.text)
        else:
            content = self._content(block)
            item["content"] = [content]
            if block.kind == "text":
                name, more = "response.output_text.done", {"logprobs": self._logprobs}
            else:
                name, more = "response.reasoning_text.done", {}
            yield self._part(name, block, text=block.text, **more)
            yield self._part("response.content_part.done", block, part=content)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        more = {"annotations": [], "logprobs": list(self._logprobs)}
        return {"type": "output_text", "text": block.text, **more}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return event

    def _of(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        """An event of the item that is being written."""
        return self._event(kind, item_id=self._item["id"], output_index=block.index, **fields)

    def _part(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        return self._of(kind, block, content_index=0, **fields)

    def _whole(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self._response)


def _n_reasoning(choice: Gathered) -> int:
    """How many tokens of a reply are reasoning, its marks included."""
    found, n_characters = find_reasoning(choice.text, choice.opening), 0
    if found is None:
        return 0
    for number, piece in enumerate(choice.pieces):
        if n_characters >= found.answer:
            return number
        n_characters += len(piece)
    return len(choice.pieces)
