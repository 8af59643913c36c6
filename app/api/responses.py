"""``/v1/responses``, OpenAI's newer API: a chat completion whose history the server can keep."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from app.api.body import Call, Posted
from app.api.chat import ChatReply, answered
from app.api.errors import ApiError
from app.api.history import History, Item
from app.api.json_text import finite
from app.api.replies import Gathered, answer
from app.api.schemas import ChatCompletion
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


class TextConfig(Posted):
    format: dict[str, Any] = Field(default_factory=dict)


class ReasoningConfig(Posted):
    effort: str | None = None


class ResponsesRequest(Posted, extra="allow"):
    """A request for a response. Other fields are those of a chat completion."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = None
    include: list[str] = Field(default_factory=list)
    top_logprobs: int | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, Any] = Field(default_factory=dict)
    # These would change what is answered, or when.
    background: bool = False
    conversation: Any = None
    prompt: Any = None

    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [*self.input]

    def chat(self, items: Sequence[Item]) -> ChatCompletion:
        """The chat completion for a conversation of ``items``. Raises ApiError."""
        if self.background:
            raise refuse("background", "stream the response instead")
        if self.conversation is not None:
            raise refuse("conversation", "give previous_response_id, or all items as input")
        if self.prompt is not None:
            raise refuse("prompt", "this server keeps no prompts; give instructions and input")
        messages = messages_of(items)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        tools, choice = _tools(self.tools, self.tool_choice)
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
                "tools": tools,
                "tool_choice": choice,
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


def _tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]
) -> tuple[list[dict[str, Any]], Any]:
    """The functions among the tools, and the choice, as a chat completion has them.

    Tools that OpenAI itself would run, such as a web search, are left out: the model cannot call
    them here.
    """
    functions = [tool for tool in tools if tool.get("type") == "function"]
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "allowed_tools":
            names = [tool.get("name") for tool in choice.get("tools", ())]
            functions = [tool for tool in functions if tool.get("name") in names]
            choice = choice.get("mode", "auto")
        elif kind == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise refuse("tool_choice", f"tools of the type {kind!r:.40} do not run here")
    known = ("name", "description", "parameters", "strict")
    found = [
        {"type": "function", "function": {name: tool[name] for name in known if name in tool}}
        for tool in functions
    ]
    return found, choice


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a conversation. Reasoning, text and calls in a row are one message.

    Raises ApiError for an item that has no place in a chat.
    """
    messages: list[dict[str, Any]] = []

    def turn() -> dict[str, Any]:
        """The assistant's message that is being put together."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for number, item in enumerate(items):
        where, kind = f"input.{number}", item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            told = turn()
            parts = _parts(where, item.get("content", ""))
            told["content"] = parts if told["content"] is None else [*told["content"], *parts]
        elif kind == "message":
            content = _parts(where, item.get("content", ""))
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "reasoning":
            thoughts = item.get("content") or item.get("summary") or ()
            told, text = turn(), "\n".join(part.get("text", "") for part in thoughts)
            told["reasoning_content"] = told.get("reasoning_content", "") + text
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            turn().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _parts(where, item.get("output", ""))
            answer_ = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            messages.append(answer_)
        elif kind == "item_reference":
            raise refuse(f"{where}.type", "send the item itself, or use previous_response_id")
        else:
            raise refuse(f"{where}.type", f"items of the type {kind!r:.40} have no place here")
    return messages


def _parts(where: str, content: Any) -> list[dict[str, Any]]:
    """A content's parts as a chat completion has them."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found = []
    for number, part in enumerate(content or ()):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("input_text", "output_text", "text"):
            found.append({"type": "text", "text": part.get("text", "")})
        elif kind == "refusal":
            found.append({"type": "text", "text": part.get("refusal", "")})
        elif kind == "input_image":
            found.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            raise refuse(f"{where}.content.{number}.type", f"{kind!r:.40} is not text; send text")
    return found


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router, history = APIRouter(route_class=Call), History()

    def conversation(asked: ResponsesRequest, http: Request) -> list[Item]:
        """All items, those before this request included."""
        before: Sequence[Item] = ()
        if asked.previous_response_id is not None:
            before = history.get(asked.previous_response_id, memory_of(http)).items
        return [*before, *asked.items()]

    @router.post("/v1/responses")
    @router.post("/responses")
    async def respond(asked: ResponsesRequest, http: Request) -> Response:
        items = conversation(asked, http)
        chat = asked.chat(items)
        requests = await service.chat_requests(chat, http)
        kept = _Keeping(history, memory_of(http), items) if asked.store else None
        return await answered(ResponseReply(service, asked, chat, requests, kept))

    @router.post("/v1/responses/input_tokens")
    @router.post("/responses/input_tokens")
    async def count(asked: ResponsesRequest, http: Request) -> dict[str, Any]:
        request = (await service.chat_requests(asked.chat(conversation(asked, http)), http))[0]
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
        self.history.add(self.owner, response, [*self.items, *response["output"]])


class ResponseReply(ChatReply):
    """A chat completion's reply as a response."""

    stream_type = EventStream

    def __init__(
        self,
        service: Service,
        asked: ResponsesRequest,
        chat: ChatCompletion,
        requests: Sequence[ChatRequest],
        keeping: _Keeping | None,
    ) -> None:
        super().__init__(service, chat, requests)
        sampling = requests[0].sampling
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
                "tool_choice": asked.tool_choice,
                "tools": asked.tools,
                "top_logprobs": asked.top_logprobs or 0,
                "top_p": sampling.get("top_p", 1.0),
                "truncation": "disabled",
                "usage": None,
                "user": None,
            }
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

    def __init__(self, response: dict[str, Any]) -> None:
        super().__init__()
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
        facts = error.body["error"]
        code = str(facts["type"])
        yield self._event("error", code=code, message=error.message, param=facts.get("param"))
        kind = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": kind, "message": error.message}}
        yield self._whole("response.failed")

    def begun(self, block: Block) -> Iterator[SseEvent]:
        if block.kind == "call":
            item: dict[str, Any] = {"id": new_id("fc"), "type": "function_call"}
            item |= {"call_id": block.id, "name": block.name, "arguments": ""}
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
            name = "response.function_call_arguments.delta"
            yield self._of(name, block, delta=text)
        elif block.kind == "text":
            self._logprobs += logprobs
            name = "response.output_text.delta"
            yield self._part(name, block, delta=text, logprobs=list(logprobs))
        else:
            yield self._part("response.reasoning_text.delta", block, delta=text)

    def ended(self, block: Block, *, is_whole: bool) -> Iterator[SseEvent]:
        item = self._item
        item["status"] = "completed" if is_whole else "incomplete"
        if block.kind == "call":
            item["arguments"] = block.text
            name = "response.function_call_arguments.done"
            yield self._of(name, block, name=block.name, arguments=block.text)
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
