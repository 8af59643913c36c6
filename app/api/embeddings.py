"""``/v1/embeddings``: vectors of texts, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from app.api.body import Call, Posted
from app.api.errors import ApiError
from app.api.json_text import dumps
from app.api.replies import answer
from app.api.schemas import JsonPrompt, Prompt, prompts_of
from app.api.service import Service
from app.worker.messages import Embed

MOST_INPUTS = 2048  # as OpenAI


class EmbeddingRequest(Posted):
    """Texts, or token ids, to turn into vectors."""

    input: Prompt | list[str | list[int | str] | JsonPrompt]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


def routes(service: Service) -> APIRouter:
    """The routes that ``service`` answers."""
    router = APIRouter(route_class=Call)

    @router.post("/v1/embeddings")
    @router.post("/embeddings")
    async def embed(asked: EmbeddingRequest, http: Request) -> Response:
        texts, _ = prompts_of(asked.input)
        if not 1 <= len(texts) <= MOST_INPUTS:
            raise ApiError(f"input has {len(texts)} texts; give 1 to {MOST_INPUTS}", param="input")
        if not service.facts.embedding_model:
            await service.take_model(asked.model, http)
        service.model()
        name = Path(service.facts.embedding_model).name or service.name()
        question = Embed(tuple(texts))
        found = await answer(service.backend, question)
        vectors = [np.frombuffer(vector, "<f4") for vector in found.vectors]
        parts = await _written(_shortened(vectors, asked.dimensions), asked.encoding_format)
        counts = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
        head = dumps({"object": "list", "model": name, "usage": counts})
        body = f'{head[:-1]},"data":[{",".join(parts)}]}}'
        return Response(body, media_type="application/json")

    return router


def _shortened(
    vectors: Sequence[npt.NDArray[np.float32]], n: int | None
) -> list[npt.NDArray[np.float32]]:
    """The first ``n`` numbers of each vector, with length 1 again."""
    if n is None:
        return list(vectors)
    if n > len(vectors[0]):
        raise ApiError(
            f"dimensions is {n}; this model's vectors have {len(vectors[0])}", param="dimensions"
        )
    short = [vector[:n] for vector in vectors]
    return [vector / (np.linalg.norm(vector) or 1) for vector in short]


async def _written(vectors: Sequence[npt.NDArray[np.float32]], kind: str) -> list[str]:
    """Each vector's JSON. Other calls go on meanwhile: many vectors take a while."""
    found = []
    for index, vector in enumerate(vectors):
        value: Any = vector.tolist()
        if kind == "base64":
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        found.append(dumps({"object": "embedding", "index": index, "embedding": value}))
        await asyncio.sleep(0)
    return found
