"""Exercises made from the sources: most of their answers can be found in the context.

Each task is a function from a `Draw` (a random generator and the corpus) to a chat. It knows
nothing of tokens. `TASKS` is the table of all of them with their weights; `COPYING` names those
whose replies are copied from the context and nothing else, which `evaluate` measures.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from models.recipe import code, persona, words
from models.recipe.corpus import Chat, Corpus, Fact, Message

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
        """A sentence of prose, of small talk, of the dictionary or with a made-up name in it."""
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
        """Sentences that follow each other in a book, or ones that do not."""
        count = self.rng.randint(low, high)
        if self.chance(0.6):
            start = self.rng.randrange(max(1, len(self.corpus.sentences) - count))
            return self.corpus.sentences[start : start + count]
        return [self.sentence() for _ in range(count)]

    def invented(self) -> str:
        """A name that no text holds, so that it can only be copied."""
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
    """The instruction before or after the text it is about."""
    if draw.chance(0.7):
        return ask(f"{instruction}{draw.one((chr(10), ' ', chr(10) * 2))}{text}", answer)
    bare = instruction.rstrip(":")
    return ask(f"{text}\n{draw.one(('', chr(10)))}{bare}{'' if bare[-1] in '?.' else '.'}", answer)


# --- quoting -------------------------------------------------------------------------------


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


def say_again(draw: Draw) -> Chat:
    """Any chat, then a wish to hear the reply, or the user's own words, once more."""
    chat = any_short(draw)
    if draw.chance(0.75):
        question = draw.one((
            "Say that again.", "Can you repeat that?", "Repeat your last answer.", "Again, please.",
            "What did you say?", "Please say that again.", "Pardon?", "Could you repeat that?",
        ))  # fmt: skip
        return [*chat, *ask(question, chat[-1].text)]
    users = [m.text for m in chat if m.role == "user"]
    question = draw.one(("What did I say?", "What did I just say?", "Repeat my last message.",
                         "What was my last message?", "What did I ask you?"))  # fmt: skip
    return [*chat, *ask(question, draw.one(('You said: "{}"', "{}", "{}")).format(users[-1]))]


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


# --- answering from context ----------------------------------------------------------------


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


def told_facts(draw: Draw) -> Chat:
    """The user says something about themselves; later it is asked for."""
    name, city, animal = draw.first_name(), draw.place(), draw.one(words.ANIMALS)
    pet, color, job = draw.first_name(), draw.one(words.COLORS), draw.one(words.JOBS)
    food, friend, age = draw.one(words.FOODS), draw.first_name(), draw.rng.randint(8, 90)
    options = [
        (f"My name is {name}.", ["What is my name?", "Who am I?", "What's my name?"],
         f"Your name is {name}."),
        (f"I am {name}.", ["What is my name?", "Do you know my name?"], f"Your name is {name}."),
        (f"I live in {city}.", ["Where do I live?", "Which city do I live in?"],
         f"You live in {city}."),
        (f"My {animal} is called {pet}.", [f"What is my {animal} called?",
         f"What is the name of my {animal}?"], f"Your {animal} is called {pet}."),
        (f"I have a {animal} named {pet}.", [f"What is my {animal}'s name?",
         f"What is the name of my {animal}?"], f"Your {animal}'s name is {pet}."),
        (f"My favorite color is {color}.", ["What is my favorite color?",
         "Which color do I like best?"], f"Your favorite color is {color}."),
        (f"I work as a {job}.", ["What is my job?", "What do I do?"], f"You work as a {job}."),
        (f"I like {food}.", ["What do I like?", "What do I like to eat?"], f"You like {food}."),
        (f"My best friend is {friend}.", ["Who is my best friend?"],
         f"Your best friend is {friend}."),
        (f"I am {age} years old.", ["How old am I?", "What is my age?"],
         f"You are {age} years old."),
        (f"I was born in {city}.", ["Where was I born?"], f"You were born in {city}."),
        (f"My phone number is {(phone := draw.phone())}.", ["What is my phone number?"],
         f"Your phone number is {phone}."),
    ]  # fmt: skip
    told = draw.some(options, 1, 3)
    hello = draw.one(("Hello! ", "Hi, ", "", "", "Hey. "))
    reply = draw.one(("Nice to meet you!", "Thank you for telling me.", "That is good to know.",
                      "I see. How can I help you?", "I will remember that."))  # fmt: skip
    if told[0][0].startswith(("My name", "I am " + name)) and draw.chance(0.6):
        reply = draw.one((f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"))
    chat = ask(hello + " ".join(t for t, _, _ in told), reply)
    if draw.chance(0.3):
        chat += any_short(draw)
    for _, questions, answer in draw.some(told, 1, 3):
        chat += ask(draw.one(questions), answer)
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
    """Names, numbers, dates, addresses out of sentences that hold one or more of them."""
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
    if kind not in ("names", "cities"):  # prose holds names of its own
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


def capitals_in_text(draw: Draw) -> Chat:
    """Which capitalised word follows: a name quoted out of prose by what stands before it."""
    sentence = draw.one(draw.corpus.sentences)
    found = re.search(r"(?<=[a-z] )([A-Z][a-z]{2,})", sentence)
    if not found:
        return quote_sentence(draw)
    return with_text(draw, draw.one(("Which name is in this sentence?", "Find the name:")),
                     sentence, found.group())  # fmt: skip


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
    """A stretch of a transcript: who said it, or what somebody said."""
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


# --- rewriting -----------------------------------------------------------------------------


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
    """Edits that leave most of the text as it is."""
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


# --- lists, numbers ------------------------------------------------------------------------


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


# --- knowledge -----------------------------------------------------------------------------


def dictionary(draw: Draw) -> Chat:
    entries = draw.corpus.words
    # Common words more often: powers of a uniform number lean to the front of the list.
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
    """A short story put together from parts."""
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


# --- code ----------------------------------------------------------------------------------


def edit_code(draw: Draw) -> Chat:
    before, instruction, after = code.edit(draw.rng)
    fence = draw.one(("```python\n{}\n```", "```python\n{}\n```", "```\n{}\n```", "{}"))
    return with_text(draw, instruction + ":", fence.format(before), fence.format(after))


def write_code(draw: Draw) -> Chat:
    wish, text = code.wish(draw.rng)
    return ask(wish, f"```python\n{text}\n```")


# --- small talk ----------------------------------------------------------------------------


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


def any_short(draw: Draw) -> Chat:
    return draw.one((persona_talk, dictionary, chatter, capital, arithmetic, repeat))(draw)[:4]


def system_context(draw: Draw) -> Chat:
    """What is to be known stands in the system prompt."""
    name, place = draw.first_name(), draw.place()
    code_word, thing, price = draw.code_word(), draw.plural(), draw.number()
    options = [
        (f"Your name is {name}.", "What is your name?", f"My name is {name}."),
        (f"The user's name is {name}.", "What is my name?", f"Your name is {name}."),
        (f"The secret word is {code_word}.", "What is the secret word?",
         f"The secret word is {code_word}."),
        (f"You work for a shop in {place}.", "Where do you work?",
         f"I work for a shop in {place}."),
        (f"We sell {thing} for ${price}.", f"How much are the {thing}?",
         f"The {thing} cost ${price}."),
    ]  # fmt: skip
    told = draw.some(options, 1, 3)
    if "Your name is" in " ".join(t for t, _, _ in told) and "user's name" in told[-1][0]:
        told = told[:1]
    chat = [Message("system", " ".join(t for t, _, _ in told))]
    for _, question, answer in draw.some(told, 1, 2):
        chat += ask(question, answer)
    return chat


TASKS: dict[str, tuple[float, Task]] = {
    "repeat": (6, repeat),
    "quote_sentence": (8, quote_sentence),
    "quote_with_word": (3, quote_with_word),
    "longest_line": (1, longest_line),
    "first_words": (2, first_words),
    "say_again": (4, say_again),
    "lines_from_list": (4, lines_from_list),
    "record": (8, record),
    "told_facts": (7, told_facts),
    "story_facts": (6, story_facts),
    "extract": (5, extract),
    "capitals_in_text": (1, capitals_in_text),
    "factbook": (4, factbook),
    "background": (2, background),
    "meeting": (1.5, meeting),
    "replace_word": (5, replace_word),
    "correct_typos": (4, correct_typos),
    "split_or_join": (3, split_or_join),
    "bullet_points": (3, bullet_points),
    "sentences_to_bullets": (2, sentences_to_bullets),
    "change_case": (1, change_case),
    "small_edit": (3, small_edit),
    "continue_list": (3, continue_list),
    "arithmetic": (3, arithmetic),
    "count_up": (0.7, count_up),
    "problem": (3, problem),
    "dictionary": (11, dictionary),
    "capital": (9, capital),
    "country": (0.7, country),
    "abstract": (1, abstract),
    "continue_text": (2, continue_text),
    "story": (2, story),
    "edit_code": (7, edit_code),
    "write_code": (1.5, write_code),
    "persona_talk": (15, persona_talk),
    "chatter": (7, chatter),
    "system_context": (2, system_context),
}

COPYING = (
    "repeat", "quote_sentence", "quote_with_word", "say_again", "lines_from_list", "record",
    "told_facts", "story_facts", "extract", "factbook", "replace_word", "correct_typos",
    "bullet_points", "sentences_to_bullets", "edit_code",
)  # fmt: skip
