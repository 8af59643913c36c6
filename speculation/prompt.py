"""Messages -> tokens by the GGUF's own chat template, rendered in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batching.errors import InvalidParameter
from batching.model import Model

Message = Mapping[str, str]

ROLES = ("system", "user", "assistant")

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
    if not messages:
        raise InvalidParameter("the conversation is empty; give at least one user message")
    for message in messages:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise InvalidParameter(
                f"a message is {dict(message)!r:.120}; give a role of {', '.join(ROLES)} "
                f"and its content as text"
            )
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


def chat_tokens(model: Model, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation in the model's own format.

    A template without room for a system message gets it at the head of the first user message.
    """
    bos, eos = (_piece(model, name) for name in ("bos", "eos"))
    template = model.chat_template or TRANSCRIPT_TEMPLATE
    try:
        text = render_messages(template, messages, bos_token=bos, eos_token=eos)
    except InvalidParameter:
        if len(messages) < 2 or messages[0]["role"] != "system":
            raise
        first = {
            "role": "user",
            "content": f"{messages[0]['content']}\n\n{messages[1]['content']}",
        }
        text = render_messages(template, [first, *messages[2:]], bos_token=bos, eos_token=eos)
    has_bos = bool(bos) and text.startswith(bos)
    return model.tokenize(text, add_special=not has_bos, parse_special=True)


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
