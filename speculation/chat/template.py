"""Messages -> tokens by the GGUF's own chat template, rendered by ``chat.render_process``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.model import Model
from speculation.chat.reasoning import answer_of, find_reasoning, opened_by
from speculation.chat.render_process import RENDERER

Message = Mapping[str, str]

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
THINKING = ("enable_thinking", "thinking")  # what templates ask whether the model is to think

# For models whose GGUF brings no template: they were not tuned on one, so a plain transcript does.
TRANSCRIPT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it.

    tokens   up to where the assistant speaks, or as far as it has spoken
    opening  the mark before reasoning that what the assistant says from here on begins within
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

    ``thinking`` tells a template that asks for it whether the model is to think before it answers;
    None leaves that to the template.
    Raises InvalidParameter for an empty conversation, an unknown role, messages that the template
    refuses (some accept no system message, or want user and assistant in turn), or a ``thinking``
    that it does not ask for. Raises UnsupportedModel for a template that takes too long, or makes
    too much text.
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
                "this model cannot be told whether to think: its chat template does not ask; "
                "leave thinking out"
            )
        variables.update(dict.fromkeys(THINKING, thinking))
    n_given = sum(len(message["content"]) for message in messages)
    try:
        return RENDERER.render(template, variables, n_given)
    except InvalidParameter as error:
        raise InvalidParameter(
            f"the model's chat template refuses this conversation: {error}; "
            f"check the order of roles, or leave the system prompt out"
        ) from error


@lru_cache(maxsize=8)
def asks_for_thinking(template: str | None) -> bool:
    """Whether a chat template can be told whether the model is to think.

    False for a template that is broken, or that exceeds a limit: rendering it says so.
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
        said: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
        if said.get("role") not in ROLES or not isinstance(said.get("content"), str):
            raise InvalidParameter(
                f"a message is {message!r:.120}; give a role of {', '.join(ROLES)} "
                f"and its content as text"
            )


def chat_prompt(
    model: Model, messages: Sequence[Message], *, thinking: bool | None = None
) -> ChatPrompt:
    """A conversation in the model's own format, up to where the assistant speaks.

    A last message of the assistant is the beginning of what it says, which it continues. What it
    thought before earlier answers is left out, as most templates do it.
    A template without room for a system message gets it at the head of the first user message.
    Control tokens written out in a message stay plain text: nobody ends a turn by quoting one.
    """
    _check(messages)
    bos, eos = (_piece(model, name) for name in ("bos", "eos"))
    template = model.chat_template or TRANSCRIPT_TEMPLATE
    said, begun = list(messages), ""
    if len(said) > 1 and said[-1]["role"] == ASSISTANT:
        begun = said.pop()["content"]

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

    said = _answers(said)
    text = render(said)
    opening = opened_by(text)
    if opening:
        said = _answers(said, opening)
        text = render(said)
    rest = _opening_of_rest(begun, opening)
    has_bos = bool(bos) and text.startswith(bos)
    contents = [begun, *(message["content"] for message in said)]
    if not any(_holds_control_tokens(model, content) for content in contents):
        tokens = model.tokenize(text + begun, add_special=not has_bos, parse_special=True)
        return ChatPrompt(tokens, rest)

    # Render with a mark for each content, and tokenize contents and template apart.
    marked = [{**message, "content": _mark(i)} for i, message in enumerate(said)]
    tokens = []
    for i, part in enumerate(_MARK.split(render(marked))):
        is_content = i % 2 == 1
        tokens += model.tokenize(
            said[int(part)]["content"] if is_content else part,
            add_special=i == 0 and not has_bos,
            parse_special=not is_content,
        )
    # Of what the assistant has begun to say, the marks of reasoning are no plain text.
    for i, part in enumerate(_split_at_marks(begun, opening)):
        tokens += model.tokenize(part, add_special=False, parse_special=i % 2 == 0)
    return ChatPrompt(tokens, rest)


def _answers(messages: Sequence[Message], opening: str = "") -> list[Message]:
    """The messages, those of the assistant without its reasoning."""
    return [
        {**message, "content": answer_of(message["content"], opening)}
        if message["role"] == ASSISTANT
        else message
        for message in messages
    ]


def _opening_of_rest(begun: str, opening: str) -> str:
    """The mark of the reasoning that ``begun`` ends within, if it does."""
    found = find_reasoning(begun, opening)
    if found is None or found.end < len(begun):
        return ""
    return opening or begun[: found.start]


def _split_at_marks(text: str, opening: str) -> tuple[str, ...]:
    """A mark, reasoning, a mark, the answer: one after the other the whole text."""
    found = find_reasoning(text, opening)
    if found is None:
        return "", text
    start, end, answer = found
    return text[:start], text[start:end], text[end:answer], text[answer:]


_MARK = re.compile("\ue000([0-9]+)\ue001")  # private use: no text has a reason to hold it


def _mark(i: int) -> str:
    return f"\ue000{i}\ue001"


def _holds_control_tokens(model: Model, text: str) -> bool:
    plain = model.tokenize(text, add_special=False, parse_special=False)
    return plain != model.tokenize(text, add_special=False, parse_special=True)


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")
