"""Prompt files: JSON Lines of single prompts or of conversations in Spec-Bench's format.

    {"prompt": "Once upon a time", "category": "stories"}
    {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Make it shorter."]}

Independent of models and tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct, json

from batching.errors import InvalidParameter, SpeculationError
from speculation.bench.summary import ALL

BUILTIN = "builtin"
MEMORY = "memory"
NOVEL = "novel"  # replies that repeat little
_OURS = (BUILTIN, NOVEL, MEMORY)
NO_CATEGORY = "prompts"  # category of lines without one
_FORM = 'write one object per line, such as {"prompt": "..."}'


class PromptFileError(SpeculationError):
    """A prompt file cannot be read, or a line of it is malformed."""


@dataclass(frozen=True)
class Prompt:
    """The user's turns of a conversation. A single prompt has one turn."""

    id: str
    category: str
    turns: tuple[str, ...]

    def turn_id(self, turn: int) -> str:
        """The id of the ``turn``-th turn, from 1: ``chat-03``, then ``chat-03#2``."""
        return self.id if turn == 1 else f"{self.id}#{turn}"


def read_prompts(source: str) -> list[Prompt]:
    """The prompts of a JSON Lines file, or built-in ones (``builtin``, ``novel``, ``memory``).

    Raises PromptFileError with the file and the malformed line.
    """
    if source in _OURS:
        builtin = resources.files("speculation.bench") / "prompts" / f"{source}.jsonl"
        return parse_prompts(builtin.read_text(encoding="utf-8"), source)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(
            f"cannot read the prompts {source}: {error}; "
            f"give a file of JSON Lines in UTF-8, or {BUILTIN}"
        ) from error
    return parse_prompts(text, source)


def parse_prompts(text: str, name: str) -> list[Prompt]:
    """The prompts of ``text``, in order; ``name`` is its name in errors.

    A line without ``question_id`` gets its number as the id: ``line-7``. Raises PromptFileError.
    """
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, number)
            ids = [prompt.turn_id(turn) for turn in range(1, len(prompt.turns) + 1)]
            taken = next((turn_id for turn_id in ids if turn_id in lines), None)
            if taken is not None:
                raise PromptFileError(f"line {lines[taken]} has the question_id {taken!r} too")
        except PromptFileError as error:
            raise PromptFileError(
                f"{name}, line {number}: {error}\n    {line.strip():.100}"
            ) from None
        lines.update(dict.fromkeys(ids, number))
        prompts.append(prompt)
    if not prompts:
        raise PromptFileError(f"{name} has no prompts; {_FORM}")
    return prompts


def select_prompts(
    prompts: Sequence[Prompt], categories: Sequence[str] | None, limit: int | None
) -> list[Prompt]:
    """The prompts in ``categories`` (None = all), at most the first ``limit`` of each.

    Raises InvalidParameter for an unknown category.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories or ():
        if category not in known:
            raise InvalidParameter(
                f"no prompt has the category {category!r}; categories: {', '.join(known)}"
            )
    taken: Counter[str] = Counter()
    selected = []
    for prompt in prompts:
        if categories is not None and prompt.category not in categories:
            continue
        if limit is not None and taken[prompt.category] >= limit:
            continue
        taken[prompt.category] += 1
        selected.append(prompt)
    return selected


_Text = Annotated[str, Meta(min_length=1)]


class _Line(Struct):
    question_id: str | int | None = None
    category: str = NO_CATEGORY
    prompt: _Text | None = None
    turns: Annotated[list[_Text], Meta(min_length=1)] | None = None


def _parse_line(line: str, number: int) -> Prompt:
    try:
        found = json.decode(line, type=_Line)
    except (MsgspecError, UnicodeError, RecursionError) as error:
        raise PromptFileError(f"{error}; {_FORM}") from None
    turns = found.turns or ([found.prompt] if found.prompt else None)
    if turns is None:
        raise PromptFileError(f'neither "prompt" nor "turns" is given; {_FORM}')
    if found.category == ALL:
        raise PromptFileError(f'the category name "{ALL}" is reserved; choose another')
    identity = f"line-{number}" if found.question_id is None else str(found.question_id)
    return Prompt(identity, found.category, tuple(turns))
