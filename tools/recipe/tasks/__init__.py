"""Exercises generated from the sources; most answers can be found in the context.

Each is a function from a `Draw` (a random generator and the corpus) to a chat, independent of
tokens. `TASKS` lists all of them with their weights; `COPYING` names those whose replies are pure
copies from the context, which `evaluate` measures. Batches are drawn by weight in the table's
order, so a run is reproducible only with the same table.
"""

from __future__ import annotations

from tools.recipe.tasks import answering, quoting, remembering, rewriting, telling
from tools.recipe.tasks.draw import Draw, Task

__all__ = ["COPYING", "TASKS", "Draw", "Task"]

TASKS: dict[str, tuple[float, Task]] = {
    "repeat": (6, quoting.repeat),
    "quote_sentence": (10, quoting.quote_sentence),
    "quote_with_word": (4, quoting.quote_with_word),
    "longest_line": (1, quoting.longest_line),
    "first_words": (2, quoting.first_words),
    "say_again": (4, remembering.say_again),
    "lines_from_list": (4, quoting.lines_from_list),
    "record": (10, answering.record),
    "told_facts": (8, remembering.told_facts),
    "story_facts": (7, answering.story_facts),
    "extract": (5, answering.extract),
    "capitals_in_text": (1, quoting.capitals_in_text),
    "factbook": (4, answering.factbook),
    "background": (2, answering.background),
    "meeting": (1.5, answering.meeting),
    "replace_word": (8, rewriting.replace_word),
    "correct_typos": (6, rewriting.correct_typos),
    "split_or_join": (3, rewriting.split_or_join),
    "bullet_points": (3, rewriting.bullet_points),
    "sentences_to_bullets": (2, rewriting.sentences_to_bullets),
    "change_case": (1, rewriting.change_case),
    "small_edit": (3, rewriting.small_edit),
    "continue_list": (3, telling.continue_list),
    "arithmetic": (3, telling.arithmetic),
    "count_up": (0.7, telling.count_up),
    "problem": (3, telling.problem),
    "dictionary": (7, telling.dictionary),
    "capital": (7, telling.capital),
    "country": (0.7, telling.country),
    "abstract": (1, telling.abstract),
    "continue_text": (2, telling.continue_text),
    "story": (2, telling.story),
    "edit_code": (7, rewriting.edit_code),
    "write_code": (1.5, telling.write_code),
    "persona_talk": (12, telling.persona_talk),
    "chatter": (7, telling.chatter),
    "system_context": (2, remembering.system_context),
}

COPYING = (
    "repeat", "quote_sentence", "quote_with_word", "say_again", "lines_from_list", "record",
    "told_facts", "story_facts", "extract", "factbook", "replace_word", "correct_typos",
    "bullet_points", "sentences_to_bullets", "edit_code",
)  # fmt: skip
