"""Tasks: recall something from earlier in the chat or from the system prompt."""

from __future__ import annotations

from tools.recipe import words
from tools.recipe.corpus import Chat, Message
from tools.recipe.tasks.draw import Draw, ask
from tools.recipe.tasks.quoting import repeat
from tools.recipe.tasks.telling import arithmetic, capital, chatter, dictionary, persona_talk


def any_short(draw: Draw) -> Chat:
    return draw.one((persona_talk, dictionary, chatter, capital, arithmetic, repeat))(draw)[:4]


def say_again(draw: Draw) -> Chat:
    """Any chat, then a request to repeat the reply or the user's own words."""
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


def told_facts(draw: Draw) -> Chat:
    """Recall what the user said about themselves."""
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
    said = [statement for statement, _, _ in told]
    if len(said) > 1 and draw.chance(0.4):
        second = said.pop(1)
        second = second if second.startswith("I ") else second[0].lower() + second[1:]
        said[0] = f"{said[0][:-1]} and {second}"
    hello = draw.one(("Hello! ", "Hi, ", "", "", "Hey. "))
    reply = draw.one(("Nice to meet you!", "Thank you for telling me.", "That is good to know.",
                      "I see. How can I help you?", "I will remember that."))  # fmt: skip
    if told[0][0].startswith(("My name", "I am " + name)) and draw.chance(0.6):
        reply = draw.one((f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"))
    chat = ask(hello + " ".join(said), reply)
    if draw.chance(0.3):
        chat += any_short(draw)
    for _, questions, answer in draw.some(told, 1, 3):
        chat += ask(draw.one(questions), answer)
    return chat


def system_context(draw: Draw) -> Chat:
    """Recall a fact from the system prompt."""
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
