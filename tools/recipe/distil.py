"""Distillation: trains a draft model of one or two layers to predict the target's tokens.

The draft model learns the target's full distribution (forward KL) on two kinds of text: the
target's own replies (`replies`), one chat per row from position 0, as in drafting; and rows of the
training mix. The target's final hidden states are computed once per batch, stored in float16 and
reused in every epoch; its logits are one matrix product away. So a step costs little more than the
draft model itself.

The batch of a step depends on (seed, step) alone, so a stopped run can resume. The learning rate
decays to zero at the end of the run.

    python -m tools.recipe.distil --data DIR --replies RUN/replies.jsonl --teacher checkpoint.pt \\
        --tokenizer tokenizer.model --out RUN [--steps 2000] [--device cuda] [--resume]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.recipe import agreement, replies
from tools.recipe import corpus as corpora
from tools.recipe.agreement import Hits
from tools.recipe.export import load_decoder
from tools.recipe.model import Decoder, Shape
from tools.recipe.replies import RepliedChat
from tools.recipe.rows import Ids, Mix, RowSource
from tools.recipe.tokenizer import END, Tokenizer
from tools.recipe.train import CHECKPOINT, Schedule, log, restore, start, train_step

SHAPE = Shape(dim=128, layers=2, heads=2, hidden=384)
SIZES = ("layers", "dim", "heads", "head", "hidden")
BUCKET = 32  # rows of chats are padded to a multiple of this many tokens
MIX_TIME = 512  # tokens in a row of the training mix


@dataclass(frozen=True)
class Batch:
    """Rows of equal length, and the positions that count in the loss.

    tokens: (rows, time); asked: (asked,) positions in the flattened rows.
    """

    tokens: Ids
    asked: Ids


class Batches:
    """All batches of a run: the target's replies, then rows of the mix; the same in every epoch.

    Of the chats' prompt positions, the share `prompts` counts in the loss too.
    """

    def __init__(
        self, chats: Sequence[RepliedChat], source: RowSource, step_tokens: int, *,
        prompts: float, mix: float, seed: int,
    ) -> None:  # fmt: skip
        self.step_tokens, self.prompts, self.seed = step_tokens, prompts, seed
        rng = random.Random(f"distil/{seed}")
        self.batches = list(self._of_chats(chats, rng))
        n_mix = round(len(self.batches) * mix / (1 - mix))
        self.batches += [self._of_mix(source, i) for i in range(n_mix)]

    def index(self, step: int) -> int:
        """The index of a step's batch; every epoch is shuffled anew."""
        epoch, place = divmod(step, len(self.batches))
        order = list(range(len(self.batches)))
        random.Random(f"distil/{self.seed}/{epoch}").shuffle(order)
        return order[place]

    def _of_chats(self, chats: Sequence[RepliedChat], rng: random.Random) -> Iterator[Batch]:
        buckets: dict[int, list[RepliedChat]] = {}
        for chat in rng.sample(chats, len(chats)):
            time = -(-len(chat.ids) // BUCKET) * BUCKET
            rows = buckets.setdefault(time, [])
            rows.append(chat)
            if len(rows) == max(1, self.step_tokens // time):
                yield self._pad(buckets.pop(time), time, rng)
        for time, rows in buckets.items():
            yield self._pad(rows, time, rng)

    def _pad(self, chats: Sequence[RepliedChat], time: int, rng: random.Random) -> Batch:
        tokens = np.full((len(chats), time), END, np.int64)
        asked: list[int] = []
        for row, chat in enumerate(chats):
            tokens[row, : len(chat.ids)] = chat.ids
            wanted = {int(position) for position in agreement.reply_positions(chat)}
            others = [p for p in range(len(chat.ids) - 1) if p not in wanted]
            wanted.update(rng.sample(others, round(self.prompts * len(others))))
            asked += (row * time + position for position in sorted(wanted))
        return Batch(tokens, np.array(asked))

    def _of_mix(self, source: RowSource, index: int) -> Batch:
        batch = source.batch(index, self.step_tokens // MIX_TIME, MIX_TIME)
        return Batch(batch.tokens[:, :-1], np.flatnonzero(batch.weights))


class Teacher:
    """The target: its final hidden states, computed on first use and kept."""

    def __init__(self, decoder: Decoder, device: str, bf16: bool) -> None:
        self.decoder = decoder.to(device)
        self.device, self.bf16 = device, bf16
        self._known: dict[int, Tensor] = {}

    @property
    def embedding(self) -> Tensor:
        """(vocab, dim); states times its transpose give the logits."""
        return self.decoder.embedding.weight.detach()

    @torch.no_grad()
    def states(self, index: int, batch: Batch) -> Tensor:
        """States at `batch.asked`: (asked, dim), on the device."""
        if index not in self._known:
            tokens = torch.from_numpy(batch.tokens).to(self.device)
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.bf16):
                states = self.decoder.hidden(tokens).flatten(0, 1)
            self._known[index] = states[torch.from_numpy(batch.asked).to(self.device)].half().cpu()
        return self._known[index].to(self.device)


@dataclass(frozen=True)
class Loss:
    """KL(p || q) in nats per token; p is the target's distribution, q the draft's.

    hard  weight of the cross-entropy on the target's argmax; KL has the weight 1 - hard
    """

    draft: Decoder
    embedding: Tensor  # the target's
    hard: float

    def __call__(self, tokens: Tensor, asked: Tensor, states: Tensor) -> Tensor:
        """tokens: (rows, time); asked: (asked,); states: (asked, the target's dim)."""
        hidden = self.draft.hidden(tokens).flatten(0, 1)[asked]
        log_q = F.log_softmax(F.linear(hidden, self.draft.embedding.weight).float(), -1)
        log_p = F.log_softmax(F.linear(states.float(), self.embedding).float(), -1)
        loss = (log_p.exp() * (log_p - log_q)).sum(-1)
        if self.hard:
            first = -log_q.gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1)
            loss = (1 - self.hard) * loss + self.hard * first
        return loss.mean()


@torch.no_grad()
def hits(draft: Decoder, chat: RepliedChat) -> Hits:
    """For each token of the replies, whether it is the draft model's first choice."""
    ids = torch.tensor(chat.ids, device=draft.embedding.weight.device)
    asked = torch.from_numpy(agreement.reply_positions(chat)).to(ids.device)
    hidden = draft.hidden(ids[None])[0, asked]
    choices = F.linear(hidden, draft.embedding.weight).argmax(-1)
    result: Hits = (choices == ids[asked + 1]).cpu().numpy()
    return result


def held_out_figures(draft: Decoder, chats: Sequence[RepliedChat]) -> dict[str, object]:
    """Figures of the greedy chats, logged during training."""
    found = [
        part
        for chat in chats
        if chat.temperature == 0
        for part in agreement.by_reply(hits(draft, chat), chat)
    ]
    return agreement.figures(found)


def distil(args: argparse.Namespace) -> None:
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    schedule = Schedule(
        step_tokens=args.step_tokens, decay_share=args.decay_share,
        muon_lr=args.muon_lr, adam_lr=args.adam_lr,
    )  # fmt: skip
    training, _ = corpora.load(args.data)
    source = RowSource(training, Tokenizer(args.tokenizer), Mix(), args.seed)
    batches = Batches(
        replies.read(args.replies), source, args.step_tokens,
        prompts=args.prompts, mix=args.mix, seed=args.seed,
    )  # fmt: skip
    held_out = replies.read(args.held_out) if args.held_out else []
    teacher = Teacher(load_decoder(args.teacher), args.device, args.bf16)
    shape = Shape(**{size: getattr(args, size) for size in SIZES})
    run = start(shape, schedule, args.device)
    restore(run, out, resume=args.resume)
    run.decay_from = round(args.steps * (1 - args.decay_share))
    loss_of = Loss(run.model, teacher.embedding, args.hard)
    compiled = torch.compile(loss_of, dynamic=True) if args.compile else loss_of
    log(out, {"start": run.step, "shape": asdict(shape), "schedule": asdict(schedule),
              "parameters": sum(p.numel() for p in run.model.parameters()),
              "batches": len(batches.batches), "hard": args.hard, "mix": args.mix,
              "asked": sum(len(b.asked) for b in batches.batches)})  # fmt: skip

    since, losses, tokens_then = time.perf_counter(), [], run.tokens
    while run.step < args.steps:
        index = batches.index(run.step)
        batch = batches.batches[index]
        inputs = (
            torch.from_numpy(batch.tokens).to(args.device),
            torch.from_numpy(batch.asked).to(args.device),
            teacher.states(index, batch),
        )
        losses.append(train_step(run, compiled, inputs, schedule, args.bf16))
        run.tokens += batch.tokens.size
        if run.step % 50 == 0:
            speed = (run.tokens - tokens_then) / (time.perf_counter() - since)
            log(out, {"step": run.step, "tokens": run.tokens, "tokens_per_s": round(speed),
                      "lr": round(schedule.factor(run.step, 0, run.decay_from), 3),
                      "loss": round(sum(losses) / len(losses), 4)})  # fmt: skip
            since, losses, tokens_then = time.perf_counter(), [], run.tokens
        if run.step % args.save_every == 0 or run.step == args.steps:
            run.save(out / CHECKPOINT)
            if held_out:
                figures = held_out_figures(run.model, held_out)
                log(out, {"step": run.step, "held_out": figures})
            since = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Distil a target into a draft model.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--replies", type=Path, required=True, help="the file from `replies`")
    parser.add_argument("--held-out", type=Path, help="replies for evaluation during training")
    parser.add_argument("--teacher", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoint and log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", action="store_true", help="resume the checkpoint in --out")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a compiler")
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    for size in SIZES:
        parser.add_argument(f"--{size}", type=int, default=getattr(SHAPE, size))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--step-tokens", type=int, default=4096, help="a multiple of 512")
    parser.add_argument("--decay-share", type=float, default=0.4, help="share of the steps")
    parser.add_argument("--muon-lr", type=float, default=0.0075)
    parser.add_argument("--adam-lr", type=float, default=0.005)
    parser.add_argument("--mix", type=float, default=0.25, help="share of batches from the mix")
    parser.add_argument("--prompts", type=float, default=0.2, help="share of prompt positions")
    parser.add_argument("--hard", type=float, default=0.0, help="weight of cross-entropy on argmax")
    parser.add_argument("--save-every", type=int, default=500, help="steps")
    distil(parser.parse_args())


if __name__ == "__main__":
    main()
