"""Requests of the endpoint, as pydantic models. Fields that are not named here are ignored."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from app.api.errors import ApiError

MOST_CHOICES = 64
MOST_LOGPROBS = 100
MOST_TOKENS = 2**22  # to split a text into, or to join; more hold up other requests


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_listed)]


class Posted(BaseModel):
    """A request, or a part of one. A null is as good as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Speculation(Posted, extra="allow"):
    """How drafts are made: a method and its parameters, as on the command line."""

    method: str = "auto"

    def spelled(self) -> str:
        """As ``parse_method`` takes it."""
        given = self.model_extra or {}
        if not given:
            return self.method
        pairs = ",".join(f"{name}={_value(value)}" for name, value in given.items())
        return f"{self.method}{',' if ':' in self.method else ':'}{pairs}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return "+".join(str(item) for item in value)
    if isinstance(value, int | float | str):
        return str(value)
    raise ApiError(f"a parameter of speculation is {value!r:.60}; give a number, text or boolean")


class Sampling(Posted):
    """What OpenAI's and llama-server's requests have in common. None = the server's default."""

    stream: bool = False
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
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: Texts = []
    logit_bias: dict[str, float | Literal[False]] | list[tuple[int | str, Any]] | None = None
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    speculation: Speculation = Speculation()
    timings_per_token: bool = False
    return_progress: bool = False
    verbose: bool = False
    # What would change the text and is not done here is refused.
    dynatemp_range: float = 0.0
    top_n_sigma: float = -1.0
    adaptive_target: float = -1.0
    lora: list[Any] = []

    @model_validator(mode="after")
    def _is_done_here(self) -> Sampling:
        if self.dynatemp_range > 0 or self.top_n_sigma > 0 or self.adaptive_target >= 0:
            raise ValueError("dynatemp_range, top_n_sigma and adaptive_target are not supported")
        if self.lora:
            raise ValueError("lora is not supported")
        return self

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``SamplingParams``, but for ``logit_bias``; a missing seed is drawn."""
        names = {
            "repeat_last_n": "penalty_last_n",
            "dry_penalty_last_n": "dry_last_n",
            "dry_sequence_breakers": "dry_breakers",
        }
        fields = (
            "temperature top_p top_k min_p typical_p xtc_probability xtc_threshold "
            "presence_penalty frequency_penalty repeat_penalty repeat_last_n dry_multiplier "
            "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat "
            "mirostat_tau mirostat_eta grammar json_schema"
        ).split()
        given = self.model_dump(include=set(fields)).items()
        known = {names.get(name, name): value for name, value in given if value is not None}
        found = {**defaults, **known}
        if "dry_breakers" in found:
            found["dry_breakers"] = tuple(found["dry_breakers"])
        if not found.get("grammar"):
            found.pop("grammar", None)
        if found["temperature"] < 0:  # llama-server: greedy
            found["temperature"] = 0.0
        seed = self.seed if self.seed is not None else defaults.get("seed", -1)
        found["seed"] = secrets.randbelow(2**32 - 1) if seed < 0 else seed % (2**32 - 1)
        return found

    def biases(self) -> list[tuple[int | str, float]]:
        """``logit_bias`` as pairs of a token or a text, and what is added to its logit."""
        if self.logit_bias is None:
            return []
        given = self.logit_bias
        pairs = given.items() if isinstance(given, dict) else given
        found: list[tuple[int | str, float]] = []
        for key, bias in pairs:
            token = int(key) if isinstance(key, str) and key.isdecimal() else key
            value = float("-inf") if bias is False or bias is None else float(bias)
            found.append((token, value))
        return found


class JsonSchema(Posted):
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Posted):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def required(self) -> dict[str, Any] | None:
        """The schema that the reply must have, if any."""
        if self.type == "text":
            return None
        if self.type == "json_schema":
            if self.json_schema is None:
                raise ApiError("response_format has type json_schema but no json_schema; give one")
            return self.json_schema.schema_
        return self.schema_ if self.schema_ is not None else {"type": "object"}

    @property
    def is_strict(self) -> bool:
        """Whether no part of the schema may be left out."""
        return self.json_schema is not None and self.json_schema.strict


class ContentPart(Posted):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


Content = str | list[ContentPart | str] | dict[str, Any]
_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
_SOUNDS = ("audio", "input_audio")


def _text_of(
    content: Content | None, *, is_new: bool = True, between: str = "\n"
) -> tuple[str, str]:
    """The text and the reasoning of a content, with ``between`` between its parts. ``is_new``
    refuses what is no text; in an old turn a note takes its place, for the conversation could not
    go on otherwise."""
    if isinstance(content, dict):
        return json.dumps(content, ensure_ascii=False), ""
    if not isinstance(content, list):
        return content or "", ""
    texts, thoughts = [], []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part.refusal if part.text is None else part.text
        if part.type in _THOUGHTS:
            thoughts.append(part.thinking or text or "")
        elif part.type in _TEXTS and text is not None:
            texts.append(text)
        elif is_new or part.type in _SOUNDS or part.type in _TEXTS:
            raise ApiError(
                f"a part of type {part.type!r:.40} is not supported: models read text alone here; "
                f"send text"
            )
        else:
            texts.append(f"[{part.type.removesuffix('_url').removeprefix('input_')} left out]")
    return between.join(texts), "\n".join(thoughts)


class Message(Posted):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def given(self, *, is_new: bool = False) -> dict[str, Any]:
        """The message as the engine gets it. ``is_new`` if it is what a reply is asked for."""
        between = "\n\n" if self.role == "assistant" else "\n"  # as llama-server
        text, thoughts = _text_of(self.content, is_new=is_new, between=between)
        other = self.reasoning if isinstance(self.reasoning, str) else ""
        reasoning = self.reasoning_content or other or thoughts
        found = self.model_dump(exclude_none=True, exclude={"content", "reasoning", "refusal"})
        found["content"] = text or self.refusal or ""
        return {**found, "reasoning_content": reasoning} if reasoning else found


def _joined_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return _text_of([ContentPart.model_validate(part) for part in value])[0]


class Prediction(Posted):
    type: Literal["content"] = "content"
    content: Annotated[str, BeforeValidator(_joined_parts)]


class StreamOptions(Posted):
    include_usage: bool = False


class ChatCompletion(Sampling):
    """``/v1/chat/completions``. ``functions`` and ``function_call`` are the old names of ``tools``
    and ``tool_choice``."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    functions: list[dict[str, Any]] = []
    function_call: str | dict[str, Any] | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    reasoning_budget: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatCompletion:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message exclude each other; set one"
            )
        if self.functions and not self.tools:
            self.tools = [{"type": "function", "function": each} for each in self.functions]
            self.parallel_tool_calls = False
            if isinstance(self.function_call, dict):
                self.tool_choice = {"type": "function", "function": self.function_call}
            elif self.function_call is not None:
                self.tool_choice = self.function_call
        return self

    @property
    def uses_tools(self) -> bool:
        """Whether the reply may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def conversation(self) -> tuple[dict[str, Any], ...]:
        """The messages as the engine gets them. Raises ApiError for what is no text in a turn that
        is not answered yet."""
        roles = [message.role for message in self.messages]
        new = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        return tuple(
            message.given(is_new=message.role == "user" and number >= new)
            for number, message in enumerate(self.messages)
        )

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, by any of the names that programs have for it."""
        for limit in (
            self.thinking_budget_tokens,
            self.reasoning_budget_tokens,
            self.reasoning_budget,
        ):
            if limit is not None:
                return limit if limit >= 0 else None
        return None

    @property
    def thinking(self) -> bool | None:
        """Whether to reason; None = the model's default."""
        return False if self.reasoning_effort == "none" or self.thinking_budget == 0 else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """More variables for the chat template."""
        effort = self.reasoning_effort
        known = {} if effort in (None, "none") else {"reasoning_effort": effort}
        return {**known, **self.chat_template_kwargs}

    @property
    def n_probs(self) -> int | None:
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    @property
    def limit(self) -> int | None:
        return limited(self.max_completion_tokens if self.max_tokens is None else self.max_tokens)


class JsonPrompt(Posted):
    prompt_string: str
    multimodal_data: list[str] | str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> JsonPrompt:
        if self.multimodal_data:
            raise ValueError("multimodal_data is not supported; send text")
        return self


Prompt = str | JsonPrompt | list[int | str]


def prompts_of(prompt: Prompt | list[Any]) -> tuple[list[tuple[str | int, ...]], bool]:
    """The prompts of a request, and whether it has a list of them.

    A list of numbers, or of numbers and texts, is one prompt; a list of texts or lists is several.
    """
    if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
        return [_parts(part) for part in prompt], True
    return [_parts(prompt)], False


def _parts(prompt: Any) -> tuple[str | int, ...]:
    if isinstance(prompt, JsonPrompt):
        return (prompt.prompt_string,)
    return (prompt,) if isinstance(prompt, str) else tuple(prompt)


def limited(n: int | None) -> int | None:
    """A limit on tokens, where none and -1 mean no limit."""
    if n is None or n == -1:
        return None
    if n < 0:
        raise ApiError(f"max_tokens is {n}; give at least 1, or -1 for no limit")
    return max(1, n)


class Completion(Sampling):
    """``/v1/completions``, and llama-server's ``/completion``."""

    prompt: Prompt | list[str | list[int | str] | JsonPrompt]
    model: str | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    n_cmpl: int | None = Field(None, ge=1, le=MOST_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    n_probs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    stream_options: StreamOptions | None = None
    return_tokens: bool = False
    response_fields: list[str] = []
    post_sampling_probs: bool = False

    @model_validator(mode="after")
    def _is_possible(self) -> Completion:
        if self.suffix:
            raise ValueError("suffix is not supported: models are asked to continue a text")
        return self

    @property
    def limit(self) -> int | None:
        return limited(self.max_tokens if self.n_predict is None else self.n_predict)


class Tokenization(Posted):
    content: str = Field(max_length=MOST_TOKENS)
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenization(Posted):
    tokens: list[int] = Field(max_length=MOST_TOKENS)
