"""What a training batch holds: documents drawn by weight, packed into rows of one length.

A batch is a function of (seed, step) alone, so a run resumes by its step number and the mix may be
changed on the way. Rows of the kind `copies` hold segments that come again within the row:
they train the circuit that copies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.recipe import persona, tasks
from tools.recipe.corpus import Chat, Corpus, Message
from tools.recipe.tokenizer import BOS, END, ROLES, Tokenizer

FIRST_TEXT_TOKEN = 262  # below: control tokens and the 256 bytes

Ids = npt.NDArray[np.int64]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Mix:
    """Shares of the rows: what is neither copies nor prose nor dialogues is tasks."""

    copies: float = 0.2
    prose: float = 0.14
    dialogues: float = 0.13
    system: float = 0.25  # of the chats: with a system prompt in front
    asked: float = 1.0  # weight of a token that system or user said; 1 is that of the replies

    def __post_init__(self) -> None:
        if self.copies + self.prose + self.dialogues > 1:
            raise ValueError("copies, prose and dialogues together exceed 1; lower one of them")


@dataclass(frozen=True)
class Batch:
    """tokens: (rows, time + 1); weights: (rows, time), of each target in the loss.

    0 where the target is pure chance.
    """

    tokens: Ids
    weights: Weights


def said_weights(ids: Ids, asked: float) -> Weights:
    """The weights of packed chats, by who says the target: (time + 1,) to (time,).

    A token of a reply, and its end, weighs 1; what the reply is to, and the roles, weigh `asked`.
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
        """The batch of a step; a row is one kind of text."""
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
                weights[row] = said_weights(tokens[row], self.mix.asked)
            else:
                tokens[row] = self.pack(draw, time, None)
                weights[row] = said_weights(tokens[row], self.mix.asked)
        return Batch(tokens, weights)

    def pack(self, draw: tasks.Draw, time: int, task: tasks.Task | None) -> Ids:
        """Chats of one task, or of all by weight, one after another: (time + 1,).

        A chat that would be cut is mostly left for another row: its end teaches when to stop.
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
        """A stretch of a book, beginning with a paragraph: (time + 1,)."""
        ids: list[int] = []
        while len(ids) < time + 1:
            book = draw.one(self.corpus.books)
            start = book.find("\n", draw.rng.randrange(max(1, len(book) - 6 * time))) + 1
            text = book[start : start + 6 * time]
            ids += [BOS, *self.tokenizer.encode(text)]
        return np.array(ids[: time + 1])

    def copies(self, draw: tasks.Draw, time: int) -> tuple[Ids, Weights]:
        """Segments of chance tokens or of text, each repeated after a gap: (time + 1,), (time,).

        The first copy of chance tokens has weight 0: nothing can be learnt from it.
        """
        ids, learn = [BOS], [1.0]
        while len(ids) < time + 1:
            chance_tokens = draw.chance(0.5)
            length = draw.rng.randint(6, draw.one((16, 40, 120)))
            segment = self.segment(draw, length, chance_tokens)
            ids += segment
            learn += [0.0 if chance_tokens else 1.0] * len(segment)
            for _ in range(draw.one((1, 1, 2, 3))):
                gap = draw.one((0, 0, 1, draw.rng.randint(2, 30), draw.rng.randint(30, 150)))
                gap = draw.rng.randint(0, time // 2) if draw.chance(0.05) else gap
                between = self.segment(draw, gap, False) if gap > 1 else [END] * gap
                ids += between + segment
                learn += [1.0] * (len(between) + len(segment))
                # Where the second copy starts cannot be known; what follows it can.
                if chance_tokens:
                    learn[-len(segment)] = 0.0
        return np.array(ids[: time + 1]), np.array(learn[1 : time + 1], np.float32)

    def segment(self, draw: tasks.Draw, length: int, chance_tokens: bool) -> list[int]:
        if chance_tokens:
            # Half of the time rather frequent tokens (low ids): copying is learnt on those first.
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
