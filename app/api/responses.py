"""``/v1/responses``, OpenAI's newer API: a chat completion whose history the server can keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field

from app.api.body import Call, Posted, Tagged
from app.api.errors import ApiError
from app.api.facts import timings, token_logprobs
from app.api.history import History
from app.api.json_text import finite
from app.api.replies import Gathered, Shown, answer
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
    Blocks,
    SseEvent,
    chat_completion,
    new_id,
    refuse,
)
from app.worker.messages import ChatRequest, Done, Render
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
                "response_format": self.text.format or None,
                "reasoning_effort": self.reasoning.effort,
                "tools": tools.functions,
                "tool_choice": tools.choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )


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

        def keep(response: Mapping[str, Any]) -> None:
            if asked.store:
                before = [item.model_dump(exclude_unset=True) for item in items]
                history.add(memory_of(http), response, [*before, *response["output"]])

        return await ResponseReply(service, asked, tools, chat, requests, keep).answer()

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
        history.get(id_, memory_of(http), remove=True)
        return {"id": id_, "object": "response", "deleted": True}

    return router


class ResponseReply(Blocks):
    """The answer as a response."""

    def __init__(
        self,
        service: Service,
        asked: ResponsesRequest,
        tools: Offered,
        chat: ChatCompletion,
        requests: Sequence[ChatRequest],
        keep: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """``keep`` is given the response when it has ended."""
        sampling = requests[0].sampling
        given = asked.model_dump(include={"tool_choice", "tools"}, exclude_unset=True)
        response = {
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
        }
        super().__init__(service, chat, requests, response)
        self._tools, self._keep = tools, keep
        self._n_events = 0
        self._item: dict[str, Any] = {}
        self._logprobs: list[Any] = []

    def start(self) -> Iterator[SseEvent]:
        for kind in ("created", "in_progress"):
            yield self._whole(f"response.{kind}")

    def progress(self, number: int, progress: Mapping[str, int]) -> Iterator[SseEvent]:
        """llama-server's event for a part of the prompt that was read."""
        yield {**self._whole("response.in_progress"), "prompt_progress": progress}

    def finished(self, reason: str, counts: Mapping[str, Any], done: Done) -> Iterator[SseEvent]:
        self.body["status"] = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        found = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": _n_reasoning(self.replies.choices[0])},
            "total_tokens": counts["total_tokens"],
        }
        self.body |= {"usage": found, "completed_at": int(time.time())}
        yield {**self._whole(f"response.{self.body['status']}"), "timings": timings(done)}
        self._keep(self.body)

    def failed(self, error: ApiError) -> Iterator[SseEvent]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        told = {"code": error.facts.get("code", code), "message": error.message}
        yield self._event("error", **told, param=error.facts.get("param"))
        self.body |= {"status": "failed", "error": told}
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
        self.body["output"].append(self._item)
        yield self._event("response.output_item.added", output_index=block.index, item=self._item)
        if block.kind != "call":
            yield self._part("response.content_part.added", block, part=self._content(block))

    def added(self, block: Block, text: str, shown: Sequence[Shown]) -> Iterator[SseEvent]:
        if block.kind == "call":
            if self._item["type"] == "function_call":  # others' JSON holds what the client gets
                yield self._of("response.function_call_arguments.delta", block, delta=text)
        elif block.kind == "text":
            logprobs = token_logprobs([token.chances for token in shown])
            self._logprobs += logprobs
            yield self._part("response.output_text.delta", block, delta=text, logprobs=logprobs)
        else:
            yield self._part("response.reasoning_text.delta", block, delta=text)

    def closed(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
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
        return self._event(kind, response=self.body)


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
