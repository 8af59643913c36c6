"""Requests for text, as pydantic models with one name for each field. ``AliasChoices`` have the
names that other APIs give it, null is as good as nothing, and unknown fields are ignored, but for
those that would change the text: ``REFUSED``."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from app.api.errors import ApiError
from app.worker.wording import REQUEST, SAMPLING, failure
from batching.errors import SpeculationError
from speculation.chat.template import THINKING
from speculation.sampling import SamplingParams

log = logging.getLogger(__name__)

MOST_CHOICES = 64
MOST_LOGPROBS = 100
# More of these hold up other requests.
MOST_STOPS, LONGEST_STOP = 128, 500
MOST_BIASES = 1024
MOST_LISTED = 1024  # parts of a message, tools
MOST_MESSAGES = 2**14
MOST_TOKENS = 2**20  # of a prompt

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
        -1,
        ge=-1,
        validation_alias=AliasChoices("n_predict", "max_completion_tokens", "max_tokens"),
    )
    samplers: list[str] | None = None
    stop: Stops = Field(default_factory=list)
    logit_bias: TextBiases | ListedBiases = Field(default_factory=dict)
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


class JsonPrompt(Posted):
    prompt_string: str
    multimodal_data: list[str] | str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> JsonPrompt:
        if self.multimodal_data:
            raise ValueError("multimodal_data is not supported; send text")
        return self


Tokens = Annotated[list[int | str], Field(max_length=MOST_TOKENS)]
Prompt = str | JsonPrompt | Tokens
Prompts = Annotated[list[str | Tokens | JsonPrompt], Field(max_length=MOST_TOKENS)]


def prompts_of(prompt: Prompt | list[Any]) -> tuple[list[tuple[str | int, ...]], bool]:
    """The prompts of a request, and whether it has a list of them.

    A list of numbers, or of numbers and texts, is one prompt; a list of texts or lists is several.
    """

    def parts(one: Any) -> tuple[str | int, ...]:
        if isinstance(one, JsonPrompt):
            return (one.prompt_string,)
        return (one,) if isinstance(one, str) else tuple(one)

    if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
        return [parts(each) for each in prompt], True
    return [parts(prompt)], False


class Completion(Sampling):
    """``/v1/completions``, and llama-server's ``/completion``."""

    prompt: Prompt | Prompts
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    n_probs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    return_tokens: bool = False
    post_sampling_probs: bool = False


class Part(Posted):
    """A part of a message's content, in any API's words."""

    type: str = "text"
    text: str | None = Field(None, validation_alias=AliasChoices("text", "refusal", "thinking"))


Parts = list[Part | str]
Content = str | Parts | dict[str, Any]
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_SOUNDS = ("audio", "input_audio")


def text_of(
    content: Content | None, *, is_new: bool = True, between: str = "\n"
) -> tuple[str, str]:
    """The text and the reasoning of a content, with ``between`` between its parts. ``is_new``
    refuses what is no text; in an old turn a note takes its place, for the conversation could not
    go on otherwise."""
    if isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False), ""
    if not isinstance(content, list):
        return content or "", ""
    if len(content) > MOST_LISTED:
        raise ApiError(f"a message has {len(content)} parts; give at most {MOST_LISTED}")
    texts, thoughts = [], []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.type in _THOUGHTS:
            thoughts.append(part.text or "")
        elif part.type in _TEXTS and part.text is not None:
            texts.append(part.text)
        elif is_new or part.type in _SOUNDS or part.type in _TEXTS:
            raise ApiError(
                f"a part of type {part.type!r:.40} is not supported: models read text alone here; "
                f"send text"
            )
        else:
            texts.append(f"[{part.type.removesuffix('_url').removeprefix('input_')} left out]")
    return between.join(texts), "\n".join(thoughts)


class Message(Posted):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def given(self, *, is_new: bool) -> dict[str, Any]:
        """The message as the engine gets it. ``is_new`` if it is what a reply is asked for."""
        between = "\n\n" if self.role == "assistant" else "\n"  # as llama-server
        text, thoughts = text_of(self.content, is_new=is_new, between=between)
        other = self.reasoning if isinstance(self.reasoning, str) else ""
        reasoning = self.reasoning_content or other or thoughts
        found = self.model_dump(exclude_none=True, exclude={"content", "reasoning", "refusal"})
        found["content"] = text or self.refusal or ""
        return {**found, "reasoning_content": reasoning} if reasoning else found


def _joined(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return text_of([Part.model_validate(part) for part in value])[0]


class Prediction(Posted):
    type: Literal["content"] = "content"
    content: Annotated[str, BeforeValidator(_joined)]


class Named(Posted):
    name: str


class ToolChoice(Posted):
    """One tool, or some (``allowed_tools``), in the form of a chat completion or of a response."""

    type: str = "function"
    name: str = ""
    namespace: str | None = None
    function: Named | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolChoice] = Field(default_factory=list, max_length=MOST_LISTED)
    allowed_tools: ToolChoice | None = None


Choice = Literal["auto", "none", "required"] | ToolChoice


class Talk(Posted):
    """What a chat is about, in a chat completion's terms.

    tools  functions, and tools of other types, which nobody here can run
    """

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MOST_LISTED)
    tool_choice: Choice = "auto"

    def given(self) -> tuple[dict[str, Any], ...]:
        """The messages as the engine gets them. Raises ApiError for what is no text in a turn that
        is not answered yet."""
        roles = [message.role for message in self.messages]
        new = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        return tuple(
            message.given(is_new=message.role == "user" and number >= new)
            for number, message in enumerate(self.messages)
        )


def _choice(choice: Choice) -> Any:
    """The choice of tools as the engine gets it."""
    if isinstance(choice, str):
        return choice
    if choice.type != "allowed_tools":
        return {"type": "function", "function": {"name": (choice.function or choice).name}}
    some = choice.allowed_tools or choice
    return {"type": "allowed_tools", "mode": some.mode, "tools": [*map(_choice, some.tools)]}


class Chat(Sampling):
    """What the requests for a chat's reply have in common, in any API."""

    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    thinking_budget: int = Field(
        -1, validation_alias=AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens")
    )
    enable_thinking: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message exclude each other; set one"
            )
        for name in THINKING:
            value = self.chat_template_kwargs.get(name)
            if value is not None and not isinstance(value, bool):
                field = f"chat_template_kwargs.{name}"
                raise ApiError(f"{field} is {value!r:.60}; give true or false", param=field)
        return self

    def talk(self) -> Talk:
        """The conversation to reply to. Raises ApiError."""
        raise NotImplementedError

    @property
    def n_probs(self) -> int | None:
        """How many of the likeliest tokens come with each token; None means no probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    @property
    def reasons(self) -> bool | None:
        """Whether to reason; None = the model's default. What the template is given comes first."""
        for name in THINKING:
            if (given := self.chat_template_kwargs.get(name)) is not None:
                return bool(given)
        if self.reasoning_effort == "none" or self.thinking_budget == 0:
            return False
        return self.enable_thinking

    def request(self) -> dict[str, Any]:
        """The fields of ``ChatRequest`` that only a chat has. Raises ApiError."""
        told = self.talk()
        kinds = [str(tool.get("type", "function")) for tool in told.tools]
        tools = [tool for tool, kind in zip(told.tools, kinds, strict=True) if kind == "function"]
        if len(tools) < len(kinds):
            _tell_left_out(tuple(dict.fromkeys(kind for kind in kinds if kind != "function")))
        choice = _choice(told.tool_choice)
        if not tools and choice not in ("auto", "none"):
            raise ApiError(
                f"tool_choice is {choice!r:.80}, but the request has no tools that run here; "
                "give functions as tools",
                param="tool_choice",
            )
        more = {
            "reasoning_effort": None if self.reasoning_effort == "none" else self.reasoning_effort,
            "add_generation_prompt": self.add_generation_prompt,
        }
        more = {name: value for name, value in more.items() if value is not None}
        return {
            "messages": told.given(),
            "thinking": self.reasons,
            "logprobs": self.n_probs,
            "tools": tuple(tools),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "template_kwargs": {**more, **self.chat_template_kwargs},
            "continue_last": False if self.add_generation_prompt else self.continue_final_message,
            "prediction": self.prediction.content if self.prediction is not None else "",
            "show_prompt": self.verbose,
            "thinking_budget": None if self.thinking_budget < 0 else self.thinking_budget,
        }


@lru_cache(64)
def _tell_left_out(kinds: tuple[str, ...]) -> None:
    """Say once which types of tools the model is not offered: agents give them in each request."""
    log.warning("left out tools that nobody here can run: %s", ", ".join(map(repr, kinds))[:200])


class ChatCompletion(Talk, Chat):
    """``/v1/chat/completions``."""

    def talk(self) -> Talk:
        return self
