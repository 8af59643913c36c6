"""What the routes share: the backend, the server's settings, and requests put into its terms."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.api.errors import ApiError, error_body
from app.api.json_text import dumps
from app.api.replies import Replies, answer
from app.api.schemas import ChatCompletion, Completion, NamedTool, Sampling, prompts_of
from app.api.switching import Models
from app.worker.backend import Backend
from app.worker.messages import ChatRequest, LoadedModel, ModelFacts, Tokenize

FINGERPRINT = f"b{version('llama-cpp-python')}-{version('speculation')}"
DONE = "[DONE]"
# llama-server's, so that its clients get the same texts.
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass
class Service:
    """The engine as the routes see it.

    alias       the model's name in answers; empty = its name or file name
    sampling    fields of ``SamplingParams`` where a request has none
    method      the method where a request names none
    max_tokens  of a reply, whatever the request says; None = the context
    seconds     that a call may take
    models      which one answers; None = the loaded one, whatever a call names
    """

    backend: Backend
    alias: str = ""
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))
    method: str = "auto"
    max_tokens: int | None = None
    seconds: float = 3600.0
    models: Models | None = None

    def model(self) -> LoadedModel:
        """The loaded model. Raises ApiError while there is none."""
        status = self.backend.status()
        if status.model is None:
            if self.is_asleep:
                raise ApiError("the model was idle and is unloaded; a call for text loads it", 503)
            if status.loading is not None or status.error is None:
                raise ApiError("the model is being loaded; try again soon", 503)
            raise ApiError(f"no model is loaded: {status.error}", 503)
        return status.model

    @property
    def facts(self) -> ModelFacts:
        """More of the loaded model."""
        return self.backend.status().facts

    def name(self) -> str:
        """The model's name in answers."""
        model = self.model().spec.model
        return self.models.name(model) if self.models else self.alias or Path(model).name

    @property
    def is_asleep(self) -> bool:
        """Whether the model was freed because nobody used it."""
        return self.models is not None and self.models.is_asleep

    async def take_model(self, asked: str | None, http: Request) -> None:
        """Wait for the model that a call names. Raises ApiError if it cannot be loaded."""
        if self.models is not None:
            await self.models.take(asked, http)

    async def chat_requests(self, asked: ChatCompletion, http: Request) -> list[ChatRequest]:
        """A request for each choice."""
        await self.take_model(asked.model, http)
        sampling = await self._sampling(asked)
        if asked.response_format is not None:
            schema = asked.response_format.required
            if schema is not None:
                sampling = {**sampling, "json_schema": schema}
        choice = asked.tool_choice
        request = ChatRequest(
            uuid4().hex,
            tuple(message.given() for message in asked.messages),
            self._method(asked),
            sampling,
            self._limit(asked.limit),
            thinking=False if asked.reasoning_effort == "none" else None,
            leave_out=False,
            stop=tuple(asked.stop),
            logprobs=asked.n_probs,
            tools=tuple(tool.model_dump() for tool in asked.tools),
            tool_choice=choice.model_dump() if isinstance(choice, NamedTool) else choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            template_kwargs=asked.chat_template_kwargs,
            continue_last=(False if asked.add_generation_prompt else asked.continue_final_message),
            prediction=asked.prediction.content if asked.prediction is not None else "",
            memory=memory_of(http),
            show_prompt=asked.verbose,
        )
        return _repeated(request, asked.n)

    async def completion_requests(
        self, asked: Completion, http: Request
    ) -> tuple[list[ChatRequest], bool]:
        """A request for each choice of each prompt, and whether there is a list of prompts."""
        await self.take_model(asked.model, http)
        sampling = await self._sampling(asked)
        prompts, is_list = prompts_of(asked.prompt)
        n_probs = asked.n_probs or None
        requests = [
            ChatRequest(
                uuid4().hex,
                (),
                self._method(asked),
                sampling,
                self._limit(asked.limit),
                leave_out=False,
                prompt=prompt,
                stop=tuple(asked.stop),
                logprobs=n_probs if asked.logprobs is None else asked.logprobs,
                post_sampling=asked.post_sampling_probs,
                memory=memory_of(http),
            )
            for prompt in prompts
        ]
        if not requests:
            raise ApiError("prompt is an empty list; give a text, token ids, or a list of them")
        n = asked.n_cmpl or asked.n
        return [one for request in requests for one in _repeated(request, n)], is_list or n > 1

    def replies(self, requests: Sequence[ChatRequest]) -> Replies:
        return Replies(self.backend, requests, self.seconds)

    def _method(self, asked: Sampling) -> str:
        given = asked.speculation
        return given.spelled() if given.model_fields_set or given.model_extra else self.method

    def _limit(self, asked: int | None) -> int | None:
        limits = [limit for limit in (asked, self.max_tokens) if limit is not None]
        return min(limits) if limits else None

    async def _sampling(self, asked: Sampling) -> dict[str, Any]:
        self.model()
        found = asked.sampling(self.sampling)
        if found.get("grammar") and found.get("json_schema"):
            raise ApiError("grammar and json_schema exclude each other; give one")
        bias: dict[int, float] = {}
        for token, value in asked.biases():
            if isinstance(token, int):
                bias[token] = value
            else:
                split = await answer(self.backend, Tokenize(token, parse_special=False))
                bias.update((id_, value) for id_, _ in split.tokens)
        if asked.ignore_eos:
            bias.update(dict.fromkeys(self.facts.ends, float("-inf")))
        return {**found, "logit_bias": bias} if bias else found


def _repeated(request: ChatRequest, n: int) -> list[ChatRequest]:
    """The request ``n`` times, with seeds in a row: the choices of a call differ."""
    seed = request.sampling["seed"]
    return [
        replace(
            request,
            id=f"{request.id}-{i}",
            sampling={**request.sampling, "seed": (seed + i) % (2**32 - 1)},
        )
        for i in range(n)
    ]


def memory_of(http: Request) -> str:
    """The memory of the client with this call's API key, if there are several keys; else "".

    Drafts would tell one client what another wrote if they had one memory.
    """
    key: str | None = http.scope.get("api_key")
    return "" if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]


class Stream(StreamingResponse):
    """A stream of server-sent events. An error ends it as an event; a client that goes away ends
    the work."""

    def __init__(self, replies: Replies, chunks: AsyncIterator[Any]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._replies, self._chunks = replies, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replies.close()

    def written(self, chunk: Any) -> str:
        """An event as it is sent."""
        data = chunk if isinstance(chunk, str) else dumps(chunk)
        return f"data: {data}\n\n"

    async def stream_response(self, send: Send) -> None:
        async def send_event(chunk: Any) -> None:
            body = self.written(chunk).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._chunks:
                await send_event(chunk)
        except ApiError as error:
            await send_event(error.body)
        except Exception as error:
            await send_event(error_body(str(error), 500))
            raise
        await send({"type": "http.response.body", "body": b""})
