"""Draw: random choices for the exercises, from the corpus or generated."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from tools.recipe import words
from tools.recipe.corpus import Chat, Corpus, Message

T = TypeVar("T")


class Draw:
    """Random choices from a corpus, all from one generator: same seed, same text."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.corpus = corpus
        self.rng = rng

    def one(self, options: Sequence[T]) -> T:
        return options[self.rng.randrange(len(options))]

    def some(self, options: Sequence[T], low: int, high: int) -> list[T]:
        """`low` to `high` different options."""
        return self.rng.sample(options, min(self.rng.randint(low, high), len(options)))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def sentence(self) -> str:
        """A sentence from prose, dialogues or sentence splits, or one with an invented name."""
        roll = self.rng.random()
        if roll < 0.55:
            return self.one(self.corpus.sentences)
        if roll < 0.75:
            return self.one(self.one(self.corpus.dialogues)).text
        if roll < 0.9:
            return self.split_half()
        return f"{self.person()} lives in {self.place()} and has {self.number()} {self.plural()}."

    def split_half(self) -> str:
        return self.one(self.corpus.splits)[1].split(". ")[0].rstrip(".") + "."

    def passage(self, low: int, high: int) -> list[str]:
        """Sentences, either consecutive ones from a book or unrelated ones."""
        count = self.rng.randint(low, high)
        if self.chance(0.6):
            start = self.rng.randrange(max(1, len(self.corpus.sentences) - count))
            return self.corpus.sentences[start : start + count]
        return [self.sentence() for _ in range(count)]

    def invented(self) -> str:
        """An invented name, which can only be copied."""
        parts = [self.one(words.ONSETS) + self.one(words.RHYMES)]
        parts += [self.one(words.RHYMES_2) for _ in range(self.rng.randint(1, 2))]
        return "".join(parts).capitalize()

    def first_name(self) -> str:
        return self.invented() if self.chance(0.25) else self.one(words.FIRST_NAMES)

    def person(self) -> str:
        last = self.invented() if self.chance(0.3) else self.one(words.LAST_NAMES)
        return f"{self.first_name()} {last}"

    def place(self) -> str:
        return self.invented() if self.chance(0.25) else self.one(words.CITIES)

    def number(self) -> int:
        return self.rng.randint(2, self.one((12, 100, 1000, 9999)))

    def plural(self) -> str:
        return self.one(words.THINGS)

    def date(self) -> str:
        day, month = self.rng.randint(1, 28), self.one(words.MONTHS)
        year = self.rng.randint(1890, 2030)
        return self.one((f"{day} {month} {year}", f"{month} {day}, {year}", f"{month} {day}"))

    def email(self, name: str) -> str:
        user = re.sub(r"[^a-z]", ".", name.lower())
        return f"{user}@{self.invented().lower()}.{self.one(('com', 'org', 'net'))}"

    def phone(self) -> str:
        digits = "".join(str(self.rng.randrange(10)) for _ in range(7))
        return f"{digits[:3]}-{digits[3:]}"

    def code_word(self) -> str:
        return "".join(self.one("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(6))


Task = Callable[[Draw], Chat]


def ask(question: str, answer: str) -> Chat:
    return [Message("user", question), Message("assistant", answer)]


def with_text(draw: Draw, instruction: str, text: str, answer: str) -> Chat:
    """The instruction before or after its text."""
    if draw.chance(0.7):
        return ask(f"{instruction}{draw.one((chr(10), ' ', chr(10) * 2))}{text}", answer)
    bare = instruction.rstrip(":")
    return ask(f"{text}\n{draw.one(('', chr(10)))}{bare}{'' if bare[-1] in '?.' else '.'}", answer)
