"""Small Python snippets with random names, and edits of them: rename, add, remove, change.

Snippets are generated from patterns here; the training data has no third-party code.
"""

from __future__ import annotations

import random
import re

NAMES = """
total count result value items data name size index price amount number text line word user key
score rate limit width height start end step path file node left right first last temp buffer cache
message letter answer parts names values numbers words lines rows columns table order speed weight
""".split()
FUNCTIONS = """
add get_total load_data find_max is_valid read_file compute update parse_line make_list print_all
check count_words send get_name to_text merge split_text clean sort_items area convert process run
""".split()
CLASSES = "User Point Account Node Counter Shape Book Order Player Car Config Timer Queue".split()
CALLS = "len sum max min sorted str int print list abs round".split()


def _name(rng: random.Random) -> str:
    name = rng.choice(NAMES)
    return f"{name}_{rng.choice(NAMES)}" if rng.random() < 0.25 else name


def _function_name(rng: random.Random) -> str:
    name = rng.choice(FUNCTIONS)
    return f"{name}_{rng.choice(NAMES)}" if rng.random() < 0.3 else name


def block(rng: random.Random) -> str:
    """One definition or statement, 2 to 7 lines."""
    a, b, c = (_name(rng) for _ in range(3))
    while len({a, b, c}) < 3:
        a, b, c = (_name(rng) for _ in range(3))
    f, n, m = _function_name(rng), rng.randint(0, 20), rng.randint(2, 100)
    op, word, call = rng.choice("+-*"), rng.choice(NAMES), rng.choice(CALLS)
    return rng.choice((
        f"def {f}({a}, {b}):\n    {c} = {a} {op} {b}\n    return {c}",
        f"def {f}({a}):\n    return {a} {op} {m}",
        f"def {f}({a}):\n    {c} = {n}\n    for {b} in {a}:\n        {c} += {b}\n    return {c}",
        f"def {f}({a}, {b}={m}):\n    if {a} > {b}:\n        return {a}\n    return {b}",
        f"def {f}({a}):\n    if not {a}:\n        return None\n    return {call}({a})",
        f"def {f}():\n    print(\"{word}\")",
        f"for {a} in range({m}):\n    print({a})",
        f"for {a} in {b}:\n    if {a} == {n}:\n        {c} = {a}\n        break",
        f"{a} = {n}\nwhile {a} < {m + n}:\n    {a} += 1\nprint({a})",
        f"{a} = [{n}, {m}, {n + m}]\n{b} = {call}({a})\nprint({b})",
        f"{a} = {{\"{b}\": {n}, \"{c}\": {m}}}\nprint({a}[\"{b}\"])",
        f"with open(\"{word}.txt\") as {a}:\n    {b} = {a}.read()\nprint({call}({b}))",
        f"class {rng.choice(CLASSES)}:\n    def __init__(self, {a}, {b}):\n"
        f"        self.{a} = {a}\n        self.{b} = {b}",
        f"{a} = {n}\n{b} = {m}\n{c} = {a} {op} {b}\nprint({c})",
        f"try:\n    {a} = int({b})\nexcept ValueError:\n    {a} = {n}",
        f"def {f}({a}):\n    # {word} the {b}\n    {c} = {call}({a})\n    return {c}",
        f"import json\n\ndef {f}({a}):\n    with open({a}) as {b}:\n        return json.load({b})",
        f"{a} = [{b} {op} {m} for {b} in range({n + 1})]\nprint({a})",
    ))  # fmt: skip


def snippet(rng: random.Random) -> str:
    """One to three blocks."""
    return "\n\n".join(block(rng) for _ in range(rng.choice((1, 1, 2, 3))))


def edit(rng: random.Random) -> tuple[str, str, str]:
    """A snippet, an instruction without its colon, and the edited snippet."""
    text = snippet(rng)
    lines = text.split("\n")
    used = [n for n in set(re.findall(r"[a-z_]+", text)) if n in NAMES or "_" in n]
    used = sorted(n for n in used if n != "__init__")
    functions = re.findall(r"def ([a-z_]+)\(", text)
    functions = [f for f in functions if f != "__init__"]
    numbers = re.findall(r"\b\d+\b", text)
    kinds = ["same", "append", "comment", "rename", "rename", "rename"]
    kinds += ["function"] * 2 if functions else []
    kinds += ["number"] if numbers else []
    kinds += ["docstring"] if functions else []
    kind = rng.choice(kinds)
    new = _name(rng)
    while new in text:
        new = _name(rng) + rng.choice("2x_")
        new = new.rstrip("_")
    if kind == "rename" and used:
        old = rng.choice(used)
        wish = rng.choice((f"Rename {old} to {new}", f"Rename the variable {old} to {new}",
                           f"Change the name {old} to {new}",
                           f"Replace {old} with {new} in this code"))  # fmt: skip
        return text, wish, re.sub(rf"\b{old}\b", new, text)
    if kind == "function":
        old, new = rng.choice(functions), _function_name(rng)
        wish = rng.choice((f"Rename the function {old} to {new}", f"Call the function {new}"))
        wish = wish if wish[0] == "R" else f"Change the function name {old} to {new}"
        return text, wish, re.sub(rf"\b{old}\b", new, text)
    if kind == "number":
        old, new = rng.choice(numbers), str(rng.randint(2, 500))
        return text, f"Change {old} to {new}", re.sub(rf"\b{old}\b", new, text)
    if kind == "docstring":
        name = rng.choice(functions)
        words = " ".join(rng.choice(NAMES) for _ in range(rng.randint(2, 4))).capitalize() + "."
        at = next(i for i, line in enumerate(lines) if line.startswith(f"def {name}("))
        edited = [*lines[: at + 1], f'    """{words}"""', *lines[at + 1 :]]
        return text, f'Add the docstring "{words}" to {name}', "\n".join(edited)
    if kind == "append":
        line = f"print({new})"
        wish = rng.choice((f"Add the line {line} at the end", f"Append {line}"))
        return text, wish, f"{text}\n{line}"
    if kind == "comment":
        words = " ".join(rng.choice(NAMES) for _ in range(rng.randint(2, 4)))
        return text, f'Add the comment "{words}" at the top', f"# {words}\n{text}"
    wish = rng.choice(("Repeat this code", "Copy this code", "Return this code unchanged"))
    return text, wish, text


def wish(rng: random.Random) -> tuple[str, str]:
    """A request for a few lines of code, and the code."""
    a, b, n, f = _name(rng), rng.choice(NAMES), rng.randint(2, 20), rng.choice(FUNCTIONS)
    return rng.choice((
        ("Write a function that adds two numbers.", "def add(a, b):\n    return a + b"),
        ("Write a function that multiplies two numbers.", "def multiply(a, b):\n    return a * b"),
        (f"Write a loop that prints the numbers from 1 to {n}.",
         f"for i in range(1, {n + 1}):\n    print(i)"),
        (f"Write a loop over {a}.", f"for item in {a}:\n    print(item)"),
        (f"Write a function called {f} that returns {n}.", f"def {f}():\n    return {n}"),
        (f"Write a function called {f} that prints {b}.", f"def {f}():\n    print(\"{b}\")"),
        (f"Set {a} to {n} and print it.", f"{a} = {n}\nprint({a})"),
        ("Write hello world in Python.", "print(\"Hello, world!\")"),
        ("Write a Python program that says hello.", "print(\"Hello!\")"),
        (f"Write a function that counts the {a}.", f"def count({a}):\n    return len({a})"),
        ("Write a function that returns the largest number.",
         "def largest(numbers):\n    return max(numbers)"),
        (f"Make a list called {a} with the numbers 1, 2 and {n}.", f"{a} = [1, 2, {n}]"),
        ("Write a function that checks if a number is even.",
         "def is_even(number):\n    return number % 2 == 0"),
        ("Read a file in Python.",
         "with open(\"file.txt\") as file:\n    text = file.read()"),
        (f"Write a class called {(c := rng.choice(CLASSES))}.",
         f"class {c}:\n    pass"),
    ))  # fmt: skip
