"""Requests of the endpoint, as pydantic models: messages, chat completions, completions, tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StrictBool, model_validator

from app.api.body import Posted
from app.api.errors import ApiError
from app.api.sampling import MOST_LISTED, Sampling
from speculation.chat.template import THINKING

MOST_LOGPROBS = 100
# More of these hold up other requests.
MOST_TOKENS = 2**20  # to join, or characters to split into them …
MOST_WITH_PIECES = 2**18  # … with the text of each
MOST_MESSAGES = 2**14


class ContentPart(Posted):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


Parts = list[ContentPart | str]
Content = str | Parts | dict[str, Any]
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
    if len(content) > MOST_LISTED:
        raise ApiError(f"a message has {len(content)} parts; give at most {MOST_LISTED}")
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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[dict[str, Any]] | None = None
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

    def given(self) -> dict[str, Any]:
        """The choice as the engine gets it."""
        if self.type != "allowed_tools":
            return {"type": "function", "function": {"name": (self.function or self).name}}
        some = self.allowed_tools or self
        tools = [one.given() for one in some.tools]
        return {"type": "allowed_tools", "mode": some.mode, "tools": tools}


class ChatCompletion(Sampling):
    """``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] = Field([], max_length=MOST_LISTED)
    tool_choice: Literal["auto", "none", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    thinking_budget_tokens: int = Field(
        -1, validation_alias=AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens")
    )
    enable_thinking: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    _left_out: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatCompletion:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message exclude each other; set one"
            )
        for name in THINKING:
            value = self.chat_template_kwargs.get(name)
            if value is not None and not isinstance(value, bool):
                field = f"chat_template_kwargs.{name}"
                raise ApiError(f"{field} is {value!r:.60}; give true or false", param=field)
        kinds = [str(tool.get("type", "function")) for tool in self.tools]
        self._left_out = tuple(dict.fromkeys(kind for kind in kinds if kind != "function"))
        self.tools = [
            tool for tool, kind in zip(self.tools, kinds, strict=True) if kind == "function"
        ]
        if not self.tools and self.tool_choice not in ("auto", "none"):
            raise ApiError(
                f"tool_choice is {self.choice!r:.80}, but the request has no tools that run here; "
                "give functions as tools",
                param="tool_choice",
            )
        return self

    @property
    def choice(self) -> str | dict[str, Any]:
        """``tool_choice`` as the engine gets it."""
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.given()

    @property
    def left_out(self) -> tuple[str, ...]:
        """The types of tools that the model is not offered, because nobody here could run them."""
        return self._left_out

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
        """The most tokens of reasoning; None means no limit."""
        return None if self.thinking_budget_tokens < 0 else self.thinking_budget_tokens

    @property
    def thinking(self) -> bool | None:
        """Whether to reason; None = the model's default. What the template is given comes first."""
        for name in THINKING:
            if (given := self.chat_template_kwargs.get(name)) is not None:
                return bool(given)
        if self.reasoning_effort == "none" or self.thinking_budget == 0:
            return False
        return self.enable_thinking

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """More variables for the chat template."""
        effort = self.reasoning_effort
        known: dict[str, Any] = {}
        if effort not in (None, "none"):
            known["reasoning_effort"] = effort
        if self.add_generation_prompt is not None:
            known["add_generation_prompt"] = self.add_generation_prompt
        return {**known, **self.chat_template_kwargs}

    @property
    def n_probs(self) -> int | None:
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


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
    if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt):
        return [_parts(part) for part in prompt], True
    return [_parts(prompt)], False


def _parts(prompt: Any) -> tuple[str | int, ...]:
    if isinstance(prompt, JsonPrompt):
        return (prompt.prompt_string,)
    return (prompt,) if isinstance(prompt, str) else tuple(prompt)


class Completion(Sampling):
    """``/v1/completions``, and llama-server's ``/completion``."""

    prompt: Prompt | Prompts
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    n_probs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    return_tokens: bool = False
    post_sampling_probs: bool = False


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
