"""What all requests for text have in common, as pydantic models with one name for each field.
``AliasChoices`` have the names that other APIs give it, null is as good as nothing, and unknown
fields are ignored, but for those that would change the text: ``REFUSED``."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    model_validator,
)

from app.api.errors import ApiError
from app.worker.wording import REQUEST, SAMPLING, failure
from batching.errors import SpeculationError
from speculation.sampling import SamplingParams

MOST_CHOICES = 64
# More of these hold up other requests.
MOST_STOPS, LONGEST_STOP = 128, 500
MOST_BIASES = 1024

# Fields that would change the text and are not supported, each with what to do instead.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        "dynatemp_range top_n_sigma adaptive_target min_keep grammar_lazy lora image_data audio "
        "web_search_options no_repeat_ngram_size use_beam_search chat_template documents "
        "truncate_prompt_tokens".split(),
        "leave it out",
    ),
    **dict.fromkeys(("stop_token_ids", "bad_words"), "give stop or logit_bias"),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"),
        "give json_schema, regex or grammar",
    ),
    "allowed_token_ids": "give logit_bias or grammar",
    "ebnf": "give grammar",
    "min_new_tokens": "give min_tokens",
    "repetition_penalty": "give repeat_penalty, and repeat_last_n -1",
    "reasoning_budget": "give thinking_budget_tokens",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "best_of": "ask for n texts, and choose among them",
}
# Their highest values that change nothing, if not 0.
_HIGHEST = {"adaptive_target": -1, "reasoning_budget": -1, "repetition_penalty": 1, "best_of": 1}

# llama-server's samplers in the only order there is here, with the settings that turn them off.
SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
    "infill": {},
}


class Posted(BaseModel):
    """A request, or a part of one."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None}


class Tagged(Posted):
    """A part of a request that is of one of several types. All are one model, so that an error
    names the field alone.

    needs  the fields without which a type means nothing
    """

    type: str
    needs: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _is_complete(self) -> Tagged:
        needed = self.needs.get(self.type)
        if needed is not None and needed not in self.model_fields_set:
            raise ValueError(f"{self.type} needs a {needed}")
        return self


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _bias(value: Any) -> Any:
    """llama-server's false, and null, forbid a token."""
    if value is None or value is False:
        return -math.inf
    if value is True or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise ValueError("give a number, or false to forbid the token")
    return value


Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS), BeforeValidator(_listed)]
Bias = Annotated[float, BeforeValidator(_bias)]
TextBiases = Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)]
ListedBiases = Annotated[list[tuple[StrictInt | str, Bias]], Field(max_length=MOST_BIASES)]


OneReply = Annotated[int, BeforeValidator(lambda _: 1)]  # where an API has no choices


class Speculation(Posted, extra="allow"):
    """How drafts are made: a method and its parameters, as on the command line.

    memory  whether to draft from earlier texts, and to keep this one for later ones
    """

    method: str | None = None
    memory: bool = True

    def spelled(self, default: str) -> str:
        """As ``parse_method`` takes it; ``default`` is the method if none is named."""
        given, method = self.model_extra or {}, self.method
        if not given:
            return default if method is None else method
        method = "auto" if method is None else method
        pairs = ",".join(f"{name}={_value(value)}" for name, value in given.items())
        return f"{method}{',' if ':' in method else ':'}{pairs}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(str(item) for item in value)
    if isinstance(value, int | float | str):
        return str(value)
    raise ApiError(
        f"a parameter of speculation is {value!r:.60}; give a number, text or boolean",
        param="speculation",
    )


class ResponseFormat(Posted, extra="allow"):
    """The form of a reply. Chat completions have the schema in ``json_schema.schema``;
    llama-server, responses and messages have it in ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(
        None,
        validation_alias=AliasChoices(AliasPath("json_schema", "schema"), "schema"),
        serialization_alias="schema",
    )
    strict: bool = Field(
        False, validation_alias=AliasChoices(AliasPath("json_schema", "strict"), "strict")
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that hold a reply to this form."""
        if self.type == "text":
            return {}
        if self.schema_ is None and self.type == "json_schema":
            raise ApiError(
                "response_format has type json_schema but no schema; give one as "
                '"json_schema": {"schema": …}',
                param="response_format",
            )
        schema = {"type": "object"} if self.schema_ is None else self.schema_
        return {"json_schema": schema, "strict": self.strict}


class StreamOptions(Posted):
    include_usage: bool = False


class Sampling(Posted, extra="allow"):
    """What all requests for text have in common. Fields of ``SamplingParams``, with llama-server's
    names, are further fields. None = the server's default."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES, validation_alias=AliasChoices("n_cmpl", "n"))
    max_tokens: int = Field(
        -1, ge=-1, validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens")
    )
    samplers: list[str] | None = None
    stop: Stops = Field(default_factory=list)
    logit_bias: TextBiases | ListedBiases = Field(default_factory=dict)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] = Field(default_factory=list)
    speculation: Speculation = Speculation()
    cache_prompt: bool = True
    t_max_predict_ms: float = 0.0
    n_indent: int = Field(0, ge=0)
    timings_per_token: bool = False
    return_progress: bool = False
    verbose: bool = False

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            is_low = isinstance(value, int | float) and value <= _HIGHEST.get(name, 0)
            if name in REFUSED and not (is_low or value is None or value in ("", [], {})):
                raise ApiError(f"{name} is not supported; {REFUSED[name]}", param=name)
        return given

    @property
    def limit(self) -> int | None:
        """The most tokens of a reply; None means no limit."""
        return None if self.max_tokens < 0 else self.max_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``SamplingParams``, but for ``logit_bias``; a missing seed is drawn.

        Raises ApiError.
        """
        given = self.model_extra or {}
        names = {name: REQUEST.get(name, name) for name in SAMPLING}
        known = {name: given[theirs] for name, theirs in names.items() if theirs in given}
        found = {"seed": -1, **defaults, **known}
        if found.get("grammar") == "":
            del found["grammar"]
        if self.response_format is not None:
            found.update(self.response_format.sampling)
        if self.samplers is not None:
            found.update(_only(self.samplers))
        with suppress(TypeError):  # SamplingParams says it better
            if found["temperature"] < 0:  # llama-server: greedy
                found["temperature"] = 0.0
            n_seeds, seed = 2**32 - 1, found["seed"]
            found["seed"] = secrets.randbelow(n_seeds) if seed < 0 else seed % n_seeds
        try:
            SamplingParams(**found)
        except SpeculationError as error:
            raise ApiError.of(failure(error)) from None
        return found

    def biases(self) -> Iterator[tuple[int | str, float]]:
        """``logit_bias`` as pairs of a token or a text, and what is added to its logit. A token's
        id may be written as a text."""
        given = self.logit_bias
        for key, value in given.items() if isinstance(given, dict) else given:
            is_id = isinstance(key, str) and key.isdecimal() and len(key) < 12
            yield int(key) if is_id else key, value


def _only(samplers: Sequence[str]) -> dict[str, float]:
    """The settings that leave only ``samplers`` on, whose order cannot be changed.

    Raises ApiError.
    """
    if samplers != [name for name in SAMPLERS if name in samplers]:
        raise ApiError(
            f"samplers is {samplers!r:.200}, but the order here is {', '.join(SAMPLERS)}; give "
            "some of these in this order",
            param="samplers",
        )
    off: dict[str, float] = {}
    for name, settings in SAMPLERS.items():
        off |= {} if name in samplers else settings
    # ``infill`` keeps tokens from a probability of 0.2 on, which is nearly this.
    return off | ({"min_p": 0.2} if "infill" in samplers else {})
