"""Tasks: repeat a text, or quote a part of it."""

from __future__ import annotations

import re

from tools.recipe import code, words
from tools.recipe.corpus import Chat
from tools.recipe.tasks.draw import Draw, ask, with_text


def repeat(draw: Draw) -> Chat:
    kind = draw.rng.random()
    if kind < 0.5:
        text = draw.sentence()
    elif kind < 0.7:
        text = " ".join(draw.passage(2, 4))
    elif kind < 0.85:
        text = " ".join(draw.one(draw.corpus.words).word for _ in range(draw.rng.randint(1, 12)))
    else:
        text = draw.one((draw.code_word(), draw.person(), draw.phone(), code.snippet(draw.rng)))
    instruction = draw.one((
        "Repeat this:", "Repeat after me:", "Say this:", "Please repeat the following text:",
        "Copy this text exactly:", "Write this again:", "Repeat:", "Say", "Echo:",
        "Copy the following:", "Repeat the sentence:", "Please say:", "Type this:",
    ))  # fmt: skip
    if draw.chance(0.2):
        return ask(f'{instruction} "{text}"', text)
    return with_text(draw, instruction, text, text)


def quote_sentence(draw: Draw) -> Chat:
    sentences = draw.passage(2, 6)
    text = draw.one((" ", "\n")).join(sentences) if draw.chance(0.3) else " ".join(sentences)
    position = draw.rng.randrange(len(sentences))
    ordinal = words.ORDINALS[position]
    if position == len(sentences) - 1 and draw.chance(0.7):
        ordinal = "last"
    instruction = draw.one((
        f"What is the {ordinal} sentence?", f"Quote the {ordinal} sentence.",
        f"Quote the {ordinal} sentence of this text:", f"Give me the {ordinal} sentence:",
        f"Copy only the {ordinal} sentence of the text:", f"Repeat the {ordinal} sentence:",
    ))  # fmt: skip
    return with_text(draw, instruction, text, sentences[position])


def quote_with_word(draw: Draw) -> Chat:
    sentences = draw.passage(2, 5)
    chosen = draw.one(sentences)
    candidates = [
        w for w in re.findall(r"[A-Za-z]{4,}", chosen)
        if sum(w in s for s in sentences) == 1
    ]  # fmt: skip
    if not candidates:
        return repeat(draw)
    word = draw.one(candidates)
    instruction = draw.one((
        f'Which sentence contains the word "{word}"?', f'Quote the sentence with "{word}".',
        f'Find the sentence with the word "{word}":', f"Which sentence mentions {word}?",
    ))  # fmt: skip
    return with_text(draw, instruction, " ".join(sentences), chosen)


def longest_line(draw: Draw) -> Chat:
    lines = draw.passage(2, 4)
    longest = draw.chance(0.5)
    chosen = (max if longest else min)(lines, key=len)
    size = "longest" if longest else "shortest"
    instruction = draw.one((f"What is the {size} sentence?", f"Quote the {size} sentence:"))
    return with_text(draw, instruction, "\n".join(lines), chosen)


def first_words(draw: Draw) -> Chat:
    text = draw.sentence().split()
    count = draw.rng.randint(1, min(5, len(text)))
    if draw.chance(0.6):
        verb = "is" if count == 1 else "are"
        question = f"What {verb} the first {words.COUNTS[count]}?"
        return with_text(draw, question, " ".join(text), " ".join(text[:count]))
    return with_text(draw, "What is the last word?", " ".join(text), text[-1].strip(".!?,;"))


def lines_from_list(draw: Draw) -> Chat:
    items = draw.some(draw.one((words.THINGS, words.FIRST_NAMES, words.CITIES, words.FOODS)), 3, 9)
    text = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    i = draw.rng.randrange(len(items))
    kind = draw.rng.random()
    if kind < 0.4:
        return with_text(draw, draw.one((f"What is number {i + 1}?", f"What is item {i + 1}?",
                         f"Give me number {i + 1} of the list:")), text, items[i])  # fmt: skip
    if kind < 0.6 and i + 1 < len(items):
        return with_text(draw, f"What comes after {items[i]}?", text, items[i + 1])
    if kind < 0.8:
        return with_text(draw, "What is the last item?", text, items[-1])
    return with_text(draw, "Repeat the list:", text, text)


def capitals_in_text(draw: Draw) -> Chat:
    """Find the name (a capitalised word) in a sentence of prose."""
    sentence = draw.one(draw.corpus.sentences)
    found = re.search(r"(?<=[a-z] )([A-Z][a-z]{2,})", sentence)
    if not found:
        return quote_sentence(draw)
    return with_text(draw, draw.one(("Which name is in this sentence?", "Find the name:")),
                     sentence, found.group())  # fmt: skip
