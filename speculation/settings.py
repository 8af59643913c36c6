"""Settings of a request, as people write them: texts, numbers and names, by keyword."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, TypedDict

from batching.errors import InvalidParameter, hints_of, require_types
from batching.llama.model import Model
from speculation.drafter import Method, MethodSpec
from speculation.methods import load_method_file, parse_method
from speculation.request import Request
from speculation.sampling import SamplingParams

DEFAULT_METHOD = "auto"


class Settings(TypedDict, total=False):
    """Settings of a request: the keyword arguments of ``Engine.generate`` and ``Engine.chat``.

    The fields of ``SamplingParams``, such as ``temperature``, may be given as keywords, too.

    method      a name, ``name:parameter=value,…``, ``FILE.py:SPEC``, a Method or a MethodSpec;
                default ``auto``
    sampling    how tokens are chosen; default greedy
    max_tokens  limit on generated tokens; None = up to the end of the context
    stop        strings that end the text; they are not part of it
    progress    called with the number of prompt tokens read so far, and their total
    waiting     called with the number of requests ahead of this one, whenever that changes
    logprobs    record each token's log probability and those of this many most likely tokens
    post_sampling  of the distribution that the sampler draws from, instead of the model's
    prediction  text or token ids that the reply is expected to equal for the most part, such as
                the file to edit: methods ``auto`` and ``prediction`` draft from it
    memory      the memory that ``suffix`` and ``auto`` draft from and add to: "" is the engine's,
                another name is that of one client, None is none
    record      keep each step in ``Reply.steps``: its drafts, who drafted them, which were
                accepted, and the time of its phases
    on_disk     False: the text stays in memory also if the engine keeps texts on disk
    """

    method: str | Method | MethodSpec
    sampling: SamplingParams | Mapping[str, Any] | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    progress: Callable[[int, int], None] | None
    waiting: Callable[[int], None] | None
    logprobs: int | None
    post_sampling: bool
    prediction: str | Sequence[int]
    memory: str | None
    record: bool
    on_disk: bool


def request_for(
    model: Model, prompt: str | Sequence[int], opening: str = "", **settings: Any
) -> Request:
    """The request for ``prompt`` with ``settings``, of which ``Settings`` tells.

    Raises InvalidParameter.
    """
    require_types(settings, _HINTS)
    given = _without_sampling(settings)
    given["method"] = as_method(given.get("method", DEFAULT_METHOD))
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else given["stop"]
        given["stop"] = tuple(given["stop"] or ())
    if "prediction" in given:
        given["prediction"] = tokens_of(
            model, given["prediction"], "the prediction", add_special=False
        )
    return Request(tokens_of(model, prompt, "the prompt"), opening=opening, **given)


_HINTS = {
    name: hint
    for name, hint in hints_of(Settings).items()
    if name not in ("method", "sampling", "prediction")  # these have errors of their own
}
_SAMPLING = [one.name for one in dataclasses.fields(SamplingParams)]


def _without_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with all that concerns sampling in ``sampling``."""
    given = {name: value for name, value in settings.items() if name not in _SAMPLING}
    for name in given:
        if name not in Settings.__annotations__:
            known = [*Settings.__annotations__, *_SAMPLING]
            raise InvalidParameter(f"there is no setting {name!r}; give some of {', '.join(known)}")
    own = {name: value for name, value in settings.items() if name in _SAMPLING}
    sampling = given.pop("sampling", None)
    if isinstance(sampling, Mapping):
        unknown = [name for name in sampling if name not in _SAMPLING]
        if unknown:
            raise InvalidParameter(
                f"sampling has {unknown[0]!r}; give some of {', '.join(_SAMPLING)}"
            )
        sampling = SamplingParams(**sampling)
    elif sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidParameter(
            f"sampling is {sampling!r}; give SamplingParams(temperature=0.8), or temperature=0.8"
        )
    given["sampling"] = dataclasses.replace(sampling or SamplingParams(), **own)
    return given


def as_method(method: str | Method | MethodSpec) -> Method:
    """The method that a string, a MethodSpec or a Method stands for. Raises InvalidParameter."""
    if isinstance(method, Method):
        return method
    if isinstance(method, MethodSpec):
        return Method(method, method.params())
    if isinstance(method, str):
        return parse_method(load_method_file(method))
    raise InvalidParameter(
        f"method is {method!r}; give a name such as 'suffix', 'FILE.py:SPEC' or a MethodSpec"
    )


def tokens_of(
    model: Model, text: str | Sequence[int], what: str, *, add_special: bool = True
) -> tuple[int, ...]:
    """The tokens of a text, or token ids that are checked. Raises InvalidParameter."""
    if isinstance(text, str):
        return tuple(model.tokenize(text, add_special=add_special))
    last = model.n_vocab - 1
    try:
        tokens = tuple([index(token) for token in text])
    except TypeError:
        raise InvalidParameter(f"{what} is {text!r:.60}; give a text, or token ids") from None
    if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
        invalid = next(token for token in tokens if not 0 <= token <= last)
        raise InvalidParameter(f"{what} has token {invalid}; this model has 0 to {last}")
    return tokens
