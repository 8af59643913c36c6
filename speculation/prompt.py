"""Messages -> tokens by the GGUF's own chat template, rendered in Jinja's sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batching.errors import InvalidParameter
from batching.model import Model

Message = Mapping[str, str]

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)

# For models whose GGUF brings no template: they were not tuned on one, so a plain transcript does.
TRANSCRIPT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def render_messages(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """The text of a conversation, ready for the assistant's next turn.

    Raises InvalidParameter for an empty conversation, an unknown role, or messages that the
    template refuses (some accept no system message, or want user and assistant in turn).
    """
    _check(messages)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    variables: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        return environment.from_string(template).render(variables)
    except TemplateError as error:
        raise InvalidParameter(
            f"the model's chat template refuses this conversation: {error}; "
            f"check the order of roles, or leave the system prompt out"
        ) from error


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidParameter("the conversation is empty; give at least one user message")
    for message in messages:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise InvalidParameter(
                f"a message is {dict(message)!r:.120}; give a role of {', '.join(ROLES)} "
                f"and its content as text"
            )


def chat_tokens(model: Model, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation in the model's own format, up to where the assistant speaks.

    A last message of the assistant is the beginning of what it says, to be gone on with.
    A template without room for a system message gets it at the head of the first user message.
    Control tokens written out in a message stay plain text: nobody ends a turn by quoting one.
    """
    _check(messages)
    bos, eos = (_piece(model, name) for name in ("bos", "eos"))
    template = model.chat_template or TRANSCRIPT_TEMPLATE

    def render(messages: Sequence[Message]) -> str:
        if len(messages) > 1 and messages[-1]["role"] == ASSISTANT:
            return render(messages[:-1]) + messages[-1]["content"]
        try:
            return render_messages(template, messages, bos_token=bos, eos_token=eos)
        except InvalidParameter:
            if len(messages) < 2 or messages[0]["role"] != "system":
                raise
            first = {
                "role": "user",
                "content": f"{messages[0]['content']}\n\n{messages[1]['content']}",
            }
            return render_messages(template, [first, *messages[2:]], bos_token=bos, eos_token=eos)

    text = render(messages)
    has_bos = bool(bos) and text.startswith(bos)
    if not any(_holds_control_tokens(model, message["content"]) for message in messages):
        return model.tokenize(text, add_special=not has_bos, parse_special=True)

    # Render with a mark for each content, and tokenize contents and template apart.
    marked = [{**message, "content": _mark(i)} for i, message in enumerate(messages)]
    tokens: list[int] = []
    for i, part in enumerate(_MARK.split(render(marked))):
        is_content = i % 2 == 1
        tokens += model.tokenize(
            messages[int(part)]["content"] if is_content else part,
            add_special=i == 0 and not has_bos,
            parse_special=not is_content,
        )
    return tokens


_MARK = re.compile("\ue000([0-9]+)\ue001")  # private use: no text has a reason to hold it


def _mark(i: int) -> str:
    return f"\ue000{i}\ue001"


def _holds_control_tokens(model: Model, text: str) -> bool:
    plain = model.tokenize(text, add_special=False, parse_special=False)
    return plain != model.tokenize(text, add_special=False, parse_special=True)


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
