"""llama-server's own routes, so that its clients work here unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from app.api.answers import as_json_in_thread, finite
from app.api.body import Call
from app.api.errors import ApiError
from app.api.facts import Gathered, native_probs, timings
from app.api.replies import answer
from app.api.reply import Chunk, Reply
from app.api.requests import MOST_TOKENS, ChatCompletion, Completion
from app.api.sampling import Posted
from app.api.service import FINGERPRINT, Engine, Service
from app.worker.messages import (
    Chance,
    ChatRequest,
    Detokenize,
    Done,
    Event,
    LoadedModel,
    Tokenize,
    Tokens,
)
from app.worker.wording import REQUEST, SAMPLING
from speculation.sampling import SamplingParams

router = APIRouter(route_class=Call)

MOST_WITH_PIECES = 2**18  # characters to split into tokens with the text of each


class Tokenization(Posted):
    content: str = Field(max_length=MOST_TOKENS)
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _is_short(self) -> Tokenization:
        if self.with_pieces and len(self.content) > MOST_WITH_PIECES:
            raise ValueError(f"with_pieces takes at most {MOST_WITH_PIECES} characters of content")
        return self


class Detokenization(Posted):
    tokens: list[int] = Field(max_length=MOST_TOKENS)


@router.get("/health")
@router.get("/v1/health")
async def health(service: Engine) -> dict[str, Any]:
    if not service.is_asleep:
        service.model()
    status = service.backend.status()
    if status.is_down:
        raise ApiError(status.error or "the model is being loaded", 503)
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models")
async def models(service: Engine) -> dict[str, Any]:
    others = await service.models.others() if service.models else []
    if service.is_asleep:
        return {"object": "list", "data": others}
    return {"object": "list", "data": [_model(service, service.model()), *others]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Engine) -> dict[str, Any]:
    others = await service.models.others() if service.models else []
    if found := [one for one in others if one["id"] == name]:
        return found[0]
    loaded = service.model()
    if name != service.name():
        raise ApiError(f"no model {name!r:.80} is loaded; this is {service.name()}", 404)
    return _model(service, loaded)


@router.get("/props")
async def props(service: Engine) -> dict[str, Any]:
    loaded = service.model()
    request = ChatRequest("", sampling={**service.sampling})
    return {
        "default_generation_settings": {
            "params": finite(settings(request, service)),
            "n_ctx": loaded.n_ctx,
        },
        "total_slots": service.facts.parallel,
        "model_alias": service.name(),
        "model_path": service.facts.path,
        "modalities": {"vision": False, "audio": False},
        "chat_template": service.facts.chat_template,
        "bos_token": service.facts.bos,
        "eos_token": service.facts.eos,
        "build_info": FINGERPRINT,
        "methods": [
            {
                "name": info.name,
                "title": info.title,
                "parameters": [
                    {"name": one.name, "default": one.default, "description": one.help}
                    for one in info.parameters
                ],
            }
            for info in service.backend.methods()
        ],
    }


@router.get("/slots")
async def slots(service: Engine) -> list[dict[str, Any]]:
    loaded = service.model()
    running = service.backend.report().running
    return [
        {
            "id": number,
            "n_ctx": loaded.n_ctx,
            "is_processing": number < len(running),
            **({"id_task": running[number]} if number < len(running) else {}),
        }
        for number in range(service.facts.parallel)
    ]


@router.post("/tokenize")
async def tokenize(asked: Tokenization, http: Request, service: Engine) -> Response:
    question = Tokenize(asked.content, asked.add_special, asked.parse_special, asked.with_pieces)
    found = (await answer(service.backend, question)).tokens

    def told(token: int, piece: bytes) -> int | dict[str, Any]:
        return {"id": token, "piece": _piece(piece)} if asked.with_pieces else token

    # Not by FastAPI, which looks at each item of a list, for seconds.
    return await as_json_in_thread(lambda: {"tokens": [told(*one) for one in found]})


@router.post("/detokenize")
async def detokenize(asked: Detokenization, http: Request, service: Engine) -> dict[str, Any]:
    n_vocab = service.facts.n_vocab
    unknown = [token for token in asked.tokens if not 0 <= token < n_vocab]
    if unknown:
        raise ApiError(f"tokens has {unknown[0]}; this model has 0 to {n_vocab - 1}")
    question = Detokenize(tuple(asked.tokens))
    found = await answer(service.backend, question)
    return {"content": found.text}


@router.post("/apply-template")
async def apply_template(asked: ChatCompletion, http: Request, service: Engine) -> dict[str, Any]:
    return {"prompt": (await service.rendered(asked, http)).text}


@router.post("/completion")
@router.post("/completions")
async def complete(asked: Completion, http: Request, service: Engine) -> Response:
    return await completed(service, asked, http)


async def completed(service: Service, asked: Completion, http: Request) -> Response:
    """The answer to a completion, in llama-server's form."""
    if asked.suffix:
        raise ApiError("suffix is not supported here; use /infill", param="suffix")
    requests, is_list = await service.completion_requests(asked, http)
    requests = [replace(request, show_prompt=True) for request in requests]
    return await _NativeReply(service, asked, requests, is_list).answer()


@dataclass
class _NativeReply(Reply[Completion]):
    """The answer as llama-server's completion; a list of them if ``is_list``."""

    is_list: bool

    def take(self, number: int, event: Event, gathered: Gathered) -> Iterator[Chunk]:
        if not self.asked.stream:  # a whole answer is made of what is gathered
            return
        timed = self.times(gathered)
        if self.asked.return_progress and (progress := gathered.progress(event)):
            head = {"index": number, "content": "", "tokens": [], "stop": False}
            yield {**head, "prompt_progress": progress, **timed}
        if isinstance(event, Tokens):
            for part in _parts(event):
                yield {
                    "index": number,
                    "content": "".join(text for text, _ in part.pieces),
                    "tokens": list(part.ids),
                    "stop": False,
                    "id_slot": number,
                    "tokens_predicted": len(gathered.ids),
                    "tokens_evaluated": gathered.prefill.total + 1 if gathered.prefill else 0,
                    **timed,
                    **(self._probs(part.chances) if part.chances else {}),
                }
        elif isinstance(event, Done):
            yield {**self._choice(number), "content": "", "tokens": []}

    def whole(self) -> Any:
        found = [self._choice(number) for number in range(len(self.replies.choices))]
        return found if self.is_list else found[0]

    def _choice(self, number: int) -> dict[str, Any]:
        """The answer for one prompt."""
        request, gathered = self.requests[number], self.replies.choices[number]
        done, text = gathered.done, gathered.text
        assert done is not None
        return {
            "index": number,
            "content": text,
            "tokens": gathered.ids if self.asked.return_tokens else [],
            "id_slot": number,
            "stop": True,
            "model": self.model,
            "tokens_predicted": done.n_tokens,
            "tokens_evaluated": done.n_prompt,
            "generation_settings": settings(request, self.service),
            "prompt": done.prompt,
            "has_new_line": "\n" in text,
            "truncated": done.finish_reason == "context",
            "stop_type": _stop_type(done),
            "stopping_word": done.stop_string,
            "tokens_cached": done.n_prompt + done.n_tokens - 1,
            "timings": timings(done),
            **({} if request.logprobs is None else self._probs(gathered.chances)),
        }

    def _probs(self, chances: Sequence[tuple[Chance, tuple[Chance, ...]]]) -> dict[str, Any]:
        found = native_probs(chances, self.asked.post_sampling_probs)
        return {"completion_probabilities": found}


def _parts(text: Tokens) -> list[Tokens]:
    """A token at a time if it has probabilities, as llama-server's clients expect; else all."""
    if not text.chances:
        return [text]
    each = zip(text.pieces, text.ids, text.chances, strict=True)
    return [Tokens((piece,), (token,), (chance,)) for piece, token, chance in each]


def _stop_type(done: Done) -> str:
    if done.finish_reason == "stop":
        return "word" if done.stop_string else "eos"
    return "limit" if done.finish_reason in ("length", "context") else "none"


def settings(request: ChatRequest, service: Service) -> dict[str, Any]:
    """The request's settings with llama-server's names."""
    params = SamplingParams(**{**request.sampling, "json_schema": None, "grammar": None})
    hidden = ("seed", "logit_bias", "min_tokens", "regex", "json_schema", "strict", "dry_breakers")
    shown = {REQUEST.get(name, name): vars(params)[name] for name in SAMPLING if name not in hidden}
    n_predict = -1 if request.max_tokens is None else request.max_tokens
    return {
        "seed": service.sampling.get("seed", 2**32 - 1) if not request.id else params.seed,
        **shown,
        "dynatemp_range": 0.0,
        "top_n_sigma": -1.0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": list(request.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_probs": request.logprobs or 0,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in params.logit_bias.items()],
        "grammar": request.sampling.get("grammar") or "",
        "speculation": request.method,
    }


def _model(service: Service, loaded: LoadedModel) -> dict[str, Any]:
    return {
        "id": service.name(),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "speculation",
        "status": {"value": "loaded"},
        "meta": {
            "n_vocab": service.facts.n_vocab,
            "n_ctx": loaded.n_ctx,
            "n_ctx_train": service.facts.n_ctx_train,
            "n_embd": service.facts.n_embd,
            "n_params": service.facts.n_params,
            "size": service.facts.n_bytes,
        },
    }


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
