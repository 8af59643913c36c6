"""What all requests for text have in common: sampling, limits, structure and drafts, with the names
that other servers have for them. Fields that are not named here are ignored, unless they would
change the text (``REFUSED``)."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt, model_validator

from app.api.body import Posted
from app.api.errors import ApiError
from app.worker.wording import REQUEST
from speculation.sampling import MOST_BREAKERS

MOST_CHOICES = 64
# More of these hold up other requests.
MOST_STOPS, LONGEST_STOP = 128, 500
MOST_BIASES = 1024
MOST_LISTED = 1024  # texts to choose from, parts of a message, tools

# Fields of other servers that would change the text and are not supported, each with the highest
# value that changes nothing.
REFUSED: Mapping[str, float] = {
    # llama-server
    "dynatemp_range": 0,
    "top_n_sigma": 0,
    "adaptive_target": -1,
    "min_keep": 0,
    "grammar_lazy": 0,
    "lora": 0,
    "image_data": 0,
    # OpenAI
    "audio": 0,
    "web_search_options": 0,
    # vLLM and SGLang
    "stop_token_ids": 0,
    "allowed_token_ids": 0,
    "bad_words": 0,
    "no_repeat_ngram_size": 0,
    "use_beam_search": 0,
    "chat_template": 0,
    "documents": 0,
    "truncate_prompt_tokens": 0,
    "structured_outputs": 0,
}
_INSTEAD = {
    "structured_outputs": "give json_schema, regex or grammar",
    **dict.fromkeys(("stop_token_ids", "bad_words"), "give stop or logit_bias"),
    "allowed_token_ids": "give logit_bias or grammar",
}

# Names of vLLM and SGLang for fields that are here.
_SAME = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "min_new_tokens": "min_tokens",
}

# llama-server's samplers in the only order there is here, its letters for them, and the settings
# that turn them off.
SAMPLERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "penalties": (
        "e",
        {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ),
    "dry": ("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": ("s", {}),
    "top_k": ("k", {"top_k": 0}),
    "typ_p": ("y", {"typical_p": 1.0}),
    "top_p": ("p", {"top_p": 1.0}),
    "min_p": ("m", {"min_p": 0.0}),
    "xtc": ("x", {"xtc_probability": 0.0}),
    "temperature": ("t", {"temperature": 1.0}),
    "infill": ("i", {}),
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
    """The form of a reply. OpenAI has the schema in ``json_schema.schema``; llama-server has it in
    ``schema``, of the type ``json_object`` or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @property
    def is_strict(self) -> bool:
        """Whether no part of the schema may be left out."""
        return self.json_schema is not None and self.json_schema.strict

    @property
    def required(self) -> dict[str, Any] | bool | None:
        """The schema that the reply must have, if any."""
        if self.type == "text":
            return None
        given = self.schema_ if self.json_schema is None else self.json_schema.schema_
        if given is not None:
            return given
        if self.type == "json_schema":
            raise ApiError(
                "response_format has type json_schema but no schema; give one as "
                '"json_schema": {"schema": …}',
                param="response_format",
            )
        return {"type": "object"}


class StreamOptions(Posted):
    include_usage: bool = False


class Sampling(Posted):
    """What OpenAI's and llama-server's requests have in common. None = the server's default."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    n_cmpl: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = Field(None, max_length=MOST_BREAKERS)
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: list[str] | str | None = None
    seed: int | None = None
    stop: Stops = Field(default_factory=list)
    logit_bias: TextBiases | ListedBiases | None = None
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    grammar: str | None = None
    regex: str | None = None
    guided_choice: list[str] = Field([], max_length=MOST_LISTED)
    json_schema: dict[str, Any] | bool | str | None = None
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
    def _in_our_words(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, highest in REFUSED.items():
            value = given.get(name)
            is_low = isinstance(value, int | float) and value <= highest
            if not (is_low or value is None or value in ("", [], {})):
                instead = _INSTEAD.get(name, "leave it out")
                raise ApiError(f"{name} is not supported; {instead}", param=name)
        if given.get("modalities") not in (None, [], ["text"]):
            raise ApiError('modalities other than "text" are not supported', param="modalities")
        return {_SAME.get(name, name): value for name, value in given.items()}

    @property
    def n_choices(self) -> int:
        """Replies to each prompt."""
        return self.n_cmpl or self.n

    @property
    def limit(self) -> int | None:
        """The most tokens of a reply; None and -1 mean no limit."""
        given = (self.n_predict, self.max_completion_tokens, self.max_tokens)
        limit = next((n for n in given if n is not None), -1)
        if limit < -1:
            raise ApiError(
                f"max_tokens is {limit}; give 0 or more, or -1 for no limit", param="max_tokens"
            )
        return None if limit == -1 else limit

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``SamplingParams``, but for ``logit_bias``; a missing seed is drawn.

        Raises ApiError.
        """
        names = {ours: name for name, ours in REQUEST.items()}
        fields = (
            "temperature top_p top_k min_p typical_p xtc_probability xtc_threshold "
            "presence_penalty frequency_penalty repeat_penalty repeat_last_n dry_multiplier "
            "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat "
            "mirostat_tau mirostat_eta min_tokens grammar regex json_schema"
        ).split()
        given = self.model_dump(include=set(fields)).items()
        known = {names.get(name, name): value for name, value in given if value is not None}
        if self.repetition_penalty is not None:  # of the whole text, in other programs
            known = {
                "repeat_penalty": self.repetition_penalty,
                "penalty_last_n": -1,
                **known,
            }
        found = {**defaults, **known}
        if "dry_breakers" in found:
            found["dry_breakers"] = tuple(found["dry_breakers"])
        if not found.get("grammar"):
            found.pop("grammar", None)
        if self.guided_choice:
            found["regex"] = "|".join(map(re.escape, self.guided_choice))
        if self.response_format is not None:
            schema = self.response_format.required
            if schema is not None:
                found["json_schema"] = schema
        if "grammar" in found and "json_schema" in found:
            raise ApiError(
                "grammar and a JSON schema exclude each other; give one", param="grammar"
            )
        if found["temperature"] < 0:  # llama-server: greedy
            found["temperature"] = 0.0
        if self.samplers is not None:
            found.update(_turned_off(self.samplers))
        seed = self.seed if self.seed is not None else defaults.get("seed", -1)
        found["seed"] = secrets.randbelow(2**32 - 1) if seed < 0 else seed % (2**32 - 1)
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


def _turned_off(samplers: Sequence[str] | str) -> dict[str, float]:
    """The settings that leave only ``samplers`` on: names, or a text of letters. Raises ApiError.

    Their order cannot be changed.
    """
    letters = {letter: name for name, (letter, _) in SAMPLERS.items()}
    given = [letters.get(one, one) for one in samplers]
    given = ["typ_p" if one == "typical_p" else one for one in given]
    kept = [name for name in SAMPLERS if name in given]
    if given != kept:
        raise ApiError(
            f"samplers is {samplers!r:.200}, but the order here is {', '.join(SAMPLERS)}; give "
            "some of these in this order",
            param="samplers",
        )
    off: dict[str, float] = {}
    if "infill" in given:  # it keeps tokens from a probability of 0.2 on, which is nearly this
        off["min_p"] = 0.2
    for name, (_, settings) in SAMPLERS.items():
        if name not in given:
            off = {**settings, **off}
    return off
