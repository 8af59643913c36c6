"""Tasks: edit a text (a word, its spelling, its form), or code."""

from __future__ import annotations

import re

from tools.recipe import code, words
from tools.recipe.corpus import Chat
from tools.recipe.tasks.draw import Draw, ask, with_text
from tools.recipe.tasks.quoting import repeat


def replace_word(draw: Draw) -> Chat:
    sentence = draw.sentence()
    candidates = [w for w in set(re.findall(r"\b[A-Za-z]{3,}\b", sentence)) if len(w) > 2]
    if not candidates:
        return repeat(draw)
    old = draw.one(sorted(candidates))
    new = draw.one((draw.one(draw.corpus.words[:3000]).word, draw.first_name()))
    answer = re.sub(rf"\b{old}\b", new, sentence)
    instruction = draw.one((
        f'Replace "{old}" with "{new}":', f"Replace {old} by {new}:", f"Change {old} to {new}:",
        f'Rewrite the sentence with "{new}" instead of "{old}":',
    ))  # fmt: skip
    return with_text(draw, instruction, sentence, answer)


def correct_typos(draw: Draw) -> Chat:
    sentence = draw.sentence()
    parts = sentence.split(" ")
    long = [i for i, w in enumerate(parts) if len(w) >= 4 and w.isalpha()]
    for i in draw.some(long, 1, 2) if long else []:
        parts[i] = _misspell(draw, parts[i])
    instruction = draw.one(("Correct the typos:", "Fix the spelling:", "Correct this sentence:",
                            "Fix the mistakes in this sentence:", "Correct:"))  # fmt: skip
    return with_text(draw, instruction, " ".join(parts), sentence)


def _misspell(draw: Draw, word: str) -> str:
    i = draw.rng.randrange(1, len(word) - 1)
    return draw.one((
        word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:],
        word[:i] + word[i + 1] + word[i] + word[i + 2 :],
    ))  # fmt: skip


def split_or_join(draw: Draw) -> Chat:
    long, short = draw.one(draw.corpus.splits)
    if draw.chance(0.6):
        return with_text(draw, draw.one(("Split this sentence in two:", "Rewrite this as two "
                         "sentences:", "Make it simpler:", "Rewrite as shorter sentences:")),
                         long, short)  # fmt: skip
    return with_text(draw, draw.one(("Join these sentences:", "Rewrite as one sentence:")),
                     short, long)  # fmt: skip


def bullet_points(draw: Draw) -> Chat:
    items = draw.some(draw.one((words.THINGS, words.FOODS, words.CITIES, words.ANIMALS)), 3, 7)
    joined = ", ".join(items[:-1]) + draw.one((" and ", ", ", ", and ")) + items[-1]
    bullets = "\n".join(f"- {i}" for i in items)
    if draw.chance(0.25):
        return with_text(draw, "Write this list in one line:", bullets, ", ".join(items))
    instruction = draw.one(("Make a list:", "Turn this into bullet points:", "Write as a list:",
                            "Put these in a list:", "List these:"))  # fmt: skip
    return with_text(draw, instruction, joined, bullets)


def sentences_to_bullets(draw: Draw) -> Chat:
    sentences = draw.passage(2, 4)
    return with_text(draw, draw.one(("Turn each sentence into a bullet point:",
                     "Write the sentences as a list:", "Turn this text into bullet points:")),
                     " ".join(sentences), "\n".join(f"- {s}" for s in sentences))  # fmt: skip


def change_case(draw: Draw) -> Chat:
    text = " ".join(draw.one(draw.corpus.words[:2000]).word for _ in range(draw.rng.randint(1, 3)))
    if draw.chance(0.6):
        return ask(draw.one((f"Write in uppercase: {text}", f"Write {text} in capital letters.",
                   f"Uppercase: {text}")), text.upper())  # fmt: skip
    return ask(f"Write in lowercase: {text.upper()}", text)


def small_edit(draw: Draw) -> Chat:
    """Edits that leave most of the text unchanged."""
    sentence = draw.sentence()
    name = draw.first_name()
    instruction, answer = draw.one((
        ("Put this in quotes:", f'"{sentence}"'),
        ("Add an exclamation mark:", sentence.rstrip(".!?") + "!"),
        ("Add the word please at the end:", sentence.rstrip(".!?") + ", please."),
        ("Put these words in brackets:", f"({sentence})"),
        (f"Begin the text with Dear {name}:", f"Dear {name},\n{sentence}"),
        (f"Sign this with {name}:", f"{sentence}\n{name}"),
        ("Remove the last word:", " ".join(sentence.split()[:-1])),
        ("Remove the first word:", " ".join(sentence.split()[1:])),
        ("Write this twice:", f"{sentence}\n{sentence}"),
    ))  # fmt: skip
    return with_text(draw, instruction, sentence, answer)


def edit_code(draw: Draw) -> Chat:
    before, instruction, after = code.edit(draw.rng)
    fence = draw.one(("```python\n{}\n```", "```python\n{}\n```", "```\n{}\n```", "{}"))
    return with_text(draw, instruction + ":", fence.format(before), fence.format(after))
