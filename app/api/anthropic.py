"""``/v1/messages``, Anthropic's API: a chat completion in other words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from app.api.body import Call, Posted, Tagged
from app.api.errors import ApiError, error_body_for
from app.api.replies import Gathered, Shown, answer
from app.api.reply import Chunk
from app.api.sampling import MOST_LISTED
from app.api.schemas import MOST_MESSAGES, ChatCompletion, Content, ContentPart, Message, Parts
from app.api.service import Service
from app.api.translated import (
    Block,
    Blocks,
    SseEvent,
    chat_completion,
    defined,
    new_id,
    refuse,
)
from app.worker.messages import ChatRequest, Done, Event, Render

# Claude Code's first line, which changes from request to request: with it, nothing of a prompt
# could be taken from the cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


class ToolChoice(Posted):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Posted):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Posted):
    format: dict[str, Any] | None = None
    effort: str | None = None


class Source(Posted):
    """What an image or a document holds."""

    type: str = ""
    data: str = ""


class InputBlock(Tagged, ContentPart):
    """A part of a turn or of a tool's result."""

    type: str
    source: Source | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[InputBlock] = ""
    tool_name: str = ""
    needs: ClassVar = {"text": "text", "tool_use": "name", "tool_reference": "tool_name"}

    def part(self, deferred: Mapping[str, dict[str, Any]]) -> ContentPart:
        """The block as a part of a chat completion's message. A reference to a deferred tool
        becomes its definition."""
        if self.type == "document" and self.source is not None and self.source.type == "text":
            return ContentPart(text=self.source.data)
        if self.type == "tool_reference":  # found by a search for tools
            tool = deferred.get(self.tool_name)
            told = f"The tool {self.tool_name} can be called." if tool is None else defined(tool)
            return ContentPart(text=told)
        return self


class SystemBlock(Posted):
    type: Literal["text"]
    text: str


class Turn(Posted):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Field(max_length=MOST_LISTED)]

    def messages(self, deferred: Mapping[str, dict[str, Any]]) -> list[Message]:
        """The messages of a turn. The results of tools are messages of their own, before the
        rest."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        results: list[Message] = []
        parts: Parts = []
        calls: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "tool_result":
                held: Content = (
                    block.content
                    if isinstance(block.content, str)
                    else [inner.part(deferred) for inner in block.content]
                )
                results.append(Message(role="tool", tool_call_id=block.tool_use_id, content=held))
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type != "redacted_thinking":  # nobody here can read it
                parts.append(block.part(deferred))
        if parts or calls or not (results or self.role == "system"):
            results.append(Message(role=self.role, content=parts, tool_calls=calls or None))
        return results


class Tool(Tagged):
    """A tool; those of another type than custom would run at Anthropic."""

    type: str = "custom"
    name: str = ""
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    defer_loading: bool = False
    needs: ClassVar = {"custom": "name"}

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat completion has it."""
        if self.type != "custom":
            return {"type": self.type}
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class CountRequest(Posted, extra="allow"):
    """A request whose tokens are counted. Other fields are those of a chat completion."""

    messages: list[Turn] = Field(min_length=1, max_length=MOST_MESSAGES)
    model: str | None = None
    system: str | list[SystemBlock] = Field(default_factory=list)
    tools: list[Tool] = Field([], max_length=MOST_LISTED)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="disabled")
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    max_tokens: int | None = Field(None, ge=1)
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # These would change the reply.
    container: Any = None
    mcp_servers: list[Any] = Field(default_factory=list)

    def chat(self) -> ChatCompletion:
        """The chat completion that this asks for. Raises ApiError."""
        if self.container is not None:
            raise refuse("container", "no code runs here")
        if self.mcp_servers:
            raise refuse("mcp_servers", "connect them in the client, and give their tools")
        texts = [self.system] if isinstance(self.system, str) else [o.text for o in self.system]
        told = [_BILLING.sub("", text) for text in texts if not _BILLING.fullmatch(text)]
        messages = [Message(role="system", content=[*told])] if told else []
        offered = [(tool, tool.for_chat()) for tool in self.tools]
        # A search for tools that would run at Anthropic finds none.
        can_search = not any(tool.type.startswith("tool_search_tool") for tool in self.tools)
        deferred = {
            tool.name: function
            for tool, function in offered
            if tool.defer_loading and tool.type == "custom" and can_search
        }
        messages += [message for turn in self.messages for message in turn.messages(deferred)]
        choice: Any = _CHOICES.get(self.tool_choice.type)
        if choice is None:
            choice = {"type": "function", "function": {"name": self.tool_choice.name}}
        return chat_completion(
            {
                **(self.model_extra or {}),
                **self._thinking(),
                "messages": messages,
                "model": self.model,
                "stream": self.stream,
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "tools": [
                    function
                    for tool, function in offered
                    if tool.name not in deferred or "in_message" in function
                ],
                "tool_choice": choice,
                "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
                "response_format": self.output_config.format or self.output_format,
                # With the prompt's progress comes the count of its tokens, for the first event.
                "return_progress": True,
            }
        )

    def _thinking(self) -> dict[str, Any]:
        """The fields that turn thinking on or off. It is off unless it is asked for."""
        if self.thinking.type == "disabled":
            return {"reasoning_effort": "none", "chat_template_kwargs": self.chat_template_kwargs}
        return {
            "reasoning_effort": self.output_config.effort,
            "chat_template_kwargs": {"enable_thinking": True, **self.chat_template_kwargs},
            "thinking_budget_tokens": self.thinking.budget_tokens,
        }


class MessagesRequest(CountRequest):
    """A request for a message."""

    max_tokens: int = Field(ge=1)


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router = APIRouter(route_class=Call)

    @router.post("/v1/messages")
    @router.post("/messages")
    async def message(asked: MessagesRequest, http: Request) -> Response:
        chat = asked.chat()
        requests = await service.chat_requests(chat, http)
        return await MessageReply(service, chat, requests).answer()

    @router.post("/v1/messages/count_tokens")
    @router.post("/messages/count_tokens")
    async def count(asked: CountRequest, http: Request) -> dict[str, Any]:
        request = (await service.chat_requests(asked.chat(), http))[0]
        return {"input_tokens": (await answer(service.backend, Render(request))).n_tokens}

    return router


class MessageReply(Blocks):
    """The answer as a message."""

    def __init__(
        self, service: Service, chat: ChatCompletion, requests: Sequence[ChatRequest]
    ) -> None:
        message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": service.name(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        super().__init__(service, chat, requests, message)
        self._has_begun = False

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if not self._has_begun and (gathered.prefill or gathered.pieces or gathered.done):
            self._has_begun = True
            n_prompt = gathered.prefill.total + 1 if gathered.prefill is not None else 0
            counts = _usage(n_prompt, gathered.n_reused, 0)  # as far as they are known
            yield {"type": "message_start", "message": {**self.body, "usage": counts}}
        yield from super().take(number, event, gathered)

    def failed(self, error: ApiError) -> Iterator[Chunk]:
        yield error_body_for("/messages", error.message, error.status, **error.facts)

    def begun(self, block: Block) -> Iterator[SseEvent]:
        content: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "call":
            content = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        elif block.kind == "reasoning":
            content = {"type": "thinking", "thinking": "", "signature": ""}
        self.body["content"].append(content)
        # A copy: the block in the message grows.
        yield {"type": "content_block_start", "index": block.index, "content_block": {**content}}

    def added(self, block: Block, text: str, shown: Sequence[Shown]) -> Iterator[SseEvent]:
        if block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        else:
            delta = {"type": "thinking_delta", "thinking": text}
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def closed(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
        content = self.body["content"][block.index]
        if block.kind == "call":
            content["input"] = _arguments(block.text)
        elif block.kind == "text":
            content["text"] = block.text
        else:
            content["thinking"] = block.text
            delta = {"type": "signature_delta", "signature": ""}  # nothing is signed here
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def finished(self, reason: str, counts: Mapping[str, Any], done: Done) -> Iterator[SseEvent]:
        n_cached = counts["prompt_tokens_details"]["cached_tokens"]
        found = _usage(counts["prompt_tokens"], n_cached, counts["completion_tokens"])
        delta = {"stop_reason": _STOPS.get(reason, "end_turn"), "stop_sequence": None}
        if reason == "stop" and done.stop_string in self.asked.stop:
            delta = {"stop_reason": "stop_sequence", "stop_sequence": done.stop_string}
        self.body |= {**delta, "usage": found}
        yield {"type": "message_delta", "delta": delta, "usage": found}
        yield {"type": "message_stop"}


def _usage(n_prompt: int, n_cached: int, n_tokens: int) -> dict[str, Any]:
    """Tokens that were in the cache are not among the input's."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_tokens,
    }


def _arguments(text: str) -> Any:
    """A call's arguments; those of a call that was cut short are empty."""
    try:
        return json.loads(text)
    except ValueError:
        return {}
