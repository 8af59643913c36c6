"""What a model thinks before it answers: where it stands in a reply, by the marks around it.

A model writes the first mark itself, or its chat template has written it already, at the end of the
prompt. The marks are those of the models' own chat templates.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Before the reasoning, and between them and the answer.
_MARKS = (
    # Qwen 3, DeepSeek R1 and most others; some with a name before or after it
    (r"<(?:\w+:)?think(?:ing)?(?::\w+)?>", r"</(?:\w+:)?think(?:ing)?(?::\w+)?>"),
    # Mistral
    (r"\[THINK\]", r"\[/THINK\]"),
    # Gemma 4
    (r"<\|channel>thought\b", r"<channel\|>"),
    # gpt-oss, which may also answer at once
    (
        r"<\|channel\|>(?:analysis<\|message\|>)?",
        r"(?:<\|end\|>\s*<\|start\|>assistant\s*<\|channel\|>)?final<\|message\|>",
    ),
)
_KINDS = tuple(
    (re.compile(rf"\s*{before}\n*"), re.compile(rf"{after}\n*")) for before, after in _MARKS
)
_AT_END = re.compile(rf"(?:{'|'.join(before for before, _ in _MARKS)})\s*\Z")


class ReasoningSpan(NamedTuple):
    """Where the reasoning in a text starts and ends, and where the answer starts.

    Both of the latter are the text's length while the model still thinks.
    """

    start: int
    end: int
    answer: int


def find_reasoning(text: str, opening: str = "") -> ReasoningSpan | None:
    """The reasoning at the head of a reply, or None where it has none.

    ``opening`` is the mark before it, where the prompt ended with it.
    """
    whole = opening + text
    for before, after in _KINDS:
        begun = before.match(whole)
        if begun is not None:
            ended = after.search(whole, begun.end())
            places = (begun.end(), *(ended.span() if ended else (len(whole), len(whole))))
            return ReasoningSpan(*(max(0, place - len(opening)) for place in places))
    return None


def answer_of(text: str, opening: str = "") -> str:
    """A reply without its reasoning; all of it while that has no end."""
    found = find_reasoning(text, opening)
    if found is None or found.end == len(text):
        return text
    return text[found.answer :]


def opened_by(prompt: str) -> str:
    """The mark that ends a prompt and has the reply begin with reasoning, or nothing."""
    found = _AT_END.search(prompt, max(0, len(prompt) - 64))
    return found[0] if found else ""
