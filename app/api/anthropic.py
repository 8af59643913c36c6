"""``/v1/messages``, Anthropic's API: a chat completion in other words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field, model_validator

from app.api.body import Call
from app.api.errors import ApiError, error_body_for, unsupported
from app.api.facts import Gathered, Shown
from app.api.reply import Block, Chunk, Conversation, new_id
from app.api.requests import (
    MOST_LISTED,
    MOST_MESSAGES,
    Called,
    Chat,
    Content,
    Message,
    Part,
    Parts,
    Talk,
    Tool,
    ToolCall,
    ToolChoice,
)
from app.api.sampling import OneReply, Posted, ResponseFormat, Stops
from app.api.service import Engine
from app.worker.messages import Done, Event

router = APIRouter(route_class=Call)

# Claude Code's first line, which changes from request to request: with it, nothing of a prompt
# could be taken from the cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Choice(Posted):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Posted):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int = -1


class OutputConfig(Posted):
    format: ResponseFormat | None = None
    effort: str | None = None


class Source(Posted):
    """What an image or a document holds."""

    type: str = ""
    data: str = ""


class InputBlock(Part):
    """A part of a turn or of a tool's result."""

    type: str
    source: Source = Source()
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | list[InputBlock] = ""
    tool_name: str = ""
    needs: ClassVar = {**Part.needs, "tool_use": "name", "tool_reference": "tool_name"}

    def part(self, deferred: Mapping[str, Tool]) -> Part:
        """The block as a part of a chat completion's message. A reference to a deferred tool
        becomes its definition."""
        if self.type == "document" and self.source.type == "text":
            return Part(text=self.source.data)
        if self.type == "tool_reference":  # found by a search for tools
            tool = deferred.get(self.tool_name)
            told = f"The tool {self.tool_name} can be called." if tool is None else tool.defined()
            return Part(text=told)
        return self


class SystemBlock(Posted):
    type: Literal["text"]
    text: str


class Turn(Posted):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Field(max_length=MOST_LISTED)]

    def messages(self, deferred: Mapping[str, Tool]) -> Iterator[Message]:
        """The messages of a turn. The results of tools are messages of their own, before the
        rest."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=self.content)
            return
        parts: Parts = []
        calls: list[ToolCall] = []
        for block in self.content:
            if block.type == "tool_result":
                held: Content = (
                    block.content
                    if isinstance(block.content, str)
                    else [inner.part(deferred) for inner in block.content]
                )
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=held)
            elif block.type == "tool_use":
                function = Called(name=block.name, arguments=block.input)
                calls.append(ToolCall(id=block.id, function=function))
            elif block.type != "redacted_thinking":  # nobody here can read it
                parts.append(block.part(deferred))
        has_results = any(block.type == "tool_result" for block in self.content)
        if parts or calls or not (has_results or self.role == "system"):
            yield Message(role=self.role, content=parts, tool_calls=calls or None)


class ItsTool(Tool):
    type: Annotated[str, AfterValidator(lambda of: "function" if of == "custom" else of)] = (
        "function"
    )
    needs: ClassVar = {"function": "name"}


class CountRequest(Chat):
    """A request whose tokens are counted."""

    messages: list[Turn] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: str | list[SystemBlock] = Field(default_factory=list)
    tools: list[ItsTool] = Field(default_factory=list, max_length=MOST_LISTED)
    tool_choice: Choice = Choice()
    thinking: Thinking = Thinking(type="disabled")
    stop: Stops = Field(default_factory=list, alias="stop_sequences")
    max_tokens: int = Field(-1, ge=1)
    output_config: OutputConfig = OutputConfig()
    response_format: ResponseFormat | None = Field(None, alias="output_format")
    n: OneReply = 1
    # These would change the reply.
    container: Any = None
    mcp_servers: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _in_our_words(self) -> CountRequest:
        # With the prompt's progress comes the count of its tokens, for the first event.
        self.return_progress = True
        self.parallel_tool_calls = not self.tool_choice.disable_parallel_tool_use
        self.response_format = self.output_config.format or self.response_format
        if self.thinking.type == "disabled":  # as it is unless it is asked for
            self.reasoning_effort = "none"
        else:
            self.reasoning_effort = self.output_config.effort
            if "enable_thinking" not in self.chat_template_kwargs.model_fields_set:
                self.chat_template_kwargs.enable_thinking = True
            self.thinking_budget = self.thinking.budget_tokens
        return self

    def talk(self) -> Talk:
        if self.container is not None:
            raise unsupported("container", "no code runs here")
        if self.mcp_servers:
            raise unsupported("mcp_servers", "connect them in the client, and give their tools")
        texts = [self.system] if isinstance(self.system, str) else [o.text for o in self.system]
        told = [_BILLING.sub("", text) for text in texts if not _BILLING.fullmatch(text)]
        messages = [Message(role="system", content=[*told])] if told else []
        # A search for tools that would run at Anthropic finds none.
        can_search = not any(tool.type.startswith("tool_search_tool") for tool in self.tools)
        deferred: dict[str, Tool] = {
            tool.name: tool
            for tool in self.tools
            if tool.defer_loading and tool.type == "function" and can_search
        }
        messages += [message for turn in self.messages for message in turn.messages(deferred)]
        tools = [
            tool for tool in self.tools if tool.name not in deferred or "in_message" in tool.given()
        ]
        given = self.tool_choice
        choice: Any = ToolChoice(name=given.name) if given.type == "tool" else given.type
        choice = "required" if choice == "any" else choice
        return Talk(messages=messages, tools=[*tools], tool_choice=choice)


class MessagesRequest(CountRequest):
    """A request for a message."""

    max_tokens: int = Field(ge=1)


@router.post("/v1/messages")
@router.post("/messages")
async def message(asked: MessagesRequest, http: Request, service: Engine) -> Response:
    requests = await service.chat_requests(asked, http)
    return await MessageReply(service, asked, requests).answer()


@router.post("/v1/messages/count_tokens")
@router.post("/messages/count_tokens")
async def count(asked: CountRequest, http: Request, service: Engine) -> dict[str, Any]:
    return {"input_tokens": (await service.rendered(asked, http)).n_tokens}


class MessageReply(Conversation[MessagesRequest]):
    """The answer as a message."""

    has_names: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if not self._message["usage"] and (gathered.prefill or gathered.pieces or gathered.done):
            n_prompt = gathered.prefill.total + 1 if gathered.prefill is not None else 0
            self._message["usage"] = _usage(n_prompt, gathered.n_reused, 0)  # as far as it is known
            yield {"type": "message_start", "message": self._message}
        yield from super().take(number, event, gathered)

    def whole(self) -> dict[str, Any]:
        return self._message

    def failed(self, error: ApiError) -> Iterator[Chunk]:
        yield error_body_for("/messages", error.message, error.status, **error.facts)

    def begun(self, number: int, block: Block, shown: Sequence[Shown]) -> Iterator[Chunk]:
        content: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "call":
            content = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        elif block.kind == "reasoning":
            content = {"type": "thinking", "thinking": "", "signature": ""}
        self._message["content"].append(content)
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def added(
        self, number: int, block: Block, text: str, shown: Sequence[Shown]
    ) -> Iterable[Chunk]:
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: Block, *, is_whole: bool) -> Iterator[Chunk]:
        content = self._message["content"][block.index]
        if block.kind == "call":
            content["input"] = _arguments(block.text)
        elif block.kind == "text":
            content["text"] = block.text
        else:
            content["thinking"] = block.text
            delta = {"type": "signature_delta", "signature": ""}  # nothing is signed here
            yield {"type": "content_block_delta", "index": block.index, "delta": delta}
        yield {"type": "content_block_stop", "index": block.index}

    def ended(self, number: int, reason: str, done: Done) -> Iterator[Chunk]:
        delta = {"stop_reason": _STOPS.get(reason, "end_turn"), "stop_sequence": None}
        if reason == "stop" and done.stop_string in self.asked.stop:
            delta = {"stop_reason": "stop_sequence", "stop_sequence": done.stop_string}
        counts = _usage(done.n_prompt, done.n_reused, done.n_tokens)
        self._message |= {**delta, "usage": counts}
        yield {"type": "message_delta", "delta": delta, "usage": counts}
        yield {"type": "message_stop"}


# By the kind of a block, the type of what is added to it, and the field that has it.
_DELTAS = {
    "call": ("input_json_delta", "partial_json"),
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
}


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
