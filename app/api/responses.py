"""``/v1/responses``, OpenAI's newer API: a chat completion whose history the server can keep."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from app.api.body import Call, Posted, Tagged
from app.api.chat import ChatReply, answered
from app.api.errors import ApiError
from app.api.history import History
from app.api.json_text import finite
from app.api.replies import Gathered, answer
from app.api.response_tools import Offered, Tool
from app.api.sampling import MOST_LISTED
from app.api.schemas import (
    MOST_MESSAGES,
    ChatCompletion,
    Content,
    ContentPart,
    Message,
    Parts,
    ToolChoice,
)
from app.api.service import Service, memory_of
from app.api.translated import (
    Block,
    EventStream,
    SseEvent,
    Translator,
    as_choice,
    chat_completion,
    new_id,
    refuse,
)
from app.worker.messages import ChatRequest, Render
from speculation.chat.reasoning import find_reasoning
from speculation.chat.tools import object_of


class TextConfig(Posted):
    format: dict[str, Any] = Field(default_factory=dict)


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


class ResponsesRequest(Posted, extra="allow"):
    """A request for a response. Other fields are those of a chat completion."""

    input: Annotated[list[Item], Field(max_length=MOST_MESSAGES), BeforeValidator(_as_items)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] = Field(default_factory=list)
    top_logprobs: int | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    tools: list[Tool] = Field([], max_length=MOST_LISTED)
    tool_choice: Literal["auto", "none", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] = Field(default_factory=dict)
    # These would change what is answered, or when.
    background: bool = False
    conversation: Any = None
    prompt: Any = None

    def chat(self, items: Sequence[Item], tools: Offered) -> ChatCompletion:
        """The chat completion for a conversation of ``items``. Raises ApiError."""
        if self.background:
            raise refuse("background", "stream the response instead")
        if self.conversation is not None:
            raise refuse("conversation", "give previous_response_id, or all items as input")
        if self.prompt is not None:
            raise refuse("prompt", "this server keeps no prompts; give instructions and input")
        messages = messages_of(items, tools)
        if self.instructions is not None:
            messages.insert(0, Message(role="system", content=self.instructions))
        wants_logprobs = "message.output_text.logprobs" in self.include
        return chat_completion(
            {
                **(self.model_extra or {}),
                "messages": messages,
                "model": self.model,
                "stream": self.stream,
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": wants_logprobs,
                "top_logprobs": self.top_logprobs if wants_logprobs else None,
                "response_format": _response_format(self.text.format),
                "reasoning_effort": self.reasoning.effort,
                "tools": tools.functions,
                "tool_choice": tools.choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )


def _response_format(given: Mapping[str, Any]) -> dict[str, Any] | None:
    if not given:
        return None
    if given.get("type") != "json_schema":
        return dict(given)
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


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
            turn([ContentPart(type="reasoning", text=text) for text in texts])
        elif item.type in ("function_call", "custom_tool_call", "tool_search_call"):
            is_text = item.type == "custom_tool_call"
            function = {
                "name": tools.name(item.namespace, item.name or "tool_search"),
                "arguments": {"input": item.input} if is_text else item.arguments,
            }
            call = {"id": item.call_id, "type": "function", "function": function}
            told = turn([])
            told.tool_calls = told.tool_calls or []
            told.tool_calls.append(call)
        elif item.type == "tool_search_output":
            found = tools.define(item.tools) or "No tools were found."
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=found))
        elif item.type != "additional_tools":
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
    return messages


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router, history = APIRouter(route_class=Call), History()

    def conversation(asked: ResponsesRequest, http: Request) -> tuple[list[Item], Offered]:
        """All items, those before this request included, and the tools that they and it have."""
        items = asked.input
        if asked.previous_response_id is not None:
            before = history.get(asked.previous_response_id, memory_of(http)).items
            items = [*map(Item.model_validate, before), *items]
        given = [item.tools for item in items if item.type != "tool_search_output"]
        return items, Offered(chain(asked.tools, *given))

    @router.post("/v1/responses")
    @router.post("/responses")
    async def respond(asked: ResponsesRequest, http: Request) -> Response:
        items, tools = conversation(asked, http)
        chat = asked.chat(items, tools)
        requests = await service.chat_requests(chat, http)
        kept = _Keeping(history, memory_of(http), items) if asked.store else None
        return await answered(ResponseReply(service, asked, tools, chat, requests, kept))

    @router.post("/v1/responses/input_tokens")
    @router.post("/responses/input_tokens")
    async def count(asked: ResponsesRequest, http: Request) -> dict[str, Any]:
        request = (await service.chat_requests(asked.chat(*conversation(asked, http)), http))[0]
        found = await answer(service.backend, Render(request))
        return {"object": "response.input_tokens", "input_tokens": found.n_tokens}

    @router.get("/v1/responses/{id_}")
    async def retrieve(id_: str, http: Request) -> Response:
        return JSONResponse(finite(history.get(id_, memory_of(http)).response))

    @router.delete("/v1/responses/{id_}")
    async def delete(id_: str, http: Request) -> dict[str, Any]:
        history.remove(id_, memory_of(http))
        return {"id": id_, "object": "response", "deleted": True}

    return router


@dataclass
class _Keeping:
    """Where a response is kept, with the items before it."""

    history: History
    owner: str
    items: list[Item]

    def keep(self, response: Mapping[str, Any]) -> None:
        before = [item.model_dump(exclude_unset=True) for item in self.items]
        self.history.add(self.owner, response, [*before, *response["output"]])


class ResponseReply(ChatReply):
    """A chat completion's reply as a response."""

    stream_type = EventStream

    def __init__(
        self,
        service: Service,
        asked: ResponsesRequest,
        tools: Offered,
        chat: ChatCompletion,
        requests: Sequence[ChatRequest],
        keeping: _Keeping | None,
    ) -> None:
        super().__init__(service, chat, requests)
        sampling = requests[0].sampling
        given = asked.model_dump(include={"tool_choice", "tools"}, exclude_unset=True)
        self._keeping = keeping
        self._events = ResponseEvents(
            {
                "id": new_id("resp"),
                "object": "response",
                "created_at": int(time.time()),
                "status": "in_progress",
                "background": False,
                "error": None,
                "incomplete_details": None,
                "instructions": asked.instructions,
                "max_output_tokens": asked.max_output_tokens,
                "metadata": asked.metadata,
                "model": service.name(),
                "output": [],
                "parallel_tool_calls": asked.parallel_tool_calls,
                "previous_response_id": asked.previous_response_id,
                "reasoning": {"effort": asked.reasoning.effort, "summary": None},
                "service_tier": "default",
                "store": asked.store,
                "temperature": sampling.get("temperature"),
                "text": {"format": asked.text.format or {"type": "text"}},
                "tool_choice": given.get("tool_choice", "auto"),
                "tools": given.get("tools", []),
                "top_logprobs": asked.top_logprobs or 0,
                "top_p": sampling.get("top_p", 1.0),
                "truncation": "disabled",
                "usage": None,
                "user": None,
            },
            tools,
        )

    def whole(self) -> dict[str, Any]:
        found = super().whole()
        choice = found["choices"][0]
        for _ in self._events.take(as_choice(choice)):
            pass
        for _ in self._finish(choice["finish_reason"], found):
            pass
        return self._events.response

    async def chunks(self) -> AsyncIterator[dict[str, Any] | str]:
        events, reason = self._events, "stop"
        for event in events.start():
            yield event
        try:
            async for chunk in super().chunks():
                if isinstance(chunk, str):  # the mark at the end, which this API lacks
                    continue
                if "prompt_progress" in chunk:
                    yield events.progress(chunk["prompt_progress"])
                for choice in chunk["choices"]:
                    for event in events.take(choice):
                        yield event
                    reason = choice.get("finish_reason") or reason
                if chunk.get("usage"):
                    for event in self._finish(reason, chunk):
                        yield event
        except ApiError as error:
            for event in events.failed(error):
                yield event

    def _finish(self, reason: str, chunk: Mapping[str, Any]) -> Iterator[SseEvent]:
        """The last events, with the figures of a chat completion or of its last chunk."""
        counts = response_usage(chunk["usage"], self.replies.choices)
        yield from self._events.end(reason, counts, chunk.get("timings"))
        if self._keeping is not None:
            self._keeping.keep(self._events.response)


class ResponseEvents(Translator):
    """The events of a response.

    response  as it is so far
    """

    def __init__(self, response: dict[str, Any], tools: Offered) -> None:
        super().__init__()
        self._tools = tools
        self.response = response
        self._n_events = 0
        self._item: dict[str, Any] = {}
        self._logprobs: list[Any] = []

    def start(self) -> Iterator[SseEvent]:
        for kind in ("created", "in_progress"):
            yield self._whole(f"response.{kind}")

    def progress(self, prompt: Mapping[str, Any]) -> SseEvent:
        """llama-server's event for a part of the prompt that was read."""
        return {**self._whole("response.in_progress"), "prompt_progress": prompt}

    def end(
        self, reason: str, counts: Mapping[str, Any], timings: Mapping[str, Any] | None
    ) -> Iterator[SseEvent]:
        is_whole = reason != "length"
        yield from self.finish(is_whole=is_whole)
        self.response["status"] = "completed" if is_whole else "incomplete"
        if not is_whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response |= {"usage": dict(counts), "completed_at": int(time.time())}
        more = {} if timings is None else {"timings": timings}
        yield {**self._whole(f"response.{self.response['status']}"), **more}

    def failed(self, error: ApiError) -> Iterator[SseEvent]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"code": error.facts.get("code", code), "message": error.message}
        yield self._event("error", **told, param=error.facts.get("param"))
        self.response |= {"status": "failed", "error": told}
        yield self._whole("response.failed")

    def begun(self, block: Block) -> Iterator[SseEvent]:
        if block.kind == "call":
            item: dict[str, Any] = self._tools.call(block.name)
            kind = {"function_call": "fc", "custom_tool_call": "ctc"}.get(item["type"], "tsc")
            item |= {"id": new_id(kind), "call_id": block.id}
        elif block.kind == "text":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        self._item, self._logprobs = {**item, "status": "in_progress"}, []
        self.response["output"].append(self._item)
        yield self._event("response.output_item.added", output_index=block.index, item=self._item)
        if block.kind != "call":
            yield self._part("response.content_part.added", block, part=self._content(block))

    def added(self, block: Block, text: str, logprobs: Sequence[Any]) -> Iterator[SseEvent]:
        if block.kind == "call":
            if self._item["type"] == "function_call":  # others' JSON holds what the client gets
                yield self._of("response.function_call_arguments.delta", block, delta=text)
        elif block.kind == "text":
            self._logprobs += logprobs
            name = "response.output_text.delta"
            yield self._part(name, block, delta=text, logprobs=list(logprobs))
        else:
            yield self._part("response.reasoning_text.delta", block, delta=text)

    def ended(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
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

    def _event(self, kind: str, **fields: Any) -> SseEvent:
        event = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return event

    def _of(self, kind: str, block: Block, **fields: Any) -> SseEvent:
        """An event of the item that is being written."""
        return self._event(kind, item_id=self._item["id"], output_index=block.index, **fields)

    def _part(self, kind: str, block: Block, **fields: Any) -> SseEvent:
        return self._of(kind, block, content_index=0, **fields)

    def _whole(self, kind: str) -> SseEvent:
        return self._event(kind, response=self.response)


def response_usage(found: Mapping[str, Any], choices: Sequence[Gathered]) -> dict[str, Any]:
    """The usage of a chat completion, as a response has it."""
    cached = found["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": sum(map(_n_reasoning, choices))},
        "total_tokens": found["total_tokens"],
    }


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
