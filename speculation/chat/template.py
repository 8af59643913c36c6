"""Turns messages into text and tokens with the GGUF's chat template, rendered by
``speculation.sandbox``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from batching.errors import InvalidParameter, UnsupportedModel
from batching.llama.model import Model
from speculation.chat.reasoning import find_reasoning, opening_of, thinking_marks
from speculation.chat.tool_format import described, tool_format, written_call
from speculation.chat.tools import Tool, checked_tools, object_of
from speculation.sandbox import SANDBOX

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger(__name__)

# In OpenAI's form. An assistant's message may have ``tool_calls`` instead of a ``content``.
Message = Mapping[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
CHAT_ROLES = (*ROLES, "developer", "tool")  # developer is another name of system
THINKING = ("enable_thinking", "thinking")  # template variables that turn reasoning on or off
RESERVED = ("messages", "tools", "bos_token", "eos_token")

# For GGUFs without a template: such models were not tuned on one, so a plain transcript will do.
TRANSCRIPT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# A model without a chat template ends no turn: it would go on with the next one.
TRANSCRIPT_STOPS = ("\nuser:", "\nsystem:", "\nassistant:")


class ChatOptions(TypedDict, total=False):
    """What a prompt depends on beside the messages.

    thinking         turns reasoning on or off, if the template supports it; None = its default
    tools            functions that the model may call, in OpenAI's form
    template_kwargs  more variables for the template
    continue_last    whether generation continues the last message; None = if it is from the
                     assistant and calls no tool
    """

    thinking: bool | None
    tools: Sequence[Tool]
    template_kwargs: Mapping[str, Any] | None
    continue_last: bool | None


class ChatPrompt(NamedTuple):
    """A conversation as tokens, ready to be continued.

    tokens   up to the assistant's reply, or to the end of what it begins with
    opening  the opening mark of the reasoning that the generated text starts inside of; else empty
    stop     strings that end the reply, for a model without a chat template
    in_answer  whether the tokens end with the start of an answer
    """

    tokens: list[int]
    opening: str
    stop: tuple[str, ...] = ()
    in_answer: bool = False


def render_messages(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    **options: Unpack[ChatOptions],
) -> str:
    """The text of a conversation, ready for the assistant's next turn.

    Raises InvalidParameter for an empty conversation, an invalid message or tool, messages that the
    template rejects (some accept no system message, or require alternating roles), or ``thinking``
    if the template does not support it. Raises UnsupportedModel for a template that exceeds a
    limit.
    """
    tools, thinking = options.get("tools", ()), options.get("thinking")
    variables: dict[str, Any] = {
        "messages": [_for_template(message, template) for message in _plain_messages(messages)],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    if tools:
        variables["tools"] = checked_tools(tools)
    if thinking is not None:
        if not asks_for_thinking(template):
            raise InvalidParameter(
                "reasoning cannot be turned on or off: this model's chat template has no variable "
                "for it; leave thinking out"
            )
        variables.update(dict.fromkeys(THINKING, thinking))
    for name, value in (options.get("template_kwargs") or {}).items():
        if name in RESERVED:
            raise InvalidParameter(f"template_kwargs cannot replace {name}; leave it out")
        variables[name] = value
    plain = variables["messages"]
    n_given = sum(len(message["content"]) for message in plain)
    if _has_tools(plain, tools) or any("reasoning_content" in message for message in plain):
        n_given += len(json.dumps([plain, variables.get("tools")], default=str))
    try:
        return SANDBOX.render(template, variables, n_given)
    except InvalidParameter as error:
        raise InvalidParameter(
            f"the model's chat template rejects this conversation: {error}; "
            f"check the order of roles, or leave the system prompt out"
        ) from error


def asks_for_thinking(template: str | None) -> bool:
    """Whether a chat template has a variable that turns reasoning on or off.

    False if the template is broken; rendering it then raises.
    """
    if not template or not any(name in template for name in THINKING):
        return False
    try:
        return not _names_of(template).isdisjoint(THINKING)
    except InvalidParameter:
        return False
    except UnsupportedModel as error:  # perhaps not the next time
        log.warning("whether the model's reasoning can be turned off is a guess: %s", error)
        return THINKING[0] in template


@lru_cache(maxsize=16)
def _names_of(template: str) -> frozenset[str]:
    return SANDBOX.names(template)


def template_of(model: Model, *, tools: bool = False) -> str:
    """The chat template for a conversation with or without tools: some GGUFs have one for each."""
    is_given = model.own_template is not None
    named = "tokenizer.chat_template.tool_use"
    with_tools = model.metadata(named) if tools and not is_given else None
    return with_tools or model.chat_template or TRANSCRIPT_TEMPLATE


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: without nulls, with arguments as objects, and with neither
    two replies in a row nor names that OpenAI's API no longer uses."""
    if not messages:
        raise InvalidParameter("the conversation is empty; give at least one user message")
    plain: list[dict[str, Any]] = []
    for message in messages:
        following = _plain(message)
        if plain and plain[-1]["role"] == following["role"] == ASSISTANT:
            following = _as_one(plain.pop(), following)
        plain.append(following)
    return plain


def _plain(message: Message) -> dict[str, Any]:
    fields = dict(message) if isinstance(message, Mapping) else {}
    content, role = fields.get("content"), str(fields.get("role"))
    role = _NOW.get(role, role)
    if content is None:
        content = fields.pop("refusal", None) or ""
    if role not in CHAT_ROLES or not isinstance(content, str):
        raise InvalidParameter(
            f"invalid message {message!r:.120}; each needs a role ({', '.join(CHAT_ROLES)}) "
            f"and a content string"
        )
    calls = fields.pop("tool_calls", None) or ()
    if not isinstance(calls, Sequence):
        raise InvalidParameter(f"tool_calls is {calls!r:.80}; give a list of calls")
    old = fields.pop("function_call", None)
    if old is not None:
        calls = [*calls, {"id": _old_id(old), "function": old}]
    if fields.get("role") == "function":
        fields.setdefault("tool_call_id", _old_id(fields))
    plain = {key: value for key, value in fields.items() if value is not None}
    plain = {**plain, "role": role, "content": content}
    if calls and role == ASSISTANT:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


_NOW = {"developer": "system", "function": "tool"}


def _old_id(fields: Any) -> str:
    """An id for a call that has none, by the name of its function."""
    return f"call_{fields.get('name')}" if isinstance(fields, Mapping) else "call"


def _plain_call(call: Any) -> dict[str, Any]:
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParameter(
            f"invalid tool call {call!r:.120}; each needs a function with a name, and arguments "
            f"that are a JSON object or the text of one"
        )
    arguments = object_of(function.get("arguments"))
    return {**fields, "type": "function", "function": {**function, "arguments": arguments}}


def _as_one(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages in a row as one."""
    joined = {**one, **other}
    for key in ("content", "reasoning_content"):
        texts = [message[key] for message in (one, other) if message.get(key)]
        if texts or key == "content":
            joined[key] = "\n\n".join(texts)
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _has_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(m["role"] == "tool" or "tool_calls" in m for m in messages)


def _in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools, calls and results as texts, for a template that has none of them."""
    found: list[dict[str, Any]] = []
    result: dict[str, Any] | None = None
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            is_next = bool(found) and found[-1] is result
            made = {"role": "user", "content": text}
            result = made = _as_one(found.pop(), made) if is_next else made
        else:
            calls = map(written_call, message.get("tool_calls", ()))
            made = {key: value for key, value in message.items() if key != "tool_calls"}
            made["content"] = "\n".join(text for text in (content, *calls) if text)
        found.append(made)
    if known := checked_tools(tools):
        system = {"role": "system", "content": described(known)}
        is_first = bool(found) and found[0]["role"] == "system"
        found[:is_first] = [_as_one(found[0], system) if is_first else system]
    return found


def _accepted_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """A conversation, and others that say the same, for templates that reject it."""
    form = list(messages)
    yield form
    if any("reasoning_content" in message for message in form):
        form = [{k: v for k, v in m.items() if k not in _REASONING} for m in form]
        yield form
    systems = [message for message in form if message["role"] == "system"]
    if systems and systems != form[: min(len(systems), 1)]:
        form = [reduce(_as_one, systems), *(m for m in form if m["role"] != "system")]
        yield form
    joined: list[Message] = []
    for message in form:
        is_again = bool(joined) and joined[-1]["role"] == message["role"] == "user"
        joined.append(_as_one(joined.pop(), message) if is_again else message)
    if len(joined) < len(form):
        form = joined
        yield form
    if systems and len(form) > 1:
        first = {"role": "user", "content": form[0]["content"]}
        is_user = form[1]["role"] == "user"
        yield [_as_one(first, form[1]), *form[2:]] if is_user else [first, *form[1:]]


_REASONING = ("reasoning_content", "reasoning", "thinking")


def _for_template(message: Message, template: str) -> dict[str, Any]:
    """A plain message with what a template requires: ids of nine characters, or another name of the
    reasoning."""
    plain = dict(message)
    for name in _REASONING[1:]:
        is_read = re.search(rf"""(?:\.|\[['"]|get\(['"]){name}\b""", template)
        if is_read and plain.get("reasoning_content"):
            plain.setdefault(name, plain["reasoning_content"])
    if "length != 9" not in template:
        return plain
    if plain["role"] == "tool":
        plain["tool_call_id"] = _short_id(plain.get("tool_call_id"))
    if "tool_calls" in plain:
        calls = plain["tool_calls"]
        plain["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    return plain


def _short_id(id_: object) -> str:
    text = str(id_)
    if re.fullmatch("[a-zA-Z0-9]{9}", text):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


class _Conversation:
    """A conversation with a model's template and its options, and the reply it ends with.

    opening  the opening mark of reasoning that the template writes; else empty
    begun    the start of the reply, which generation continues
    """

    def __init__(self, model: Model, messages: Sequence[Message], options: ChatOptions) -> None:
        complete, self.begun = _plain_messages(messages), ""
        begun: Message | None = None
        tools, continue_last = options.get("tools", ()), options.get("continue_last")
        has_tools = _has_tools(complete, tools)
        self._model = model
        self._template = template_of(model, tools=has_tools)
        self.bos, self._eos = (_piece(model, name) for name in ("bos", "eos"))
        self._thinking = options.get("thinking")
        last = complete[-1]
        is_answer = last["role"] == ASSISTANT and "tool_calls" not in last
        can_continue = is_answer and len(complete) > 1
        if continue_last and not can_continue:
            raise InvalidParameter(
                "the last message is not the assistant's answer to another message, so it cannot "
                "be continued; leave continue_last out"
            )
        if can_continue and continue_last is not False:
            begun = complete.pop()
        if has_tools and not tool_format(self._template).in_template:
            complete, tools = _in_text(complete, tools), ()
        self._given = (tools, options.get("template_kwargs") or {})
        self._messages: Sequence[Message] = _reasoning_apart(complete)
        self.text = self._render(self._messages, *self._given)
        self.opening = opening_of(self.text)
        if self.opening:
            self._messages = _reasoning_apart(complete, self.opening)
            self.text = self._render(self._messages, *self._given)
        if begun is not None:
            self.begun = self._after_opening(begun["content"], begun.get("reasoning_content", ""))

    def _after_opening(self, content: str, reasoning: str) -> str:
        """The start of a reply as it follows the rendered text: its content is an answer, unless it
        has the marks of reasoning."""
        marks, opening = thinking_marks(self.opening or self._template), self.opening
        own = find_reasoning(content)
        if own is not None:
            return content[own.start :] if opening else content
        found = find_reasoning(content, opening)
        is_closed = found is not None and found.end < len(content)
        if marks is None or is_closed:
            return content
        answer = marks.answer + content if content else ""
        does_think = opening or (reasoning and not self.text.rstrip().endswith(marks.close))
        if not does_think:
            return answer
        line = "\n" if opening.endswith("\n") or (not opening and marks.close[0] == "<") else ""
        start = ("" if opening else marks.opening + line) + reasoning
        return f"{start}{line}{marks.close}{2 * line}{answer}" if answer else start

    def parts(self) -> list[tuple[str, bool]]:
        """The text in parts, each with whether it comes from the template, and so may have control
        tokens."""
        quoted: list[str] = []
        marked = _mark([self._messages, *self._given], self._model, quoted)
        if not quoted:
            return [(self.text, True)]
        pieces = _PLACEHOLDER.split(self._render(*marked))
        parts = [(pieces[0], True)]
        for i, escapes, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            text = quoted[int(i)]
            for _ in range(len(escapes).bit_length()):  # how often the template made it JSON
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            parts += [(text, False), (after, True)]
        return parts

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], more: Mapping[str, Any]
    ) -> str:
        options: ChatOptions = {"thinking": self._thinking, "tools": tools, "template_kwargs": more}
        refusals = []
        for form in _accepted_forms(messages):
            try:
                return render_messages(
                    self._template, form, bos_token=self.bos, eos_token=self._eos, **options
                )
            except InvalidParameter as error:  # noqa: PERF203 (each by itself)
                refusals.append(error)
        raise refusals[0]


def chat_text(model: Model, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
    """The text that ``chat_prompt`` tokenizes, with the same parameters and errors."""
    conversation = _Conversation(model, messages, options)
    return conversation.text + conversation.begun


def chat_prompt(
    model: Model, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> ChatPrompt:
    """Tokenize a conversation in the model's chat format, up to the assistant's reply.

    Keyword arguments are the fields of ``ChatOptions``. The reasoning of earlier replies is apart
    from their answers: the template decides which of it the model reads. If the template rejects
    the conversation, system messages and turns of the same role are joined. If it has no tools, the
    model reads them, calls and results as text. Control tokens spelled out in a message, a tool or
    the arguments of a call stay plain text, so quoting one cannot end a turn. A last message of the
    assistant is the start of an answer, unless it has marks of reasoning. Raises as
    ``render_messages`` does.
    """
    conversation = _Conversation(model, messages, options)
    stop = TRANSCRIPT_STOPS if model.chat_template is None else ()
    parts, begun = conversation.parts(), conversation.begun
    inside = _unclosed_opening(begun, conversation.opening)
    has_bos = bool(conversation.bos) and conversation.text.startswith(conversation.bos)
    if len(parts) == 1 and not model.has_control_tokens(begun):
        parts = [(parts[0][0] + begun, True)]
    else:  # in the begun reply, only the marks of reasoning are control tokens
        marks = _split_at_marks(begun, conversation.opening)
        parts += [(part, i % 2 == 0) for i, part in enumerate(marks)]
    tokens: list[int] = []
    for i, (part, is_template) in enumerate(parts):
        add_special = i == 0 and not has_bos
        tokens += model.tokenize(part, add_special=add_special, parse_special=is_template)
    return ChatPrompt(tokens, inside, stop, bool(begun) and not inside)


def _reasoning_apart(messages: Sequence[Message], opening: str = "") -> list[Message]:
    """The messages, with the reasoning in the assistant's contents in a field of its own."""
    found = []
    for message in messages:
        content = message["content"]
        span = find_reasoning(content, opening) if message["role"] == ASSISTANT else None
        if span is not None and span.end < len(content):
            reasoning = content[span.start : span.end].strip()
            apart = {**message, "content": content[span.answer :]}
            message = {"reasoning_content": reasoning, **apart} if reasoning else apart
        found.append(message)
    return found


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


# Private-use characters. The quotation mark shows whether the template turned the text into JSON.
_PLACEHOLDER = re.compile('\ue000([0-9]+)(\\\\*)"\ue001')


def _mark(value: Any, model: Model, quoted: list[str]) -> Any:
    """A JSON value with a placeholder for each string that spells out control tokens, which are
    added to ``quoted``."""
    if isinstance(value, Mapping):
        keys = [key if key.isidentifier() else _mark(key, model, quoted) for key in value]
        values = [_mark(item, model, quoted) for item in value.values()]
        return dict(zip(keys, values, strict=True))
    if isinstance(value, list | tuple):
        return [_mark(item, model, quoted) for item in value]
    if isinstance(value, str) and ("\ue000" in value or model.has_control_tokens(value)):
        quoted.append(value)
        return f'\ue000{len(quoted) - 1}"\ue001'
    return value


def _piece(model: Model, name: str) -> str:
    token = model.special_token(name)
    return "" if token is None else model.piece(token).decode("utf-8", "replace")
