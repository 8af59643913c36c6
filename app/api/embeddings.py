"""``/v1/embeddings``: vectors of texts, as OpenAI's API has them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from app.api.answers import as_json_in_thread
from app.api.body import Call
from app.api.errors import ApiError
from app.api.replies import answer
from app.api.requests import JsonPrompt, Prompt, prompts_of
from app.api.sampling import Posted
from app.api.service import Engine
from app.worker.messages import Embed

router = APIRouter(route_class=Call)

MOST_INPUTS = 2048  # as OpenAI


class EmbeddingRequest(Posted):
    """Texts, or token ids, to turn into vectors."""

    input: Prompt | list[str | list[int | str] | JsonPrompt]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


@router.post("/v1/embeddings")
@router.post("/embeddings")
async def embed(asked: EmbeddingRequest, http: Request, service: Engine) -> Response:
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
    short = _shortened(vectors, asked.dimensions)
    counts = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    head = {"object": "list", "model": name, "usage": counts}
    return await as_json_in_thread(
        lambda: {**head, "data": [*_written(short, asked.encoding_format)]}
    )


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


def _written(vectors: Sequence[npt.NDArray[np.float32]], kind: str) -> Iterator[dict[str, Any]]:
    for index, vector in enumerate(vectors):
        value: Any = vector.tolist()
        if kind == "base64":
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        yield {"object": "embedding", "index": index, "embedding": value}
