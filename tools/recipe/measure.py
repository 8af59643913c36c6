"""Evaluates a checkpoint: loss per held-out source, and how well it copies from the context.

Used during training and for the model card. If the argmax is correct at every position of a
reference reply, then greedy decoding generates exactly that reply, so one forward pass measures it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.recipe import tasks
from tools.recipe.corpus import Corpus
from tools.recipe.model import Decoder
from tools.recipe.rows import Ids, Mix, RowSource
from tools.recipe.tasks import answering, rewriting, telling
from tools.recipe.tokenizer import BOS, ROLES, Tokenizer

TIME = 512


@dataclass(frozen=True)
class Share:
    """Correct predictions out of all predictions."""

    correct: int
    total: int

    @property
    def percent(self) -> float:
        return round(100 * self.correct / max(1, self.total), 1)


class Measure:
    """Evaluation on held-out data; draws the same questions for every checkpoint."""

    def __init__(
        self, held_out: Corpus, tokenizer: Tokenizer, rows: int = 4, chats: int = 3, seed: int = 7
    ) -> None:
        self.tokenizer, self.rows, self.chats = tokenizer, rows, chats
        self.source = RowSource(held_out, tokenizer, Mix(), seed)
        self.corpus = held_out
        self.seed = seed

    def draw(self, name: str) -> tasks.Draw:
        return tasks.Draw(self.corpus, random.Random(f"{self.seed}/{name}"))

    @torch.no_grad()
    def losses(self, model: Decoder) -> dict[str, float]:
        """Nats per token on held-out text, by source; `all_tasks` is the weighted mix."""
        makers: dict[str, tasks.Task | None] = {
            "dialogues": telling.dialogue,
            "smalltalk": telling.chatter,
            "dictionary": telling.dictionary,
            "factbook": answering.factbook,
            "problems": telling.problem,
            "splits": rewriting.split_or_join,
            "all_tasks": None,
        }
        losses = {"books": self._loss(model, [self.source.prose(self.draw(f"books{i}"), TIME)
                                              for i in range(self.rows)])}  # fmt: skip
        for name, maker in makers.items():
            rows = [self.source.pack(self.draw(f"{name}{i}"), TIME, maker)
                    for i in range(self.rows)]  # fmt: skip
            losses[name] = self._loss(model, rows)
        return losses

    def _loss(self, model: Decoder, rows: list[Ids]) -> float:
        device = model.embedding.weight.device
        tokens = torch.stack([torch.from_numpy(r) for r in rows]).to(device)
        weights = torch.ones(tokens.shape[0], tokens.shape[1] - 1, device=device)
        return round(float(model.loss(tokens, weights)), 4)

    @torch.no_grad()
    def segments(self, model: Decoder, random_tokens: bool, gap: int = 30) -> Share:
        """Accuracy within a repeated segment of 64 tokens, `gap` tokens of text after the first."""
        draw = self.draw(f"segments{random_tokens}")
        rows = []
        for _ in range(2 * self.rows):
            segment = self.source.segment(draw, 64, random_tokens)
            rows.append([BOS, *segment, *self.source.segment(draw, gap, False), *segment])
        tokens = torch.tensor(rows, device=model.embedding.weight.device)
        correct = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
        inside = correct[:, -63:]  # the segment's first token is unpredictable
        return Share(int(inside.sum()), inside.numel())

    @torch.no_grad()
    def replies(self, model: Decoder, task: str) -> tuple[Share, Share]:
        """For the last replies to a task: shares of correct tokens and of correct whole replies."""
        draw, make = self.draw(task), tasks.TASKS[task][1]
        correct = total = whole = count = 0
        while count < self.chats:
            ids = self.tokenizer.chat(make(draw))
            if len(ids) > TIME:
                continue
            start = len(ids) - 1 - ids[::-1].index(ROLES["assistant"])
            tokens = torch.tensor([ids], device=model.embedding.weight.device)
            hits: Tensor = (model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:])[0, start:]
            correct, total = correct + int(hits[:-1].sum()), total + len(hits) - 1
            whole, count = whole + int(bool(hits.all())), count + 1
        return Share(correct, total), Share(whole, count)

    def report(self, model: Decoder) -> dict[str, object]:
        """All results for the log: losses in nats, copying in percent."""
        was_training = model.training
        model.eval()
        by_task = {name: self.replies(model, name) for name in tasks.COPYING}
        tokens = [t for t, _ in by_task.values()]
        whole = [w for _, w in by_task.values()]
        result = {
            "loss": self.losses(model),
            "copy_chance_tokens": self.segments(model, True).percent,
            "copy_text": self.segments(model, False).percent,
            "copy_tasks": Share(
                sum(t.correct for t in tokens), sum(t.total for t in tokens)
            ).percent,
            "copy_tasks_whole": Share(
                sum(w.correct for w in whole), sum(w.total for w in whole)
            ).percent,
            "by_task": {name: [t.percent, w.percent] for name, (t, w) in by_task.items()},
        }
        model.train(was_training)
        return result
