"""Training: learning-rate warm-up, a constant rate, and a linear decay that starts on request.

A run depends on its step number alone: batches are drawn from (seed, step), schedules count steps.
It can be stopped at any time and resumes from its last checkpoint, even with another mix. The decay
starts at `--decay-at`, or as soon as a file named `decay` appears in `--out`.

    python -m tools.recipe.train --data DIR --out DIR [--device cuda] [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.recipe import circuit
from tools.recipe import corpus as corpora
from tools.recipe.measure import Measure
from tools.recipe.model import Decoder, Shape
from tools.recipe.muon import Muon
from tools.recipe.rows import Mix, RowSource
from tools.recipe.tokenizer import FILE_NAME, Tokenizer

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Schedule:
    """Row lengths and learning rates by step."""

    step_tokens: int = 8192
    short_steps: int = 150  # initial steps with rows of 256 tokens
    warmup: int = 40
    decay_share: float = 0.2  # share of the whole run
    muon_lr: float = 0.015
    adam_lr: float = 0.005

    def time(self, step: int) -> int:
        """Tokens per row: 512; in a tenth of the steps 1024 or 2048."""
        if step < self.short_steps:
            return 256
        return {7: 2048, 17: 1024}.get(step % 20, 512)

    def end(self, warm_from: int, decay_from: int) -> int:
        """The step at which a run ends, given the steps where warm-up and decay started."""
        level = decay_from - warm_from
        return decay_from + round(level * self.decay_share / (1 - self.decay_share))

    def factor(self, step: int, warm_from: int, decay_from: int | None) -> float:
        """The factor on both learning rates."""
        warm = min(1.0, (step - warm_from + 1) / self.warmup)
        if decay_from is None or step < decay_from:
            return warm
        end = self.end(warm_from, decay_from)
        return warm * max(0.0, 1 - (step - decay_from) / (end - decay_from))


@dataclass
class Run:
    """The training state, as saved in a checkpoint."""

    model: Decoder
    muon: Muon
    adam: torch.optim.AdamW
    step: int = 0
    tokens: int = 0
    warm_from: int = 0
    decay_from: int | None = None

    def save(self, path: Path) -> None:
        """Write atomically, so that a run killed here keeps its last checkpoint."""
        state = {
            "shape": asdict(self.model.shape),
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "warm_from": self.warm_from,
            "decay_from": self.decay_from,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.warm_from, self.decay_from = state.get("warm_from", 0), state["decay_from"]

    def extend(self) -> None:
        """Continue a finished run, with a new warm-up from here and another decay later."""
        self.warm_from, self.decay_from = self.step, None


def restore(
    run: Run, out: Path, *, resume: bool, extend: bool = False, decay_at: int | None = None
) -> None:
    """Load the checkpoint in `out` into `run` if `resume` or `extend` is set.

    Raises ValueError if an existing checkpoint would be overwritten, or the decay would never
    start.
    """
    checkpoint = out / CHECKPOINT
    if resume or extend:
        run.load(checkpoint)
    elif checkpoint.exists():
        raise ValueError(
            f"{checkpoint} would be overwritten; add --resume to continue it, or give another --out"
        )
    if extend:
        run.extend()
        (out / "decay").unlink(missing_ok=True)  # left over from the previous run
    if run.decay_from is None and decay_at is not None and decay_at < run.step:
        raise ValueError(
            f"--decay-at is {decay_at}, but the run is at step {run.step}; give that or a later one"
        )


def start(shape: Shape, schedule: Schedule, device: str) -> Run:
    """A fresh model with its two optimizers: Muon for the blocks' matrices, AdamW for the rest."""
    model = Decoder(shape)
    circuit.plant(model)
    model.to(device)
    stacked = {"qkv": 3, "gate_up": 2}
    matrices: list[tuple[Tensor, int]] = []
    rest: list[Tensor] = []
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and name.startswith("blocks"):
            matrices.append((weight, stacked.get(name.split(".")[-2], 1)))
        else:
            rest.append(weight)
    muon = Muon(matrices, lr=schedule.muon_lr, weight_decay=0.01)
    adam = torch.optim.AdamW(rest, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return Run(model, muon, adam)


def train_step(
    run: Run, loss_of: Any, inputs: Sequence[Tensor], schedule: Schedule, bf16: bool
) -> float:
    """One step of both optimizers on `loss_of(*inputs)`; returns the loss.

    With `bf16`, matrices are multiplied in bfloat16; the weights stay in float32.
    """
    factor = schedule.factor(run.step, run.warm_from, run.decay_from)
    for group in run.muon.param_groups:
        group["lr"] = schedule.muon_lr * factor
    for group in run.adam.param_groups:
        group["lr"] = schedule.adam_lr * factor
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=bf16):
        loss = loss_of(*inputs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.adam.param_groups[0]["params"], 1.0)
    run.muon.step()
    run.adam.step()
    run.model.zero_grad(set_to_none=True)
    run.step += 1
    return float(loss.detach())


def log(out: Path, entry: dict[str, object]) -> None:
    line = json.dumps(entry)
    print(line, flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(line + "\n")


def train(args: argparse.Namespace) -> None:
    out: Path = args.out
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    schedule = Schedule(
        step_tokens=args.step_tokens,
        short_steps=args.short_steps,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        decay_share=args.decay_share,
    )
    tokenizer = Tokenizer(out / FILE_NAME)
    training, held_out = corpora.load(args.data)
    mix = Mix(copies=args.copies, prose=args.prose, dialogues=args.dialogues, asked=args.asked)
    source, measure = RowSource(training, tokenizer, mix, args.seed), Measure(held_out, tokenizer)
    shape = Shape(vocab=tokenizer.model.vocab_size(), layers=args.layers)
    run = start(shape, schedule, args.device)
    restore(run, out, resume=args.resume, extend=args.extend, decay_at=args.decay_at)
    loss_of = torch.compile(run.model.loss, dynamic=False) if args.compile else run.model.loss
    log(out, {"start": run.step, "bf16": args.bf16, "shape": asdict(shape), "mix": asdict(mix),
              "schedule": asdict(schedule)})  # fmt: skip

    since, losses = time.perf_counter(), []
    while run.decay_from is None or run.step < schedule.end(run.warm_from, run.decay_from):
        if run.decay_from is None and (run.step == args.decay_at or (out / "decay").exists()):
            run.decay_from = run.step
            log(out, {"decay_from": run.step, "end": schedule.end(run.warm_from, run.step)})
        length = schedule.time(run.step)
        batch = source.batch(run.step, schedule.step_tokens // length, length)
        tokens = torch.from_numpy(batch.tokens).to(args.device)
        weights = torch.from_numpy(batch.weights).to(args.device)
        losses.append(train_step(run, loss_of, (tokens, weights), schedule, args.bf16))
        run.tokens += weights.numel()
        if run.step % 10 == 0:
            speed = len(losses) * schedule.step_tokens / (time.perf_counter() - since)
            log(out, {"step": run.step, "tokens": run.tokens, "tokens_per_s": round(speed),
                      "lr": round(schedule.factor(run.step, run.warm_from, run.decay_from), 3),
                      "loss": round(sum(losses) / len(losses), 4)})  # fmt: skip
            since, losses = time.perf_counter(), []
        if run.step % args.measure_every == 0:
            log(out, {"step": run.step, "tokens": run.tokens, **measure.report(run.model)})
            since = time.perf_counter()
        if run.step % args.save_every == 0:
            run.save(out / CHECKPOINT)
    run.save(out / CHECKPOINT)
    log(out, {"step": run.step, "tokens": run.tokens, "done": True, **measure.report(run.model)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--out", type=Path, required=True, help="folder of tokenizer and results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--resume", action="store_true", help="resume the checkpoint in --out")
    parser.add_argument("--extend", action="store_true", help="continue training a finished run")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a compiler")
    parser.add_argument("--bf16", action="store_true", help="multiply matrices in bfloat16")
    parser.add_argument("--decay-at", type=int, help="step; or create a file `decay` in --out")
    parser.add_argument("--decay-share", type=float, default=0.2, help="share of the whole run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=8192, help="a multiple of 2048")
    parser.add_argument("--short-steps", type=int, default=150, help="steps with rows of 256")
    parser.add_argument("--muon-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=0.005)
    parser.add_argument("--copies", type=float, default=0.2, help="share of rows")
    parser.add_argument("--prose", type=float, default=0.14, help="share of rows")
    parser.add_argument("--dialogues", type=float, default=0.13, help="share of rows")
    parser.add_argument("--asked", type=float, default=1.0, help="loss weight of prompt tokens")
    parser.add_argument("--measure-every", type=int, default=50, help="steps")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
