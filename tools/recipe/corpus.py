"""Reads and cleans the sources (gzipped JSON Lines), and splits them into training and held-out.

Handles the files' formats and quirks; independent of tokens and tasks. Every fiftieth record of a
source is held out for evaluation.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

HELD_OUT_EVERY = 50
# Vandalism in the mined sentence pairs; matching pairs are skipped.
COARSE = re.compile(r"\b(sex|rape|fuck|shit|porn|penis|gay|bitch|harr?ass|nazi)", re.IGNORECASE)
# The conversational files of the small-talk corpus; others are profiles, gossip and coding.
SMALLTALK_FILES = {
    "conversations.yml", "greetings.yml", "emotion.yml", "food.yml", "humor.yml", "health.yml",
    "literature.yml", "movies.yml", "psychology.yml", "science.yml", "sports.yml", "history.yml",
    "computers.yml", "trivia.yml",
}  # fmt: skip


class Message(NamedTuple):
    """One turn of a chat: role is "system", "user" or "assistant"."""

    role: str
    text: str


Chat = list[Message]


class Word(NamedTuple):
    """A dictionary entry's first meaning."""

    word: str
    speech_part: str
    meaning: str
    example: str
    synonyms: list[str]


class Fact(NamedTuple):
    """One line of the factbook: the label is its path, without the section."""

    entity: str
    label: str
    text: str


@dataclass
class Corpus:
    """The cleaned sources: one instance for training, one held out."""

    books: list[str]
    sentences: list[str]  # prose sentences of 25 to 180 characters, from the books
    dialogues: list[Chat]
    smalltalk: list[Chat]
    words: list[Word]  # common words first
    facts: dict[str, list[Fact]]  # by entity, short ones only
    backgrounds: list[Fact]  # the factbook's longer prose
    problems: list[tuple[str, str]]  # question, worked answer
    splits: list[tuple[str, str]]  # a long sentence, the same split in two
    meetings: list[list[Message]]  # role is the speaker here
    abstracts: list[tuple[str, str]]  # abstract, one line


def load(data: Path) -> tuple[Corpus, Corpus]:
    """Read every source below `data`: (training part, held-out part)."""
    books = [_clean_book(r["text"]) for r in _records(data, "books")]
    dialogues = [
        [Message(t["role"], t["text"].strip()) for t in r["turns"]]
        for r in _records(data, "sgd_dialogues")
    ]
    word_counts = Counter(w for text in books for w in re.findall(r"[a-z]+", text))
    columns: dict[str, list[Any]] = {
        "books": books,
        "dialogues": dialogues,
        "smalltalk": list(_smalltalk(data)),
        "words": _words(data, word_counts),
        "facts": [
            Fact(r["entity"], " ".join(r["path"][1:]) or r["path"][0], _plain(r["text"]))
            for r in _records(data, "factbook")
        ],
        "problems": [_problem(r) for r in _records(data, "gsm8k_train")],
        "splits": [
            (_untokenised(r["complex"]), " ".join(_untokenised(s) for s in r["simple"]))
            for r in _records(data, "wikisplit")
            if not COARSE.search(r["complex"] + " ".join(r["simple"]))
        ],
        "meetings": [
            [Message(t["speaker"], _speech(t["text"])) for t in r["transcript"]]
            for r in _records(data, "qmsum_train")
        ],
        "abstracts": [
            (" ".join(r["source"]), r["target"][0]) for r in _records(data, "scitldr_train")
        ],
    }
    train = {k: [x for i, x in enumerate(v) if i % HELD_OUT_EVERY] for k, v in columns.items()}
    held = {k: [x for i, x in enumerate(v) if i % HELD_OUT_EVERY == 0] for k, v in columns.items()}
    return _assemble(train), _assemble(held)


def _assemble(columns: dict[str, list[Any]]) -> Corpus:
    facts = columns.pop("facts")
    by_entity: dict[str, list[Fact]] = {}
    for fact in facts:
        if len(fact.text) <= 120 and len(fact.label) <= 60:
            by_entity.setdefault(fact.entity, []).append(fact)
    return Corpus(
        sentences=[s for text in columns["books"] for s in _sentences(text)],
        facts=by_entity,
        backgrounds=[
            f
            for f in facts
            if 200 <= len(f.text) <= 1400 and f.text.count(". ") >= 2 and f.entity != "World"
        ],
        **columns,
    )


def _records(data: Path, name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _clean_book(text: str) -> str:
    """Body text: one paragraph per line, plain quotes and dashes, no Markdown headings."""
    text = text.replace("\r\n", "\n")
    for old, new in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("—", "--"), ("…", "...")):
        text = text.replace(old, new)
    paragraphs = (re.sub(r"[*_]|\s+", _space_or_nothing, p).strip() for p in text.split("\n\n"))
    return "\n".join(p for p in paragraphs if p and not p.startswith(("#", "---", "![")))


def _space_or_nothing(found: re.Match[str]) -> str:
    return " " if found.group().isspace() else ""


def _sentences(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text):
        if (
            25 <= len(sentence) <= 180
            and sentence[0].isupper()
            and sentence[-1] in ".!?"
            and '"' not in sentence
            and "\n" not in sentence
            and not re.search(r"\b(Mr|Mrs|Dr|St|Ms)\.$", sentence)
        ):
            yield sentence


def _smalltalk(data: Path) -> Iterator[Chat]:
    for record in _records(data, "smalltalk"):
        if record["file"] not in SMALLTALK_FILES:
            continue
        for turns in yaml.safe_load(record["yaml"])["conversations"]:
            texts = [str(t).strip() for t in turns]
            if len(texts) >= 2 and all(t and len(t) < 300 for t in texts):
                texts = texts[: len(texts) // 2 * 2]  # so that it ends with a reply
                yield [Message(("user", "assistant")[i % 2], t) for i, t in enumerate(texts)]


def _words(data: Path, counts: Counter[str]) -> list[Word]:
    words = []
    for record in _records(data, "wordset"):
        if counts[record["word"]] < 8 or not record.get("meanings"):
            continue
        first = record["meanings"][0]
        meaning = _plain(first.get("def") or "")
        if meaning:
            example = _plain(first.get("example") or "")
            synonyms = [s for s in first.get("synonyms") or [] if s and counts[s] >= 100]
            words.append(Word(record["word"], first["speech_part"], meaning, example, synonyms))
    words.sort(key=lambda w: -counts[w.word])
    return words


def _plain(text: str) -> str:
    """Entities and tags resolved, white space collapsed."""
    text = re.sub(r"<[^>]+>", " ", html.unescape(html.unescape(text)))
    return re.sub(r"\s+", " ", text).strip()


def _problem(record: dict[str, Any]) -> tuple[str, str]:
    answer = re.sub(r"<<[^>]*>>", "", record["answer"])
    return record["question"], answer.replace("\n#### ", "\nThe answer is ") + "."


def _untokenised(text: str) -> str:
    """Remove a tokeniser's spaces before punctuation: "war , ended ." -> "war, ended."."""
    text = text.replace("''", '"').replace(" n't", "n't")
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    text = re.sub(r"\( ", "(", text)
    text = re.sub(r" ([.,;:!?)%]|'s\b|'re\b|'ll\b|'ve\b|'m\b|'d\b)", r"\1", text)
    return text.replace(" - ", "-")


def _speech(text: str) -> str:
    return re.sub(r"\s+", " ", _untokenised(re.sub(r"\{[^}]*\}", "", text))).strip()
