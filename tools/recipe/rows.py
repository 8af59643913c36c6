"""Training batches: documents drawn by weight and packed into rows of equal length.

A batch depends on (seed, step) alone, so a run can resume from its step number, even with another
mix. Rows of the kind `copies` repeat segments within the row, to train the induction circuit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.recipe import persona, tasks
from tools.recipe.corpus import Chat, Corpus, Message
from tools.recipe.tokenizer import BOS, END, ROLES, Tokenizer

FIRST_TEXT_TOKEN = 262  # after the control tokens and the 256 bytes

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Mix:
    """Shares of the rows; the remainder is tasks."""

    copies: float = 0.2
    prose: float = 0.14
    dialogues: float = 0.13
    system: float = 0.25  # share of the chats that get a system prompt
    asked: float = 1.0  # loss weight of system and user tokens; replies have 1

    def __post_init__(self) -> None:
        if self.copies + self.prose + self.dialogues > 1:
            raise ValueError("copies, prose and dialogues together exceed 1; lower one of them")


@dataclass(frozen=True)
class Batch:
    """tokens: (rows, time + 1); weights: (rows, time), of each token in the loss.

    Unpredictable tokens have the weight 0.
    """

    tokens: Ids
    weights: Weights


def loss_weights(ids: Ids, asked: float) -> Weights:
    """Loss weights of packed chats: (time + 1,) to (time,).

    Tokens of a reply, including its end, weigh 1; all others weigh `asked`.
    """
    heads = np.isin(ids, [BOS, *ROLES.values()])
    last_head = np.maximum.accumulate(np.where(heads, np.arange(len(ids)), 0))
    replied = (ids[last_head] == ROLES["assistant"]) & ~heads
    return np.where(replied, 1.0, asked)[1:].astype(np.float32)


class RowSource:
    """Draws documents from a corpus and packs them."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, mix: Mix, seed: int) -> None:
        self.corpus, self.tokenizer, self.mix, self.seed = corpus, tokenizer, mix, seed
        self.makers = [task for _, task in tasks.TASKS.values()]
        self.maker_weights = [weight for weight, _ in tasks.TASKS.values()]

    def batch(self, step: int, rows: int, time: int) -> Batch:
        """The batch of a step; each row has one kind of text."""
        draw = tasks.Draw(self.corpus, random.Random(f"{self.seed}/{step}"))
        tokens = np.zeros((rows, time + 1), np.int64)
        weights = np.ones((rows, time), np.float32)
        for row in range(rows):
            roll = draw.rng.random()
            if roll < self.mix.copies:
                tokens[row], weights[row] = self.copies(draw, time)
            elif roll < self.mix.copies + self.mix.prose:
                tokens[row] = self.prose(draw, time)
            elif roll < self.mix.copies + self.mix.prose + self.mix.dialogues:
                tokens[row] = self.pack(draw, time, tasks.telling.dialogue)
                weights[row] = loss_weights(tokens[row], self.mix.asked)
            else:
                tokens[row] = self.pack(draw, time, None)
                weights[row] = loss_weights(tokens[row], self.mix.asked)
        return Batch(tokens, weights)

    def pack(self, draw: tasks.Draw, time: int, task: tasks.Task | None) -> Ids:
        """Concatenated chats of one task, or of all tasks by weight: (time + 1,).

        Half of the chats that would be truncated are skipped, so that most chats have their end,
        which teaches the model to stop.
        """
        ids: list[int] = []
        while len(ids) < time + 1:
            make = task or draw.rng.choices(self.makers, self.maker_weights)[0]
            chat = self.tokenizer.chat(self.with_system(draw, make(draw)))
            if ids and len(ids) + len(chat) > time + 1 and draw.chance(0.5):
                continue
            ids += chat
        return np.array(ids[: time + 1])

    def with_system(self, draw: tasks.Draw, chat: Chat) -> Chat:
        if chat[0].role == "system" or not draw.chance(self.mix.system):
            return chat
        return [Message("system", draw.one(persona.SYSTEM_PROMPTS)), *chat]

    def prose(self, draw: tasks.Draw, time: int) -> Ids:
        """An excerpt of a book that starts with a paragraph: (time + 1,)."""
        ids: list[int] = []
        while len(ids) < time + 1:
            book = draw.one(self.corpus.books)
            start = book.find("\n", draw.rng.randrange(max(1, len(book) - 6 * time))) + 1
            text = book[start : start + 6 * time]
            ids += [BOS, *self.tokenizer.encode(text)]
        return np.array(ids[: time + 1])

    def copies(self, draw: tasks.Draw, time: int) -> tuple[Ids, Weights]:
        """Segments of random tokens or text, each repeated after a gap: (time + 1,), (time,).

        The first occurrence of random tokens is unpredictable and has the weight 0.
        """
        ids, learn = [BOS], [1.0]
        while len(ids) < time + 1:
            random_tokens = draw.chance(0.5)
            length = draw.rng.randint(6, draw.one((16, 40, 120)))
            segment = self.segment(draw, length, random_tokens)
            ids += segment
            learn += [0.0 if random_tokens else 1.0] * len(segment)
            for _ in range(draw.one((1, 1, 2, 3))):
                gap = draw.one((0, 0, 1, draw.rng.randint(2, 30), draw.rng.randint(30, 150)))
                gap = draw.rng.randint(0, time // 2) if draw.chance(0.05) else gap
                between = self.segment(draw, gap, False) if gap > 1 else [END] * gap
                ids += between + segment
                learn += [1.0] * (len(between) + len(segment))
                # The first token of a copy is unpredictable; the rest is not.
                if random_tokens:
                    learn[-len(segment)] = 0.0
        return np.array(ids[: time + 1]), np.array(learn[1 : time + 1], np.float32)

    def segment(self, draw: tasks.Draw, length: int, random_tokens: bool) -> list[int]:
        if random_tokens:
            # Half of the time mostly frequent tokens (low ids): copying is learnt on those first.
            power = draw.one((1, 3))
            count = self.tokenizer.model.vocab_size() - FIRST_TEXT_TOKEN
            return [
                FIRST_TEXT_TOKEN + int(count * draw.rng.random() ** power) for _ in range(length)
            ]
        ids: list[int] = []
        while len(ids) < length:
            if draw.chance(0.5):
                text = draw.one(self.corpus.sentences)
            else:
                make = draw.rng.choices(self.makers, self.maker_weights)[0]
                text = make(draw)[-1].text
            ids += self.tokenizer.encode(" " + text)
        return ids[:length]
