"""Runs everything that a GPU may change, and writes one report.

    sh tools/cuda_report OUT --model a.gguf b.gguf --draft-model small.gguf

For each model and each share of its layers on the GPU: all methods of the benchmark that can run,
with their speed-up, whether each text equals plain decoding's, the largest logit gap where one does
not, and the bytes that a step copies from the device: a token for every row, or its
logits for a method that reads them. Then several clients at a time.
Without a model of the wanted size, ``--enlarge WIDTHxLAYERS`` makes one of the bundled model's
texts and a larger one's cost. What fails is in the report with its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from batching.llama.model import Model
from speculation.methods import METHODS

BUNDLED = Path("models/speculation-14m-q8_0.gguf")
DRAFT = Path("models/speculation-draft-1m-q8_0.gguf")
HEADS = [
    Path(f"models/speculation-14m-{name}.gguf")
    for name in ("eagle", "eagle3", "medusa", "redrafter")
]
NEVER = ("prediction", "mtp", "dflash")  # no prediction is given, and no such heads
READS_LOGITS = ("auto", "recycling")
_HEADER = (
    "| method | tokens/s | speed-up | tokens/step | rows/step | copied, KB/step | differ "
    "| largest gap |\n|---|---|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_report", description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="folder for the report and its data")
    add("--model", nargs="*", type=Path, default=[], help="GGUF files, besides the bundled model")
    add("--draft-model", type=Path, help="for the models above")
    add("--enlarge", nargs="*", default=[], metavar="WIDTHxLAYERS", help="make larger models")
    add("--layers", nargs="+", default=["all", "half", "none"], help="shares on the GPU")
    add("--methods", nargs="+", help="(all that can run)")
    add("--prompts", default="builtin")
    add("--limit", type=int, default=2)
    add("--n-predict", type=int, default=128)
    add("--bench", nargs="*", default=[], metavar="FLAG", help="as --bench=--flash-attn=off")
    add("--clients", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    add("--rounds", type=int, default=8, help="of the clients, at most")
    add("--llama-server", type=Path)
    flags = parser.parse_args(arguments)
    flags.out.mkdir(parents=True, exist_ok=True)
    report = flags.out / "report.md"
    with report.open("w", encoding="utf-8") as file:
        for line in _report(flags):
            print(line, flush=True)
            print(line, file=file, flush=True)
    return 0


def _report(flags: argparse.Namespace) -> Iterator[str]:
    yield "# Report\n\n```"
    yield _run([sys.executable, "-m", "app.cli", "devices"])[0].strip()
    yield "```"
    todo: list[tuple[Path, Path | None, list[Path]]] = [(BUNDLED, DRAFT, HEADS)]
    todo += [(model, flags.draft_model, []) for model in flags.model]
    for size in flags.enlarge:
        width, _, layers = size.partition("x")
        path = flags.out / f"enlarged-{size}.gguf"
        shape = ["--width", width, "--layers", layers, "--type", "q8_0", "--out", str(path)]
        output, failed = _run([sys.executable, "-m", "tools.upscale", *shape])
        if failed:
            yield f"\n{path.name}: not made\n\n```\n{output}\n```"
        else:
            todo.append((path, DRAFT, []))
    for model, draft, heads in todo:
        with Model(model) as loaded:
            n_layer, n_vocab = loaded.n_layer, loaded.n_vocab
            yield f"\n## {model.name}: {loaded.description}"
        for share in flags.layers:
            n = {"all": n_layer + 1, "half": n_layer // 2, "none": 0}[share]
            yield f"\n### {share} layers on the GPU\n"
            yield from _methods(flags, model, draft, heads, n, n_vocab)
        if flags.clients:
            yield "\n### Several clients\n\n```"
            command = [sys.executable, "-m", "tools.clients", str(model)]
            command += ["--clients", *map(str, flags.clients)]
            command += ["--rounds", str(flags.rounds), "--n-predict", str(flags.n_predict)]
            if draft is not None:
                command += ["--draft-model", str(draft)]
            if flags.llama_server is not None:
                command += ["--llama-server", str(flags.llama_server)]
            yield _run(command)[0].strip() + "\n```"


def _methods(
    flags: argparse.Namespace,
    model: Path,
    draft: Path | None,
    heads: Sequence[Path],
    n_gpu_layers: int,
    n_vocab: int,
) -> Iterator[str]:
    data = flags.out / f"{model.stem}-{n_gpu_layers}.json"
    data.unlink(missing_ok=True)
    command = [sys.executable, "-m", "speculation.bench", "--model", str(model)]
    command += ["--gpu-layers", str(n_gpu_layers), "--json", str(data)]
    command += ["--prompts", flags.prompts, "--limit", str(flags.limit)]
    command += ["--n-predict", str(flags.n_predict), *flags.bench]
    if draft is not None:
        command += ["--draft-model", str(draft)]
    if heads:
        command += ["--heads", *map(str, heads)]
    command += ["--methods", *(flags.methods or _possible(draft, heads))]
    output, failed = _run(command)
    if data.exists():
        found = json.loads(data.read_text(encoding="utf-8"))
        placed = ", ".join(found["settings"]["placed_on"]) or "the CPU"
        yield f"On {placed}; flash attention {found['settings']['flash_attn']}.\n"
        yield _HEADER
        for row in found["summary"]:
            if row["category"] == "all":
                reads_logits = row["method"].partition(":")[0] in READS_LOGITS
                yield _line(row, found["runs"], 4 * (n_vocab if reads_logits else 1))
    if failed:
        yield f"\n```\n{output[-2000:]}\n```"


def _possible(draft: Path | None, heads: Sequence[Path]) -> list[str]:
    """The methods for which everything is there."""
    left_out = NEVER if draft is not None else (*NEVER, "draft")
    return [
        name for name, spec in METHODS.items() if name not in left_out and (heads or not spec.heads)
    ]


def _line(row: dict[str, Any], runs: Sequence[dict[str, Any]], n_bytes: int) -> str:
    """``n_bytes``: what the device copies for a row."""
    own = [run for run in runs if run["method"] == row["method"]]
    n_rows = sum(run["n_rows"] for run in own) / sum(run["n_steps"] for run in own)
    differences = [run["first_difference"] for run in own if run["first_difference"] is not None]
    gaps = [one["logit_gap"] for one in differences if one.get("logit_gap") is not None]
    return (
        f"| `{row['method']}` | {row['tokens_per_second']:.1f} | {row['speed_up_overall']:.2f} "
        f"| {row['tokens_per_step']:.2f} | {n_rows:.1f} | {n_rows * n_bytes / 1000:,.2f} "
        f"| {row['n_different']} of {row['n_runs']} | {f'{max(gaps):.4f}' if gaps else ''} |"
    )


def _run(command: Sequence[str]) -> tuple[str, bool]:
    """What a program prints, and whether it failed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        return f"exit code {done.returncode}\n{done.stderr[-2000:]}", True
    return done.stdout, False


if __name__ == "__main__":
    sys.exit(main())
