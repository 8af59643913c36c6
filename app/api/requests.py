"""Requests for completions and chats: their prompts, messages and tools, in any API's words."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    model_validator,
)

from app.api.answers import dumps
from app.api.errors import ApiError
from app.api.sampling import Posted, Sampling, Tagged

log = logging.getLogger(__name__)

MOST_LOGPROBS = 100
MOST_LISTED = 1024  # parts of a message, tools
MOST_MESSAGES = 2**14
MOST_TOKENS = 2**20  # of a prompt


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


class Part(Tagged):
    """A part of a message's content, in any API's words."""

    type: str = "text"
    text: str = Field("", validation_alias=AliasChoices("text", "refusal", "thinking"))
    needs: ClassVar = dict.fromkeys(("text", "input_text", "output_text", "refusal"), "text")


Parts = list[Part | str]
Content = str | Parts | dict[str, Any]
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
            thoughts.append(part.text)
        elif part.type in Part.needs:
            texts.append(part.text)
        elif is_new or part.type in _SOUNDS:
            raise ApiError(
                f"a part of type {part.type!r:.40} is not supported: models read text alone here; "
                f"send text"
            )
        else:
            texts.append(f"[{part.type.removesuffix('_url').removeprefix('input_')} left out]")
    return between.join(texts), "\n".join(thoughts)


class Called(Posted):
    name: str
    arguments: str | dict[str, Any] = Field(default_factory=dict)


class ToolCall(Posted):
    id: str | None = Field(None, coerce_numbers_to_str=True)
    type: Literal["function"] = "function"
    function: Called


class Message(Posted):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[ToolCall] | None = None
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


def _either(name: str, *others: str, default: Any = None) -> Any:
    """A field of a tool, which chat completions have in its ``function``."""
    own = AliasPath("function", name)
    return Field(default, validation_alias=AliasChoices(own, name, *others))


class Format(Posted):
    definition: str = ""  # a grammar


class Tool(Tagged, extra="allow"):
    """A tool, in any API's words: a function; a ``custom`` one, which takes a text; a search for
    tools; a namespace of ``tools``; or what would run at another server."""

    type: str = "function"
    name: str = _either("name", default="")
    description: str = _either("description", default="")
    parameters: dict[str, Any] | None = _either("parameters", "input_schema")
    strict: bool = _either("strict", default=False)
    format: Format = Format()  # of what a custom tool takes
    execution: str = "server"  # where a search for tools runs
    defer_loading: bool = False
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_LISTED)
    needs: ClassVar = dict.fromkeys(("function", "custom", "namespace"), "name")
    _is_defined: bool = PrivateAttr(False)  # in a message

    def defined(self) -> str:
        """Its definition, for a message. The tool is marked, so that the prompt's beginning, with
        the list of tools, stays as it was before and in the cache."""
        self._is_defined = True
        told = self.model_dump(include={"name", "description", "parameters"})
        return f"<function>{dumps(told)}</function>"

    def given(self) -> dict[str, Any]:
        """The tool as the engine gets it."""
        names = {"name", "description", "parameters", "strict"}
        told = {"type": "function", "function": self.model_dump(include=names, exclude_unset=True)}
        return {**told, "in_message": True} if self._is_defined else told


class ToolChoice(Posted):
    """One tool, or some (``allowed_tools``), in the form of a chat completion or of a response."""

    type: str = "function"
    name: str = ""
    namespace: str | None = None
    function: Called | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolChoice] = Field(default_factory=list, max_length=MOST_LISTED)
    allowed_tools: ToolChoice | None = None


Choice = Literal["auto", "none", "required"] | ToolChoice


class Talk(Posted):
    """What a chat is about, in a chat completion's terms."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_LISTED)
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


class TemplateOptions(Posted, extra="allow"):
    """Variables of the chat template; two turn reasoning on or off."""

    enable_thinking: StrictBool | None = None
    thinking: StrictBool | None = None


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
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Chat:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt and continue_final_message exclude each other; set one"
            )
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
        options = self.chat_template_kwargs
        for given in (options.enable_thinking, options.thinking):
            if given is not None:
                return given
        if self.reasoning_effort == "none" or self.thinking_budget == 0:
            return False
        return self.enable_thinking

    def request(self) -> dict[str, Any]:
        """The fields of ``ChatRequest`` that only a chat has. Raises ApiError."""
        told = self.talk()
        tools = [tool.given() for tool in told.tools if tool.type == "function"]
        if others := [tool.type for tool in told.tools if tool.type != "function"]:
            _tell_left_out(tuple(dict.fromkeys(others)))
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
            "template_kwargs": {**more, **self.chat_template_kwargs.model_dump(exclude_unset=True)},
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
