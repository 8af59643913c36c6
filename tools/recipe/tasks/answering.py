"""Tasks: questions about a text that contains the answer."""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.recipe import words
from tools.recipe.corpus import Chat, Fact
from tools.recipe.tasks.draw import Draw, ask, with_text
from tools.recipe.tasks.remembering import told_facts


def record(draw: Draw) -> Chat:
    """A form with a few fields, then questions about it."""
    name = draw.person()
    fields = {
        "Name": name, "Age": str(draw.rng.randint(18, 90)), "City": draw.place(),
        "Phone": draw.phone(), "Email": draw.email(name), "Job": draw.one(words.JOBS),
        "Birthday": draw.date(), "Code": draw.code_word(), "Room": str(draw.number()),
        "Color": draw.one(words.COLORS), "Pet": draw.one(words.ANIMALS),
        "Company": draw.invented(), "Order": f"{draw.number()} {draw.plural()}",
        "Price": f"${draw.number()}", "Friend": draw.first_name(),
        "Total": f"${draw.number()}", "Invoice": str(draw.number()), "Due": draw.date(),
        "Date": draw.date(), "From": draw.place(), "To": draw.place(), "Contact": draw.person(),
        "Item": draw.plural(), "Day": draw.one(words.DAYS), "Topic": draw.one(words.FOODS),
    }  # fmt: skip
    labels = draw.some(list(fields), 3, 7)
    text = "\n".join(f"{label}: {fields[label]}" for label in labels)
    chat: Chat = []
    for i, label in enumerate(draw.some(labels, 1, 3)):
        low = label.lower()
        question = draw.one((f"What is the {low}?", f"What is the {low}?", f"{label}?",
                             f"Tell me the {low}.", f"Which {low} is given?"))  # fmt: skip
        answer = draw.one((fields[label], fields[label], f"The {low} is {fields[label]}."))
        if i == 0:
            chat += with_text(draw, question, text, answer)
        else:
            chat += ask(question, answer)
    return chat


def story_facts(draw: Draw) -> Chat:
    """A few invented sentences about people, then questions about who did what."""
    people = [draw.first_name() for _ in range(3)]
    if len(set(people)) < 3:
        return told_facts(draw)
    statements: list[tuple[str, list[tuple[str, str]]]] = []
    for person in people:
        thing, city, count = draw.plural(), draw.place(), draw.number()
        color, day, food = draw.one(words.COLORS), draw.one(words.DAYS), draw.one(words.FOODS)
        job, when = draw.one(words.JOBS), draw.date()
        statements.append(draw.one((
            (f"{person} bought {count} {thing} in {city}.",
             [(f"What did {person} buy?", f"{person} bought {count} {thing}."),
              (f"Where did {person} buy the {thing}?", f"{person} bought them in {city}."),
              (f"How many {thing} did {person} buy?", f"{person} bought {count} {thing}.")]),
            (f"{person} lives in {city} and works as a {job}.",
             [(f"Where does {person} live?", f"{person} lives in {city}."),
              (f"What does {person} do?", f"{person} works as a {job}."),
              (f"Who lives in {city}?", f"{person} lives in {city}.")]),
            (f"On {day}, {person} ate {food}.",
             [(f"What did {person} eat?", f"{person} ate {food}."),
              (f"When did {person} eat {food}?", f"{person} ate {food} on {day}.")]),
            (f"{person} has a {color} house in {city}.",
             [(f"What color is the house of {person}?", f"The house of {person} is {color}."),
              (f"Where is the house of {person}?", f"The house of {person} is in {city}.")]),
            (f"{person} was born on {when} in {city}.",
             [(f"When was {person} born?", f"{person} was born on {when}."),
              (f"Where was {person} born?", f"{person} was born in {city}.")]),
        )))  # fmt: skip
    text = " ".join(s for s, _ in statements)
    questions = draw.some([q for _, qs in statements for q in qs], 1, 3)
    chat = with_text(draw, questions[0][0], text, questions[0][1])
    for question, answer in questions[1:]:
        chat += ask(question, answer)
    return chat


def extract(draw: Draw) -> Chat:
    """Extract names, numbers, dates or addresses from sentences."""
    kind = draw.one(("names", "numbers", "dates", "email addresses", "cities", "phone numbers"))
    makers: dict[str, Callable[[], str]] = {
        "names": draw.person, "numbers": lambda: str(draw.number()), "dates": draw.date,
        "email addresses": lambda: draw.email(draw.first_name()), "cities": draw.place,
        "phone numbers": draw.phone,
    }  # fmt: skip
    frames = {
        "names": ("{} came to see us.", "We met {} at the station.", "The letter is from {}.",
                  "{} was late again.", "I gave it to {}."),
        "numbers": ("There were {} of them.", "We counted {} boxes.", "It costs {} dollars.",
                    "Page {} is missing.", "The house has {} windows."),
        "dates": ("It happened on {}.", "We meet on {}.", "The shop opens on {}.",
                  "They left on {}."),
        "email addresses": ("Write to {} for details.", "You can reach me at {}.",
                            "Send it to {}."),
        "cities": ("They moved to {}.", "The train stops in {}.", "We flew from {}.",
                   "The road leads to {}."),
        "phone numbers": ("Call {} for help.", "My number is {}.", "You can phone {}."),
    }  # fmt: skip
    values = [makers[kind]() for _ in range(draw.rng.randint(1, 4))]
    sentences = [draw.one(frames[kind]).format(v) for v in values]
    if kind not in ("names", "cities"):  # prose has names of its own
        for _ in range(draw.rng.randint(0, 2)):
            filler = draw.one(draw.corpus.sentences)
            if not re.search(r"\d", filler):
                sentences.insert(draw.rng.randrange(len(sentences) + 1), filler)
    one = len(values) == 1
    what = {"cities": "city", "email addresses": "email address"}.get(kind, kind[:-1])
    what = what if one else kind
    instruction = draw.one((
        f"Extract the {what}:", f"Find the {what} in this text:", f"List the {what}:",
        f"Which {what} {'is' if one else 'are'} in the text?", f"Extract all {kind}.",
    ))  # fmt: skip
    text = " ".join(sentences)
    found = sorted(values, key=text.index)
    answer = "\n".join(f"- {v}" for v in found) if instruction[0] == "L" else ", ".join(found)
    return with_text(draw, instruction, text, answer)


def factbook(draw: Draw) -> Chat:
    """Labelled facts about a country, then questions about them."""
    facts = draw.corpus.facts[draw.one(list(draw.corpus.facts))]
    by_label = {f.label: f for f in draw.some(facts, 2, 7)}
    entity = facts[0].entity
    text = "\n".join(f"{f.label}: {f.text}" for f in by_label.values())
    head = draw.one((f"{entity}\n", f"Facts about {entity}:\n", ""))
    chosen = draw.some(list(by_label.values()), 1, 3)
    first = with_text(draw, _fact_question(draw, chosen[0]), head + text, chosen[0].text)
    rest = [m for f in chosen[1:] for m in ask(_fact_question(draw, f), f.text)]
    return [*first, *rest]


def _fact_question(draw: Draw, fact: Fact) -> str:
    label = fact.label[0].lower() + fact.label[1:]
    return draw.one((f"What is the {label} of {fact.entity}?", f"{fact.label}?",
                     f"What does it say about {label}?", f"What is the {label}?"))  # fmt: skip


def background(draw: Draw) -> Chat:
    fact = draw.one(draw.corpus.backgrounds)
    sentences = re.split(r"(?<=[.;]) ", fact.text)
    if draw.chance(0.5):
        return with_text(draw, draw.one(("Summarize this in one sentence:", "Sum this up:",
                         "What is this about?")), fact.text, sentences[0].rstrip(";"))  # fmt: skip
    label = fact.label.lower()
    return ask(f"Tell me about {fact.entity}: {label}.", " ".join(sentences[:3]).rstrip(";"))


def meeting(draw: Draw) -> Chat:
    """An excerpt of a transcript: who said something, or what somebody said."""
    transcript = draw.one(draw.corpus.meetings)
    start = draw.rng.randrange(len(transcript))
    turns = [t for t in transcript[start : start + 8] if 15 <= len(t.text) <= 250][:5]
    if not turns:
        return story_facts(draw)
    text = "\n".join(f"{t.role}: {t.text}" for t in turns)
    turn = draw.one(turns)
    if draw.chance(0.5):
        return with_text(draw, f'Who said "{turn.text[:60]}"?', text, turn.role)
    return with_text(draw, f"What did {turn.role} say first?", text,
                     next(t.text for t in turns if t.role == turn.role))  # fmt: skip
