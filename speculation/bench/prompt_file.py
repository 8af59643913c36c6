"""Prompt files: JSON Lines of single prompts or of Spec-Bench's conversations.

    {"prompt": "Once upon a time", "category": "stories"}
    {"question_id": 81, "category": "writing", "turns": ["Write a letter.", "Make it shorter."]}

Nothing here knows of models or tokens.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from batching.errors import InvalidParameter, SpeculationError
from speculation.bench.summary import ALL

BUILTIN = "builtin"
NO_CATEGORY = "prompts"  # of lines that name none


class PromptFileError(SpeculationError):
    """A prompt file cannot be read, or one of its lines is not in a known form."""


@dataclass(frozen=True)
class Prompt:
    """A conversation: what the user says, turn by turn. A single prompt has one turn."""

    id: str
    category: str
    turns: tuple[str, ...]

    def turn_id(self, turn: int) -> str:
        """The id of the ``turn``-th turn, from 1: ``chat-03``, then ``chat-03#2``."""
        return self.id if turn == 1 else f"{self.id}#{turn}"


def read_prompts(source: str) -> list[Prompt]:
    """The prompts of a JSON Lines file, or the ones that come with the program (``builtin``).

    Raises PromptFileError naming the file, and the line that is wrong.
    """
    if source == BUILTIN:
        builtin = resources.files("speculation.bench") / "prompts" / "builtin.jsonl"
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
    """The prompts of ``text``, in order; ``name`` stands for it in errors.

    A line without ``question_id`` is called by its number: ``line-7``.
    Raises PromptFileError.
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
                raise PromptFileError(f"the question_id {taken!r} is taken by line {lines[taken]}")
        except PromptFileError as error:
            raise PromptFileError(
                f"{name}, line {number}: {error}\n    {line.strip():.100}"
            ) from None
        lines.update(dict.fromkeys(ids, number))
        prompts.append(prompt)
    if not prompts:
        raise PromptFileError(f'{name} holds no prompts; write one {{"prompt": "..."}} a line')
    return prompts


def select_prompts(
    prompts: Sequence[Prompt], categories: Sequence[str] | None, limit: int | None
) -> list[Prompt]:
    """Those of ``categories`` (None: all), at most the first ``limit`` of each category.

    Raises InvalidParameter for a category that no prompt has.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories or ():
        if category not in known:
            near = difflib.get_close_matches(category, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidParameter(
                f"no prompt has the category {category!r}; {hint}there are: {', '.join(known)}"
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


def _parse_line(line: str, number: int) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"this is no JSON ({error}); write one object a line") from None
    if not isinstance(fields, dict):
        raise PromptFileError('this is no JSON object; write {"prompt": "..."}')
    identity = fields.get("question_id", f"line-{number}")
    category = fields.get("category", NO_CATEGORY)
    if type(identity) not in (str, int) or not isinstance(category, str):
        raise PromptFileError("question_id must be text or a whole number, category must be text")
    if category == ALL:
        raise PromptFileError(f'the category "{ALL}" stands for all of them; call it otherwise')
    return Prompt(str(identity), category, _turns(fields))


def _turns(fields: dict[str, Any]) -> tuple[str, ...]:
    turns = fields.get("turns")
    if turns is None:
        turns = [fields["prompt"]] if "prompt" in fields else None
    if turns is None:
        raise PromptFileError('there is neither "prompt" nor "turns"; write {"prompt": "..."}')
    if not isinstance(turns, list) or not turns:
        raise PromptFileError('"turns" must be a list of at least one text')
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise PromptFileError("a prompt must be text, and not empty")
    if any("\ud800" <= char <= "\udfff" for turn in turns for char in turn):
        raise PromptFileError("a prompt has half of a character (a lone surrogate); mend it")
    return tuple(turns)
