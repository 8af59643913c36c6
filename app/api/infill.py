"""What belongs between two parts of a file: ``/infill``, llama-server's route for editors, and the
``suffix`` of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from app.api.body import Call
from app.api.errors import ApiError
from app.api.native import completed
from app.api.replies import answer
from app.api.requests import Completion, prompts_of
from app.api.sampling import Posted
from app.api.service import MOST_PROMPTS, Engine, Service
from app.worker.messages import Tokenize

router = APIRouter(route_class=Call)

PREFIX_SHARE = 0.75  # of the room for the file that is edited; the suffix has the rest
REPLY_ROOM = 256  # tokens that are left for a reply without a limit
MOST_EXTRA = 256  # parts of other files; each is tokenized by itself
REPOSITORY = "repository\n"  # its name, of which requests say nothing
FILE = "file\n"  # the edited file's


class Extra(Posted):
    """A part of another file."""

    text: str
    filename: str = "snippet"


class Infill(Completion):
    """A place in a file."""

    input_prefix: str
    input_suffix: str = ""
    input_extra: list[Extra] = Field(default_factory=list, max_length=MOST_EXTRA)
    prompt: str = ""  # text after the prefix, which the reply continues


@router.post("/infill")
async def infill(asked: Infill, http: Request, service: Engine) -> Response:
    await service.take_model(asked.model, http)
    tokens = await _tokens(service, asked)
    return await completed(service, asked.model_copy(update={"prompt": tokens}), http)


async def before_suffix(service: Service, asked: Completion, http: Request) -> Completion:
    """A completion whose prompts have its ``suffix`` in them. Raises ApiError."""
    await service.take_model(asked.model, http)
    prompts = []
    for prompt in prompts_of(asked.prompt)[0][: MOST_PROMPTS + 1]:
        if asked.echo or any(isinstance(part, int) for part in prompt):
            raise ApiError("suffix needs a prompt of text, without echo", param="suffix")
        text = "".join(map(str, prompt))
        gap = Infill.model_validate(
            {"input_prefix": text, "input_suffix": asked.suffix, "max_tokens": asked.max_tokens}
        )
        prompts.append(await _tokens(service, gap, 400))
    return asked.model_copy(update={"prompt": prompts, "suffix": None})


async def _tokens(service: Service, asked: Infill, status: int = 501) -> list[int]:
    """The prompt: parts of other files, then the edited one. Raises ApiError, with ``status`` if
    the model has no tokens for that."""
    model, marks = service.model(), service.facts.fim
    missing = [name for name in ("prefix", "suffix", "middle") if name not in marks]
    if missing:
        raise ApiError(
            f"{service.name()} has no token for {', '.join(missing)}: it was not trained to fill "
            "in the middle; load a model for code, or ask for a completion without a suffix",
            status,
        )

    async def split(text: str, add_special: bool = False) -> list[int]:
        if not text and not add_special:
            return []
        question = Tokenize(text, add_special, parse_special=False)
        return [token for token, _ in (await answer(service.backend, question)).tokens]

    begin = await split("", add_special=True)
    prefix = await split(asked.input_prefix)
    written, suffix = await split(asked.prompt), await split(asked.input_suffix)
    extra: list[int] = []
    if asked.input_extra:
        if "repository" in marks:
            extra += [marks["repository"], *await split(REPOSITORY)]
        for part in asked.input_extra:
            extra += [marks["file"]] if "file" in marks else await split("\n\n")
            extra += await split(f"{part.filename}\n{part.text}")
        if "file" in marks:
            extra += [marks["file"], *await split(FILE)]
    room = model.n_ctx - (REPLY_ROOM if asked.limit is None else asked.limit)
    return fitted(marks, begin, extra, prefix, written, suffix, room)


def fitted(
    marks: Mapping[str, int],
    begin: Sequence[int],
    extra: Sequence[int],
    prefix: Sequence[int],
    written: Sequence[int],
    suffix: Sequence[int],
    room: int,
) -> list[int]:
    """The prompt, in at most ``room`` tokens: what is nearest to the gap is kept.

    ``begin`` and ``written`` are kept whole. A side that needs less than its share leaves the rest
    to the other one, and both leave the rest to ``extra``.
    """
    n_left = max(0, room - len(begin) - len(written) - 3)
    share = max(int(PREFIX_SHARE * n_left), n_left - len(suffix))
    n_prefix = min(len(prefix), share)
    n_suffix = min(len(suffix), n_left - n_prefix)
    n_extra = min(len(extra), n_left - n_prefix - n_suffix)
    return [
        *begin,
        *extra[len(extra) - n_extra :],
        marks["prefix"],
        *prefix[len(prefix) - n_prefix :],
        *written,
        marks["suffix"],
        *suffix[:n_suffix],
        marks["middle"],
    ]
