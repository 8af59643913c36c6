"""How a model writes calls of tools, read off its chat template.

The template is rendered with a history that has calls of known names and arguments; what surrounds
those is the format. ``chat.reply_parser`` reads calls by it, ``chat.tool_grammar`` holds a model to
it. No model is known here by its name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from batching.errors import InvalidParameter, UnsupportedModel
from speculation.chat.reasoning import answer_of
from speculation.sandbox import SANDBOX

log = logging.getLogger(__name__)

# In the texts of a format: the id of a call, and its number.
ID, INDEX = "\ue000", "\ue001"

_ATOM = re.compile(
    r"<[^<>\s][^<>\n]*>?|\[/?[A-Z][A-Z_]*\]|[\ue000\ue001]|(?<!\w)\d+(?!\w)|\w+|\s|.", re.DOTALL
)
_BRACKETS = re.compile(r"\[/?[A-Z][A-Z_]*\]")


@dataclass(frozen=True)
class Parameters:
    """What surrounds arguments that are written one by one instead of as a JSON object.

    before   before a key
    string   between the key and a string, which is written as it is
    value    between the key and another value, which is JSON
    after    after either
    between  between two arguments, if there is more
    """

    before: str
    string: str
    value: str
    after: str
    between: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """What surrounds names and arguments in a reply that calls tools.

    begin       before the first call
    opening     before the name of a call
    middle      between name and arguments
    close       after the arguments
    between     between two calls; None if a reply has one call at most
    end         after the last call
    parameters  if the arguments are written one by one
    quote       if the arguments are an object with bare keys: what is around its strings
    tag         may come before a call that has no mark of its own
    in_template  whether the template shows the model its tools and calls
    """

    begin: str
    opening: str
    middle: str
    close: str
    between: str | None
    end: str = ""
    parameters: Parameters | None = None
    quote: str = ""
    tag: str = ""
    in_template: bool = True

    @property
    def mark(self) -> str:
        """What shows that a call begins; empty if a call is JSON, as an answer may be."""
        first = atoms(self.begin + self.opening)[0]
        return first if _is_mark(first) else ""


# For a template that shows no calls.
GENERIC = ToolFormat(
    begin="",
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    close="}\n</tool_call>",
    between="\n",
    in_template=False,
)


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools, and how to call them in the generic format, for a system message."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call tools. To call one, write its name and its arguments as JSON, between marks, "
        f'like this:\n{GENERIC.opening}NAME{GENERIC.middle}{{"KEY": "VALUE"}}{GENERIC.close}\n'
        f"The result comes in the next message. The tools, each with the JSON schema of its "
        f"arguments:\n{lines}"
    )


def written_call(call: Mapping[str, Any]) -> str:
    """A call of a history in the generic format."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{GENERIC.opening}{function['name']}{GENERIC.middle}{arguments}{GENERIC.close}"


def atoms(text: str) -> list[str]:
    """A text in parts that are not split: marks, words, numbers, other characters."""
    return _ATOM.findall(text)


def tool_format(template: str | None) -> ToolFormat:
    """The format of the calls that a chat template writes; the generic one if it writes none, or if
    they cannot be made out."""
    try:
        return _format_of(template)
    except UnsupportedModel as error:  # perhaps not the next time
        log.warning("tools are used in a generic form: %s", error)
        return GENERIC


@lru_cache(maxsize=16)
def _format_of(template: str | None) -> ToolFormat:
    if template and "tool_calls" in template:
        for ids in _IDS:
            for n_calls in (2, 1):
                try:
                    found = _read_off(*_rendered(template, ids[:n_calls]))
                except InvalidParameter:
                    continue
                if found is not None and "zq" not in str(found):  # or a key is part of a mark
                    tag = "" if found.mark or _TAG not in template else _TAG
                    return _with_header_first(found, tag)
    return GENERIC


# What is found again in the rendered text. Keys are in the order of the alphabet, in which some
# templates write them. Some templates take only ids of nine characters, some only a name in the id.
_USER, _CONTENT, _EOS = "zquser", "zqcontent", "<zqeos>"
_NAMES = ("zqfirst", "zqsecond")
_IDS = (("zqcallid1", "zqcallid2"), tuple(f"functions.{name}:{i}" for i, name in enumerate(_NAMES)))
_ARGUMENTS = {"zqkeya": "zqtexta", "zqkeyb": 4711, "zqkeyc": "zqtextc"}
_TAG = "<|python_tag|>"


def _rendered(template: str, ids: Sequence[str]) -> tuple[str, str]:
    """The text of a reply without calls, and of one with a call for each id."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for id_, name in zip(ids, _NAMES, strict=False)
    ]
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    function = {"name": "zqtool", "description": "zqtool", "parameters": parameters}
    texts = []
    for reply in ({"content": _CONTENT}, {"content": "", "tool_calls": calls}):
        messages = [{"role": "user", "content": _USER}, {"role": "assistant", **reply}]
        variables = {
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
            "add_generation_prompt": False,
            "bos_token": "",
            "eos_token": _EOS,
        }
        text = SANDBOX.render(template, variables, 1000)
        texts.append(text[text.rfind(_USER) :])
    for id_ in ids:
        if len(id_) == 9:
            texts[1] = texts[1].replace(id_, ID)
    return texts[0], texts[1]


def _read_off(plain: str, called: str) -> ToolFormat | None:
    """The format, from a reply without calls and one with one or two; None if it has no form that
    is known here."""
    before_answer, found, after_answer = plain.partition(_CONTENT)
    before_name, also, rest = called.partition(_NAMES[0])
    if not found or not also:
        return None
    n_common = _n_common(atoms(before_answer), atoms(before_name))
    opening = _numbered(answer_of("".join(atoms(before_name)[n_common:]).lstrip()).lstrip())
    first, is_second, second = rest.partition(_NAMES[1])
    end = after_answer.strip()
    last = second if is_second else rest
    last = last[: last.find(end)] if end and end in last else last
    read = [_arguments_in(each) for each in ((first, last) if is_second else (last,))]
    if not opening or any(each is None for each in read):
        return None
    *others, made = [each for each in read if each is not None]
    made = replace(made, opening=opening, close=made.close.rstrip())
    if not others:
        return _with_own_ends(made)
    after, behind, whole = atoms(others[0].close), atoms(made.close), atoms(opening)
    n_close = _n_common(after, behind)
    n_opening = _n_common(whole[::-1], after[n_close:][::-1])
    if not n_opening:
        return None
    return _with_own_ends(
        replace(
            made,
            begin="".join(whole[: len(whole) - n_opening]),
            opening="".join(whole[len(whole) - n_opening :]),
            close="".join(after[:n_close]),
            between="".join(after[n_close : len(after) - n_opening]),
            end="".join(behind[n_close:]),
        )
    )


def _with_own_ends(format_: ToolFormat) -> ToolFormat:
    """A format whose parameters have only what is between two of them, with that split into what is
    before and after each, and with what follows the last one split into its own end and the
    call's."""
    if format_.parameters is None:
        return format_
    texts = (format_.middle, format_.parameters.between, format_.close)
    first, then, last = (atoms(text) for text in texts)
    n_before = _n_common(first[::-1], then[::-1])
    gap = then[: len(then) - n_before]
    n_after = _n_common(gap, last)
    parameters = replace(
        format_.parameters,
        before="".join(first[len(first) - n_before :]),
        after="".join(gap[:n_after]),
        between="".join(gap[n_after:]),
    )
    middle, close = "".join(first[: len(first) - n_before]), "".join(last[n_after:])
    return replace(format_, middle=middle, close=close, parameters=parameters)


def _arguments_in(text: str) -> ToolFormat | None:
    """Find the arguments in the text after a name: a format with what is around them alone."""
    text = _numbered(text)
    for at in (i for i, character in enumerate(text) if character == "{"):
        with suppress(ValueError):
            value, end = json.JSONDecoder().raw_decode(text, at)
            if value == _ARGUMENTS:
                return ToolFormat("", "", text[:at], text[end:], None)
    parts = []
    for key, value in _ARGUMENTS.items():
        for wanted in (key, str(value)):
            before, found, text = text.partition(wanted)
            if not found:
                return None
            parts.append(before)
    middle, string, following, value, _, again = parts
    quote = string[len(value) :] if string.startswith(value) else ""
    if again != string or not quote:
        parameters = Parameters("", string, value, "", between=following)
        return ToolFormat("", "", middle, text, None, parameters=parameters)
    if not following.startswith(quote) or not text.startswith(quote):
        return None
    following, text = following[len(quote) :], text[len(quote) :]
    if middle.endswith("{") and (value, following, text[:1]) == (":", ",", "}"):
        return ToolFormat("", "", middle[:-1], text[1:], None, quote=quote)
    return None


def _with_header_first(format_: ToolFormat, tag: str) -> ToolFormat:
    """The format with the tool's name in the header of a channel, as models write it, where the
    template has it before the header."""
    header = re.fullmatch(r"(<\|channel\|>\w+)\s+(\w+)(<\|message\|>)", format_.middle)
    if header is None or format_.mark:
        return replace(format_, tag=tag)
    opening = f"{header[1]} {format_.opening}"
    return replace(format_, opening=opening, middle=f" <|constrain|>{header[2]}{header[3]}")


def _numbered(text: str) -> str:
    """A text with a call's number marked."""
    return "".join(INDEX if atom in ("0", "1", "2") else atom for atom in atoms(text))


def _n_common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts two texts have in common at their starts."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


def _is_mark(atom: str) -> bool:
    return (len(atom) > 1 and atom.startswith("<")) or _BRACKETS.fullmatch(atom) is not None
