"""Random user requests unlike the exercises, without reference answers.

In use, a draft model must predict the target's replies to any question, even to those the target
cannot answer, so it has to see such replies in training. Some chats of `replies` start with these:
requests of many kinds combined at random, some of several lines, with follow-up turns about the
reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.recipe import words
from tools.recipe.corpus import Chat
from tools.recipe.tasks.draw import Draw, ask

# Words for pseudo-German requests, a language that the target does not know either.
_GERMAN = """
der die das und ist nicht ein eine in zu den mit von auf für dem als auch an es sich im werden aus
hat wird sind dass bei nach war um noch wie über so sie aber zum haben nur oder ihr vor zur bis mehr
durch man sein wurde sei können gegen vom schon wenn habe seine mich diese
""".split()
_ENDINGS = "en er e ung te st heit lich te nd ß ern ig".split()
_FOLLOW_UPS = (
    "Now make it shorter.", "Explain why.", "Say that again in other words.",
    "Give me three more examples.", "Are you sure about that?",
    "Write your answer again as a list.", "Now do the same for {}.", "What about {}?",
    "Begin each sentence with the letter {letter}.", "Which of them would you choose, and why?",
    "Rewrite your answer for a {job}.", "Can you put that into one sentence?",
    "Leave out the first part and go on.", "What would change if there were {number} of them?",
    "Turn it into a poem.", "Please explain the second step.",
)  # fmt: skip


def wish(draw: Draw) -> Chat:
    """One to three turns of random requests; the replies are empty."""
    chat = ask(draw.one(_KINDS)(draw), "")
    if draw.chance(0.2):
        chat += ask(draw.one(_KINDS)(draw), "")
    while len(chat) < 6 and draw.chance(0.45):
        follow_up = draw.one(_FOLLOW_UPS).format(
            _topic(draw), letter=draw.one("ABCDEFGHILMNOPRSTW"), job=draw.one(words.JOBS),
            number=draw.number(),
        )  # fmt: skip
        chat += ask(follow_up, "")
    return chat


def _noun(draw: Draw) -> str:
    """A word from the dictionary; common ones are more likely."""
    entries = draw.corpus.words
    for _ in range(20):
        word = entries[int(draw.rng.random() ** 3 * len(entries))]
        if word.speech_part == "noun":
            return word.word
    return "river"


def _country(draw: Draw) -> str:
    return draw.one(list(draw.corpus.facts))


def _topic(draw: Draw) -> str:
    return draw.one(
        (
            _noun(draw), f"the {_noun(draw)} of {_country(draw)}", _country(draw), draw.place(),
            f"{_noun(draw)} and {_noun(draw)}", f"the {draw.one(words.COLORS)} {_noun(draw)}",
            draw.person(), f"a {draw.one(words.JOBS)} who found {draw.one(words.STORY_THINGS)}",
        )
    )  # fmt: skip


def _passage(draw: Draw, low: int, high: int) -> str:
    if draw.chance(0.2):
        return draw.one(draw.corpus.backgrounds).text
    return " ".join(draw.passage(low, high))


def _writing(draw: Draw) -> str:
    form = draw.one(
        (
            "a blog post", "a short essay", "a letter", "an email to my boss", "a poem", "a speech",
            "a product description", "a review", "a story", "a joke", "a song", "a news report",
            "a scene between two friends", "an outline", "a persuasive paragraph", "a headline",
        )
    )  # fmt: skip
    how = draw.one(
        (
            "", "", " Use simple words.", " Keep it under 100 words.", " Be creative.",
            f" Mention {_noun(draw)} and {_noun(draw)}.", " Write in the style of an old book.",
            f" It should have {draw.rng.randint(2, 6)} paragraphs.", " End with a question.",
        )
    )  # fmt: skip
    verb = draw.one(("Write", "Compose", "Draft", "Please write"))
    return f"{verb} {form} about {_topic(draw)}.{how}"


def _role(draw: Draw) -> str:
    who = draw.one(
        (
            f"a {draw.one(words.JOBS)} from {draw.place()}", f"a {draw.one(words.ANIMALS)}",
            f"the king of {_country(draw)}", "a famous scientist", "my English teacher",
            "a robot", "a doctor", "an expert in mathematics", f"the {_noun(draw)} itself",
        )
    )  # fmt: skip
    ask_for = draw.one(
        (
            f"What do you think about {_topic(draw)}?", f"Describe {_topic(draw)} to me.",
            f"How do you like {draw.one(words.FOODS)}?", f"Why should I care about {_noun(draw)}?",
            f"I have a pain in my {_noun(draw)}. What should I do?", "Introduce yourself.",
            f"Explain how to make {draw.one(words.FOODS)}.",
        )
    )  # fmt: skip
    return f"{draw.one(('Pretend to be', 'Imagine you are', 'You are', 'Act as'))} {who}. {ask_for}"


def _knowledge(draw: Draw) -> str:
    a, b = _noun(draw), _noun(draw)
    return draw.one(
        (
            f"Explain {a} to a {draw.one(('child', 'student', 'beginner', words.JOBS[0]))}.",
            f"What is the difference between {a} and {b}?", f"How does {a} affect {b}?",
            f"What are the main causes of {a} in {_country(draw)}?", f"Compare {a} with {b}.",
            f"Describe the process of {a}. What factors influence it?",
            f"What are {draw.rng.randint(2, 8)} ways to use {a}?", f"Why is {a} important?",
            f"Give the history of {_topic(draw)}.", f"Discuss the effect of {a} on modern {b}.",
            f"Is it true that {a} is a kind of {b}? Give reasons.",
            f"How would you organise a {a} for {draw.number()} people?",
        )
    )  # fmt: skip


def _question(draw: Draw) -> str:
    """Casual spelling: lower case, often without a question mark."""
    a, b = _noun(draw), _noun(draw)
    asked = draw.one(
        (
            f"who wrote the song about the {a}", f"when did the {a} begin in {_country(draw)}",
            f"where is the {a} of the {b}", f"what is the meaning of {a} in {b}",
            f"who plays {draw.person()} in the {a}", f"how many {draw.plural()} are in a {a}",
            f"when was the last time {_country(draw)} won the {a}", f"what does {a} stand for",
            f"who was the first {draw.one(words.JOBS)} of {_country(draw)}",
            f"which {a} has the most {b}", f"what year did {draw.person()} write {a}",
            f"where does the {a} come from", f"how long is the {a} in {draw.place()}",
        )
    )  # fmt: skip
    return asked if draw.chance(0.7) else asked[0].upper() + asked[1:] + "?"


def _reasoning(draw: Draw) -> str:
    if draw.chance(0.5):
        question, _ = draw.one(draw.corpus.problems)
        lead = draw.one(("", "", "Think step by step. ", "Solve this problem: ", "Question: "))
        return lead + question + draw.one(("", "", " Explain your answer.", "\nAnswer:"))
    a, b, c = draw.first_name(), draw.first_name(), draw.first_name()
    n, m = draw.rng.randint(2, 60), draw.rng.randint(2, 20)
    return draw.one(
        (
            f"{a} is taller than {b}, and {b} is taller than {c}. Who is the tallest?",
            f"If {a} has {n} {draw.plural()} and gives {m} to {b}, how many are left?",
            f"What is {n} * {m} + {n}?", f"Solve for x: {m}x + {n} = {n + m * 3}",
            f"A train goes {n} miles in {m} hours. How fast is it?",
            f"Find the area of a rectangle with sides {n} and {m}.",
            f"f(x) = {m}x^2 - {n}x + 1. What is f({m})?", f"Is {n * m + 1} a prime number? Why?",
            f"{a}, {b} and {c} sit in a row. {b} sits left of {a}. Who can sit in the middle?",
            f"Some {draw.plural()} are {draw.one(words.COLORS)}. Are all of them? Explain.",
        )
    )  # fmt: skip


def _coding(draw: Draw) -> str:
    language = draw.one(("Python", "Python", "C++", "JavaScript", "Java", "SQL", "HTML"))
    things, field = draw.plural(), _noun(draw)
    what = draw.one(
        (
            f"finds the largest of {draw.number()} numbers", f"sorts a list of {things}",
            f"counts how often each word occurs in a file of {field}", "reverses a string",
            f"returns the first {draw.rng.randint(3, 90)} prime numbers", f"prints all {things}",
            "checks whether two words have the same letters", f"stores {things} by {field}",
            "merges two sorted arrays", f"asks the user for a {field} and prints it",
        )
    )  # fmt: skip
    return draw.one(
        (
            f"Write a {language} program that {what}.",
            f"Write a function in {language} that {what}.",
            f"How do I write {language} code that {what}?",
            f"Implement a class for a {field} in {language}.",
            "What is wrong with this code?\n\n"
            f"def {field}(x):\n    for i in x\n        return {things}",
            f"Explain what a {field} is in {language}.",
        )
    )  # fmt: skip


def _extraction(draw: Draw) -> str:
    what = draw.one(
        (
            "Extract all names of people and places from the text", "List the dates and numbers",
            "Name the main character of each sentence", "Count how often each word occurs",
            f"Find every sentence with the word {_noun(draw)}", "Give the main topics as JSON",
            "Identify the feelings in these reviews, each as a number from 1 to 5",
            "Make a table with two columns from what follows", "Correct the grammar of the text",
        )
    )  # fmt: skip
    lines = "\n".join(
        f"{i}. {draw.sentence()}" for i in range(1, draw.rng.randint(2, 6))
    ) if draw.chance(0.5) else _passage(draw, 2, 8)  # fmt: skip
    return f"{what}{draw.one((':', '.', ' and return them as a list.'))}\n{lines}"


def _translation(draw: Draw) -> str:
    if draw.chance(0.25):
        language = draw.one(("French", "Spanish", "German", "Italian"))
        return f"Translate to {language}: {draw.sentence()}"
    line = []
    for _ in range(draw.rng.randint(5, 28)):
        if draw.chance(0.45):
            line.append(draw.one(_GERMAN))
        else:
            word = draw.invented() + draw.one(_ENDINGS)
            line.append(word if draw.chance(0.45) else word.lower())
    text = " ".join(line)
    lead = draw.one(
        ("Translate German to English:", "Translate to English:", "In English, please:")
    )
    return f"{lead} {text[0].upper()}{text[1:]}."


def _summary(draw: Draw) -> str:
    text = _passage(draw, 6, 18)
    return draw.one(
        (
            f"Summarize: {text}", f"Summarize this: {text}\nSummary:",
            f"{text}\n\nSum up the text.", f"Give the main points of this article:\n\n{text}",
            f"{text}\nTL;DR:",
        )
    )  # fmt: skip


def _passages(draw: Draw) -> str:
    """A question with numbered passages that may contain the answer."""
    found = [f"[{i}] {_passage(draw, 2, 5)}" for i in range(1, draw.rng.randint(3, 6))]
    text = draw.one(("\n", "\n\n", " ")).join(found)
    question = _question(draw)
    return draw.one(
        (
            "Answer the question with the help of these passages.\n"
            f"{text}\nQuestion: {question}\nAnswer:",
            f"{text}\n\nUsing the passages above, answer: {question}",
            f"Question: {question}\nContext: {text}",
        )
    )  # fmt: skip


def _idle(draw: Draw) -> str:
    said = draw.sentence()
    return re.sub(r"[.]$", draw.one((".", "?", "")), said)


_KINDS: tuple[Callable[[Draw], str], ...] = (
    _writing, _role, _knowledge, _knowledge, _question, _question, _reasoning, _coding,
    _extraction, _translation, _translation, _summary, _passages, _idle,
)  # fmt: skip
