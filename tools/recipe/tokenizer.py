"""The tokenizer: sentencepiece BPE with byte fallback, and the chat format.

llama.cpp's SPM tokenizer merges by score, as sentencepiece's BPE does, so the two agree as long as
nothing is normalised, no leading space is added and every byte has a token. Roles are control
tokens directly before the text, so training chats match the chat template:

    <s><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|>

Run as `python -m tools.recipe.tokenizer --data DIR --out DIR`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import sentencepiece as spm

from tools.recipe import corpus as corpora
from tools.recipe import tasks
from tools.recipe.corpus import Corpus, Message

UNKNOWN, BOS, END = 0, 1, 2  # <|end|> ends a message, a document and generation
ROLES = {"system": 3, "user": 4, "assistant": 5}

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

FILE_NAME = "tokenizer.model"


class Tokenizer:
    """Converts text to ids and back; `chat` adds the control tokens, which text cannot produce."""

    def __init__(self, path: Path) -> None:
        self.model = spm.SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.model.decode(ids)
        return text

    def text(self, ids: list[int]) -> str:
        """The text with control tokens spelled out, so that llama.cpp can parse them."""
        control = {BOS, END, *ROLES.values()}
        parts = []
        for is_control, run in groupby(ids, lambda token: token in control):
            some = list(run)
            parts.append(
                "".join(map(self.model.id_to_piece, some)) if is_control else self.decode(some)
            )
        return "".join(parts)

    def document(self, text: str) -> list[int]:
        return [BOS, *self.encode(text), END]

    def chat(self, messages: Iterable[Message]) -> list[int]:
        ids = [BOS]
        for role, text in messages:
            ids += [ROLES[role], *self.encode(text), END]
        return ids


def training_text(corpus: Corpus, seed: int = 0) -> Iterator[str]:
    """About 11 MB of text like the training data: tasks, dialogues, prose."""
    draw = tasks.Draw(corpus, random.Random(seed))
    makers = [task for _, task in tasks.TASKS.values()]
    weights = [weight for weight, _ in tasks.TASKS.values()]
    for task in draw.rng.choices(makers, weights, k=14_000):
        for message in task(draw):
            yield message.text
    for dialogue in draw.rng.sample(corpus.dialogues, 3_000):
        for message in dialogue:
            yield message.text
    for book in corpus.books:
        start = draw.rng.randrange(max(1, len(book) - 20_000))
        for paragraph in book[start : start + 20_000].split("\n"):
            yield paragraph[:2_000]


def train(corpus: Corpus, out: Path, vocab: int = 4096) -> None:
    """Write `tokenizer.model` to `out`."""
    printable = "".join(map(chr, range(33, 127))) + "\n\t"
    out.mkdir(parents=True, exist_ok=True)
    spm.SentencePieceTrainer.train(
        # Line by line, so that a line break is never merged with other characters.
        sentence_iterator=(x for t in training_text(corpus) for x in t.split("\n") if x),
        model_prefix=str(out / FILE_NAME.removesuffix(".model")),
        model_type="bpe",
        vocab_size=vocab,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.9999,
        required_chars=printable,
        unk_id=UNKNOWN, bos_id=BOS, eos_id=END, pad_id=-1,
        eos_piece="<|end|>",
        control_symbols=[f"<|{role}|>" for role in ROLES],
        max_sentence_length=8_000,
        num_threads=2,
        minloglevel=2,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.model")
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    training, _ = corpora.load(args.data)
    train(training, args.out, args.vocab)


if __name__ == "__main__":
    main()
