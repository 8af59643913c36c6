"""What the routes share: the backend, the server's settings, and requests put into its terms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Depends, Request

from app.api.errors import ApiError
from app.api.history import History
from app.api.log import current_call
from app.api.replies import Replies, answer
from app.api.requests import Chat, Completion, prompts_of
from app.api.sampling import LONGEST_STOP, MOST_BIASES, Sampling
from app.api.switching import Models
from app.worker.backend import Backend
from app.worker.messages import (
    SAMPLING,
    Answer,
    ChatRequest,
    Failed,
    LoadedModel,
    ModelFacts,
    Render,
    Tokenize,
)

FINGERPRINT = f"b{version('llama-cpp-python')}-{version('speculation')}"
MOST_PROMPTS = 512


@dataclass
class Service:
    """The engine as the routes see it.

    alias       the model's name in answers; empty = its name or file name
    sampling    fields of ``SamplingParams`` where a request has none
    method      the method where a request names none
    max_tokens  of a reply, whatever the request says; None = the context
    seconds     that a call may take
    models      which one answers; None = the loaded one, whatever a call names
    history     the responses that are kept
    """

    backend: Backend
    alias: str = ""
    sampling: Mapping[str, Any] = field(default_factory=lambda: dict(SAMPLING))
    method: str = "auto"
    max_tokens: int | None = None
    seconds: float = 3600.0
    models: Models | None = None
    history: History = field(default_factory=History)

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

    async def chat_requests(self, asked: Chat, http: Request) -> list[ChatRequest]:
        """A request for each choice."""
        request = ChatRequest(**asked.request(), **await self._common(asked, http))
        self._check_size(request)
        return _repeated(request, asked.n)

    async def rendered(self, asked: Chat, http: Request) -> Answer:
        """A chat's prompt, and how many tokens it has."""
        return await answer(self.backend, Render((await self.chat_requests(asked, http))[0]))

    async def completion_requests(
        self, asked: Completion, http: Request
    ) -> tuple[list[ChatRequest], bool]:
        """A request for each choice of each prompt, and whether there is a list of prompts."""
        common = await self._common(asked, http)
        prompts, is_list = prompts_of(asked.prompt)
        if not prompts:
            raise ApiError("prompt is an empty list; give a text, token ids, or a list of them")
        if asked.n * len(prompts) > MOST_PROMPTS:
            raise ApiError(
                f"the body asks for {asked.n * len(prompts)} texts; ask for at most {MOST_PROMPTS}",
                param="prompt",
            )
        n_probs = asked.n_probs or None if asked.logprobs is None else asked.logprobs
        if asked.echo and n_probs is not None:
            # A prompt's probabilities need no drafts, whose heads would read its states, too.
            common["method"] = asked.speculation.spelled("ar")
        requests = []
        for prompt in prompts:
            request = ChatRequest(
                prompt=prompt, logprobs=n_probs, post_sampling=asked.post_sampling_probs, **common
            )
            self._check_size(request)
            request = await self._echoed(request) if asked.echo else request
            requests += _repeated(request, asked.n)
        return requests, is_list or asked.n > 1

    async def _common(self, asked: Sampling, http: Request) -> dict[str, Any]:
        """What the requests of all calls have in common, once the model is there."""
        await self.take_model(asked.model, http)
        current_call().owner = memory_of(http)
        limits = [limit for limit in (asked.limit, self.max_tokens) if limit is not None]
        return {
            "id": uuid4().hex,
            "method": asked.speculation.spelled(self.method),
            "sampling": await self._sampling(asked),
            "max_tokens": min(limits, default=None),
            "leave_out": False,
            "stop": tuple(asked.stop),
            "memory": memory_of(http) if asked.speculation.memory else None,
            "reuse": asked.cache_prompt,
            "predict_seconds": asked.t_max_predict_ms / 1000,
            "n_indent": asked.n_indent,
        }

    def replies(self, requests: Sequence[ChatRequest]) -> Replies:
        current_call().writes(self.backend.status().model)
        at_a_time = 2 * self.facts.parallel
        return Replies(self.backend, requests, self.seconds, at_a_time, self.facts.ends)

    def _check_size(self, request: ChatRequest) -> None:
        """Raise ApiError if the prompt cannot fit, whatever its tokens are: before the work of
        finding them."""
        n_ctx, longest = self.model().n_ctx, self.facts.longest
        texts = [part for part in request.prompt if isinstance(part, str)]
        given = request.messages, request.listed_tools, request.template_kwargs, texts
        n_tokens = max(n_characters(given), n_characters(request.prediction)) // max(1, longest)
        n_tokens += sum(isinstance(part, int) for part in request.prompt)
        n_tokens = max(n_tokens, len(request.messages))  # each has marks around it
        if longest and n_tokens > n_ctx:
            can_grow = n_ctx < self.facts.n_ctx_train
            advice = ", or start the server with a larger --ctx" if can_grow else ""
            message = (
                f"the prompt has at least {n_tokens} tokens, but the context has {n_ctx}; shorten "
                f"it{advice}"
            )
            raise ApiError.of(Failed(message, message, "too long", n_tokens, n_ctx))

    async def _echoed(self, request: ChatRequest) -> ChatRequest:
        """The request with its prompt's text, which the reply begins with."""
        parts = [part for part in request.prompt if isinstance(part, str)]
        if len(parts) < len(request.prompt):
            return replace(request, echo=(await answer(self.backend, Render(request))).text)
        return replace(request, echo="".join(parts))

    async def _sampling(self, asked: Sampling) -> dict[str, Any]:
        self.model()
        found = asked.sampling(self.sampling)
        bias: dict[int, float] = {}
        for token, value in asked.biases():
            if isinstance(token, int):
                bias[token] = value
            else:
                if len(token) > LONGEST_STOP:
                    raise ApiError(
                        f"logit_bias has a text of {len(token)} characters; give at most "
                        f"{LONGEST_STOP}"
                    )
                asks = Tokenize(token, parse_special=False, with_pieces=False)
                split = await answer(self.backend, asks)
                bias.update((id_, value) for id_, _ in split.tokens)
            if len(bias) > MOST_BIASES:
                raise ApiError(f"logit_bias has more than {MOST_BIASES} tokens")
        if asked.ignore_eos:
            bias.update(dict.fromkeys(self.facts.ends, float("-inf")))
        return {**found, "logit_bias": bias} if bias else found


def _service(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


Engine = Annotated[Service, Depends(_service)]  # of a route


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


def n_characters(value: Any) -> int:
    """How many characters a JSON value has, at least; names of fields do not count."""
    left, n = [value], 0
    while left:
        item = left.pop()
        if isinstance(item, str):
            n += len(item)
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
        elif item is not None:
            n += 1
    return n


def memory_of(http: Request) -> str:
    """The memory of the client with this call's API key, if there are several keys; else "".

    Drafts would tell one client what another wrote if they had one memory.
    """
    key: str | None = http.scope.get("api_key")
    return "" if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]
