"""Turns messages into tokens with the GGUF's chat template, rendered by ``chat.render_process``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.model import Model
from speculation.chat.reasoning import answer_of, find_reasoning, opening_of
from speculation.chat.render_process import RENDERER

Message = Mapping[str, str]

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
THINKING = ("enable_thinking", "thinking")  # template variables that turn reasoning on or off

# For GGUFs without a template: such models were not tuned on one, so a plain transcript will do.
TRANSCRIPT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ChatPrompt(NamedTuple):
    """A conversation as tokens, ready to be continued.

    tokens   up to the start of the assistant's reply, or to the end of what it has written of it
    opening  the opening mark of the reasoning that the generated text starts inside of; else empty
    """

    tokens: list[int]
    opening: str


def render_messages(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    thinking: bool | None = None,
) -> str:
    """The text of a conversation, ready for the assistant's next turn.

    ``thinking`` turns reasoning on or off, if the template supports it; None = its default.
    Raises InvalidParameter for an empty conversation, an unknown role, messages that the template
    rejects (some accept no system message, or require alternating roles), or ``thinking`` if the
    template does not support it. Raises UnsupportedModel for a template that exceeds a limit.
    """
    _check(messages)
    variables: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    if thinking is not None:
        if not asks_for_thinking(template):
            raise InvalidParameter(
                "reasoning cannot be turned on or off: this model's chat template has no variable "
                "for it; leave thinking out"
            )
        variables.update(dict.fromkeys(THINKING, thinking))
    n_given = sum(len(message["content"]) for message in messages)
    try:
        return RENDERER.render(template, variables, n_given)
    except InvalidParameter as error:
        raise InvalidParameter(
            f"the model's chat template rejects this conversation: {error}; "
            f"check the order of roles, or leave the system prompt out"
        ) from error


@lru_cache(maxsize=8)
def asks_for_thinking(template: str | None) -> bool:
    """Whether a chat template has a variable that turns reasoning on or off.

    False if the template is broken or exceeds a limit; rendering it then raises.
    """
    if not template or not any(name in template for name in THINKING):
        return False
    try:
        return not RENDERER.names(template).isdisjoint(THINKING)
    except (InvalidParameter, UnsupportedModel):
        return False


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidParameter("the conversation is empty; give at least one user message")
    for message in messages:
        fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
        if fields.get("role") not in ROLES or not isinstance(fields.get("content"), str):
            raise InvalidParameter(
                f"invalid message {message!r:.120}; each needs a role ({', '.join(ROLES)}) and a "
                f"content string"
            )


def chat_prompt(
    model: Model, messages: Sequence[Message], *, thinking: bool | None = None
) -> ChatPrompt:
    """Tokenize a conversation in the model's chat format, up to the assistant's reply.

    If the last message is from the assistant, generation continues it. The reasoning of earlier
    replies is dropped, as in most templates. If the template rejects a system message, it is put in
    front of the first user message. Control tokens spelled out in a message stay plain text, so
    quoting one cannot end a turn.
    """
    _check(messages)
    bos, eos = (_piece(model, name) for name in ("bos", "eos"))
    template = model.chat_template or TRANSCRIPT_TEMPLATE
    complete, begun = list(messages), ""
    if len(complete) > 1 and complete[-1]["role"] == ASSISTANT:
        begun = complete.pop()["content"]

    def render(messages: Sequence[Message]) -> str:
        given: dict[str, Any] = {"bos_token": bos, "eos_token": eos, "thinking": thinking}
        try:
            return render_messages(template, messages, **given)
        except InvalidParameter:
            if len(messages) < 2 or messages[0]["role"] != "system":
                raise
            first = {
                "role": "user",
                "content": f"{messages[0]['content']}\n\n{messages[1]['content']}",
            }
            return render_messages(template, [first, *messages[2:]], **given)

    complete = _without_reasoning(complete)
    text = render(complete)
    opening = opening_of(text)
    if opening:
        complete = _without_reasoning(complete, opening)
        text = render(complete)
    inside = _unclosed_opening(begun, opening)
    has_bos = bool(bos) and text.startswith(bos)
    contents = [begun, *(message["content"] for message in complete)]
    if not any(_has_control_tokens(model, content) for content in contents):
        tokens = model.tokenize(text + begun, add_special=not has_bos, parse_special=True)
        return ChatPrompt(tokens, inside)

    # Render with a placeholder per content, then tokenize contents and template text separately.
    marked = [{**message, "content": _placeholder(i)} for i, message in enumerate(complete)]
    tokens = []
    for i, part in enumerate(_PLACEHOLDER.split(render(marked))):
        is_content = i % 2 == 1
        tokens += model.tokenize(
            complete[int(part)]["content"] if is_content else part,
            add_special=i == 0 and not has_bos,
            parse_special=not is_content,
        )
    # In the begun reply, only the marks of reasoning are control tokens.
    for i, part in enumerate(_split_at_marks(begun, opening)):
        tokens += model.tokenize(part, add_special=False, parse_special=i % 2 == 0)
    return ChatPrompt(tokens, inside)


def _without_reasoning(messages: Sequence[Message], opening: str = "") -> list[Message]:
    """The messages, with reasoning removed from the assistant's."""
    return [
        {**message, "content": answer_of(message["content"], opening)}
        if message["role"] == ASSISTANT
        else message
        for message in messages
    ]


def _unclosed_opening(begun: str, opening: str) -> str:
    """The opening mark of the reasoning that ``begun`` ends inside of; else empty."""
    found = find_reasoning(begun, opening)
    if found is None or found.end < len(begun):
        return ""
    return opening or begun[: found.start]


def _split_at_marks(text: str, opening: str) -> tuple[str, ...]:
    """Split a text into opening mark, reasoning, closing mark and answer."""
    found = find_reasoning(text, opening)
    if found is None:
        return "", text
    start, end, answer = found
    return text[:start], text[start:end], text[end:answer], text[answer:]


_PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")  # private-use characters


def _placeholder(i: int) -> str:
    return f"\ue000{i}\ue001"


def _has_control_tokens(model: Model, text: str) -> bool:
    plain = model.tokenize(text, add_special=False, parse_special=False)
    return plain != model.tokenize(text, add_special=False, parse_special=True)


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")
