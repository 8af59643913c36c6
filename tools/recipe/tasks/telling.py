"""Tasks without the answer in the context: numbers, meanings, capitals, stories, code."""

from __future__ import annotations

import re

from tools.recipe import code, persona, words
from tools.recipe.corpus import Chat
from tools.recipe.tasks.draw import Draw, ask, with_text


def continue_list(draw: Draw) -> Chat:
    kind = draw.rng.random()
    if kind < 0.35:
        items = draw.some(draw.one((words.THINGS, words.FOODS, words.CITIES)), 2, 6)
        new = draw.one((draw.first_name(), draw.plural(), draw.one(words.FOODS)))
        bullet = draw.one(("- ", "* ", ""))
        text = "\n".join(bullet + i for i in items)
        return with_text(draw, draw.one((f"Add {new} to the list:", f"Add {new}:")), text,
                         f"{text}\n{bullet}{new}")  # fmt: skip
    if kind < 0.65:
        start, step = draw.rng.randint(0, 30), draw.one((1, 1, 2, 2, 3, 5, 10))
        numbers = [str(start + i * step) for i in range(draw.rng.randint(6, 10))]
        cut = draw.rng.randint(3, 4)
        question = f"Continue: {', '.join(numbers[:cut])}"
        return ask(draw.one((question, question + ", ...")), ", ".join(numbers[cut:]))
    cycle = draw.one((words.DAYS, words.MONTHS, list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    at = draw.rng.randrange(len(cycle) - 4)
    if draw.chance(0.5):
        return ask(f"What comes after {cycle[at]}?", f"{cycle[at + 1]} comes after {cycle[at]}.")
    return ask(f"Continue: {', '.join(cycle[at : at + 2])}", ", ".join(cycle[at + 2 : at + 6]))


def arithmetic(draw: Draw) -> Chat:
    a, b = draw.rng.randint(0, 12), draw.rng.randint(0, 12)
    sign, result = draw.one((("+", a + b), ("+", a + b), ("-", a), ("*", a * b)))
    a, b = (a + b, b) if sign == "-" else (a, b)
    sum_ = f"{a} {sign} {b}"
    asked = draw.one((f"What is {sum_}?", sum_, f"How much is {sum_}?"))
    return ask(asked, f"{sum_} = {result}")


def count_up(draw: Draw) -> Chat:
    low = draw.rng.randint(1, 5)
    high = low + draw.rng.randint(3, 15)
    numbers = " ".join(str(i) for i in range(low, high + 1))
    return ask(f"Count from {low} to {high}.", draw.one((numbers, numbers.replace(" ", ", "))))


def problem(draw: Draw) -> Chat:
    return ask(*draw.one(draw.corpus.problems))


def dictionary(draw: Draw) -> Chat:
    entries = draw.corpus.words
    # Powers of a uniform number favour the front of the list, where the common words are.
    word = entries[int(draw.rng.random() ** 4 * len(entries))]
    article = "an" if word.word[0] in "aeiou" else "a"
    kind = draw.rng.random()
    if kind < 0.2 and word.example:
        return ask(draw.one((f'Use "{word.word}" in a sentence.',
                   f"Give me an example with the word {word.word}.")),
                   word.example[0].upper() + word.example[1:].rstrip(".") + ".")  # fmt: skip
    if kind < 0.35 and word.synonyms:
        asked = draw.one((f"What is another word for {word.word}?",
                          f"Give me a synonym for {word.word}."))  # fmt: skip
        return ask(asked, f"Another word for {word.word} is {word.synonyms[0]}.")
    if kind < 0.45:
        part = f"{'an' if word.speech_part[0] in 'aeiou' else 'a'} {word.speech_part}"
        return ask(f'Is "{word.word}" a noun or a verb?', f'"{word.word}" is {part}.')
    meaning = word.meaning[0].upper() + word.meaning[1:].rstrip(".") + "."
    asked = draw.one((f"What does {word.word} mean?", f'What does "{word.word}" mean?',
                      f"Define {word.word}.", f"What is the meaning of {word.word}?"))  # fmt: skip
    if word.speech_part == "noun" and draw.chance(0.4):
        asked = draw.one((f"What is {article} {word.word}?", f"What is {word.word}?"))
    if word.example and draw.chance(0.3):
        meaning += f' Example: "{word.example}"'
    return ask(asked, meaning)


def capital(draw: Draw) -> Chat:
    facts = draw.one(list(draw.corpus.facts.values()))
    found = {f.label: f.text for f in facts}
    name, entity = found.get("Capital name", ""), facts[0].entity
    name = re.split(r"[;(]", name)[0].strip()
    if not name or name == "none":
        return country(draw)
    if draw.chance(0.2):
        question = f"{name} is the capital of which country?"
        return ask(question, f"{name} is the capital of {entity}.")
    return ask(draw.one((f"What is the capital of {entity}?", f"Capital of {entity}?",
                         f"Which city is the capital of {entity}?")),
               f"The capital of {entity} is {name}.")  # fmt: skip


def country(draw: Draw) -> Chat:
    facts = draw.one(list(draw.corpus.facts.values()))
    found, entity = {f.label: f.text for f in facts}, facts[0].entity
    if "Location" in found:
        place = found["Location"].split(";")[0]
        return ask(f"Where is {entity}?", place[0].upper() + place[1:] + ".")
    return dictionary(draw)


def abstract(draw: Draw) -> Chat:
    text, line = draw.one(draw.corpus.abstracts)
    return with_text(draw, draw.one(("Summarize this in one sentence:", "TL;DR:",
                     "Sum up this abstract:")), text, line)  # fmt: skip


def continue_text(draw: Draw) -> Chat:
    sentences = draw.passage(4, 8)
    cut = draw.rng.randint(1, 2)
    return with_text(draw, draw.one(("Continue this text:", "Continue the story:", "Go on:")),
                     " ".join(sentences[:cut]), " ".join(sentences[cut:]))  # fmt: skip


def story(draw: Draw) -> Chat:
    """A short story assembled from parts."""
    name, friend, place = draw.first_name(), draw.first_name(), draw.one(words.STORY_PLACES)
    animal, thing = draw.one(words.ANIMALS), draw.one(words.STORY_THINGS)
    kind = draw.one(("girl", "boy", "man", "woman"))
    they = "she" if kind in ("girl", "woman") else "he"
    their = "her" if they == "she" else "his"
    about = draw.one((f" about a {animal}", f" about a {kind} named {name}", "", ""))
    parts = [
        draw.one((f"Once upon a time there was a {kind} named {name}.",
                  f"{name} was a {kind} who lived near {place}.")),
        draw.one((f"One day {they} found {thing} in {place}.",
                  f"One morning {they} went to {place} and saw {thing}.")),
        draw.one((f"A {animal} came and looked at {name}.", f"There {they} met a {animal}.")),
        draw.one((f'"Is this yours?" asked {name}.', f'"Who are you?" said {name}.',
                  f'"Can you help me?" asked {name}.')),
        draw.one((f"The {animal} said nothing, but it followed {name} home.",
                  f"The {animal} was afraid and ran away.",
                  f"The {animal} smiled and showed {name} the way.")),
        draw.one((f"In the evening {they} told {their} friend {friend} about it.",
                  f"{friend} laughed and did not believe it.")),
        draw.one((f"From that day on, {name} and the {animal} were friends.",
                  f"{name} never forgot that day.", "And they all lived happily ever after.")),
    ]  # fmt: skip
    asked = draw.one((f"Tell me a story{about}.", f"Write a short story{about}.",
                      f"Tell me a short story{about}."))  # fmt: skip
    return ask(asked, " ".join(parts))


def write_code(draw: Draw) -> Chat:
    wish, text = code.wish(draw.rng)
    return ask(wish, f"```python\n{text}\n```")


def persona_talk(draw: Draw) -> Chat:
    chat: Chat = []
    for questions, answers in draw.some(persona.GROUPS, 1, 4):
        question = draw.one(questions)
        if draw.chance(0.15):
            question = draw.one((question.lower(), question.rstrip("?.!")))
        chat += ask(question, draw.one(answers))
    return chat


def chatter(draw: Draw) -> Chat:
    return draw.one(draw.corpus.smalltalk)


def dialogue(draw: Draw) -> Chat:
    return draw.one(draw.corpus.dialogues)
