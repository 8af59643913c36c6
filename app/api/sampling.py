"""What all requests for text have in common: sampling, limits, structure and drafts. Fields of
other servers that would change the text are ``REFUSED``; other unknown ones are ignored."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StrictInt, model_validator

from app.api.body import Posted
from app.api.errors import ApiError
from app.worker.wording import REQUEST, SAMPLING, failure
from batching.errors import SpeculationError
from speculation.sampling import SamplingParams

MOST_CHOICES = 64
# More of these hold up other requests.
MOST_STOPS, LONGEST_STOP = 128, 500
MOST_BIASES = 1024
MOST_LISTED = 1024  # texts to choose from, parts of a message, tools

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


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_STOP)]],
    Field(max_length=MOST_STOPS),
    BeforeValidator(_listed),
]


def _bias(value: Any) -> Any:
    """llama-server's false, and null, forbid a token."""
    if value is None or value is False:
        return -math.inf
    if value is True or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise ValueError("give a number, or false to forbid the token")
    return value


Bias = Annotated[float, BeforeValidator(_bias)]
TextBiases = Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)]
ListedBiases = Annotated[list[tuple[StrictInt | str, Bias]], Field(max_length=MOST_BIASES)]


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


class JsonSchema(Posted):
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Posted):
    """The form of a reply. Chat completions have the schema in ``json_schema.schema``;
    llama-server, responses and messages have it in ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that hold a reply to this form."""
        if self.type == "text":
            return {}
        form = self.json_schema or self
        if form.schema_ is None and self.type == "json_schema":
            raise ApiError(
                "response_format has type json_schema but no schema; give one as "
                '"json_schema": {"schema": …}',
                param="response_format",
            )
        schema = {"type": "object"} if form.schema_ is None else form.schema_
        return {"json_schema": schema, "strict": form.strict}


class StreamOptions(Posted):
    include_usage: bool = False


class Sampling(Posted, extra="allow"):
    """What OpenAI's and llama-server's requests have in common. Fields of ``SamplingParams``, with
    llama-server's names, are further fields. None = the server's default."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES, validation_alias=AliasChoices("n_cmpl", "n"))
    max_tokens: int = Field(
        -1,
        ge=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
    )
    samplers: list[str] | None = None
    stop: Stops = Field(default_factory=list)
    logit_bias: TextBiases | ListedBiases | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
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
        for name, instead in REFUSED.items():
            value = given.get(name)
            is_low = isinstance(value, int | float) and value <= _HIGHEST.get(name, 0)
            if not (is_low or value is None or value in ("", [], {})):
                raise ApiError(f"{name} is not supported; {instead}", param=name)
        if given.get("modalities") not in (None, [], ["text"]):
            raise ApiError('modalities other than "text" are not supported', param="modalities")
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

    def biases(self) -> list[tuple[int | str, float]]:
        """``logit_bias`` as pairs of a token or a text, and what is added to its logit."""
        if self.logit_bias is None:
            return []
        given = self.logit_bias
        pairs = given.items() if isinstance(given, dict) else given
        return [(_token(key), value) for key, value in pairs]


def _token(key: int | str) -> int | str:
    """A token's id, which may be written as a text; any other text as it is."""
    if isinstance(key, str) and key.isdecimal() and len(key) < 12:
        return int(key)
    return key


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
    off = {
        setting: value
        for name, settings in SAMPLERS.items()
        if name not in samplers
        for setting, value in settings.items()
    }
    # ``infill`` keeps tokens from a probability of 0.2 on, which is nearly this.
    return off | ({"min_p": 0.2} if "infill" in samplers else {})
