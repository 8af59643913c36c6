"""``python -m tools.replay record`` and ``play``; see docs/measure.md."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from batching.llama.context import ContextParams
from speculation.bench.prompt_file import BUILTIN, read_prompts, select_prompts
from speculation.drafter import BASELINE
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from speculation.system.console import run_command
from tools.replay import recording
from tools.replay.play import Replay, Result, scaled
from tools.replay.record import record
from tools.replay.together import run_together


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run_command(lambda: options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=__doc__)
    commands = parser.add_subparsers(required=True)
    to_record = commands.add_parser("record", help="record a model's replies")
    to_record.set_defaults(run=_record)
    to_record.add_argument("--model", help="a GGUF or a name in models.txt")
    to_record.add_argument("--draft-model", help="whose chains are recorded, too")
    to_record.add_argument("--prompts", nargs="+", default=[BUILTIN], help="files of prompts")
    to_record.add_argument("--limit", type=int, help="prompts of each category and file")
    to_record.add_argument("--n-predict", type=int, default=128, help="most tokens of a reply")
    to_record.add_argument("--raw", action="store_true", help="use no chat template")
    to_record.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    to_record.add_argument("--ctx", type=int, default=0, help="context in tokens; 0 = the model's")
    to_record.add_argument("--threads", type=int, help="threads of llama.cpp")
    to_record.add_argument("--out", type=Path, required=True, help="the recording to write")
    to_play = commands.add_parser("play", help="play recordings under some methods and costs")
    to_play.set_defaults(run=_play)
    to_play.add_argument("recordings", nargs="+", type=Path)
    to_play.add_argument("--methods", nargs="+", default=["auto", "prompt-lookup"])
    to_play.add_argument(
        "--costs",
        nargs="+",
        default=["own"],
        help="own, a factor of it such as 8x, another recording, FILE.json, or STEP:ROW in ms",
    )
    to_play.add_argument("--draft-seconds", type=float, help="time of a draft model's decode")
    to_play.add_argument("--noise", type=float, default=0.0, help="relative, of a decode's time")
    to_play.add_argument("--hiccups", type=float, default=0.0, help="share of decodes 4x as slow")
    to_play.add_argument("--first", type=int, help="only the first texts of each recording")
    to_play.add_argument(
        "--together",
        type=int,
        nargs="+",
        metavar="N",
        help="play N texts at a time and show tokens/s of all of them",
    )
    return parser


def _record(options: argparse.Namespace) -> None:
    params = ContextParams(n_ctx=options.ctx, n_threads=options.threads)
    prompts = [
        prompt
        for source in options.prompts
        for prompt in select_prompts(read_prompts(source), None, options.limit)
    ]
    with Engine.load(options.model, params, draft_model=options.draft_model) as engine:
        header, texts = record(
            engine,
            prompts,
            options.n_predict,
            sampling=SamplingParams(temperature=options.temperature, seed=1),
            raw=options.raw,
            on_text=lambda text: print(f"{text.id}: {len(text.reply)} tokens", file=sys.stderr),
        )
    recording.write(options.out, header, texts)


def _play(options: argparse.Namespace) -> None:
    for path in options.recordings:
        header, texts = recording.read(path)
        for name in options.costs:
            replay = Replay(
                header,
                lambda name=name, header=header: _cost(name, header),  # type: ignore[misc]
                draft_seconds=options.draft_seconds,
                noise=options.noise,
                hiccups=options.hiccups,
            )
            chosen = texts[: options.first]
            if options.together:
                print(f"\n{path.name}, cost {name}, {len(chosen)} texts")
                print(table_together(replay, mixed(chosen), options.methods, options.together))
                continue
            plain = replay.run(BASELINE, chosen)
            print(f"\n{path.name}, cost {name}, {len(chosen)} texts")
            results = {method: replay.run(method, chosen) for method in options.methods}
            print(table(plain, results))


def _cost(name: str, header: recording.Header) -> Cost:
    if name == "own":
        return scaled(header.cost, 1.0)
    if name.endswith("x"):
        return scaled(header.cost, float(name[:-1]))
    if ":" in name:
        root, row = (float(part) / 1000 for part in name.split(":"))
        return Cost(CostCurve.linear(root, row))
    if name.endswith(".json"):
        return scaled(json.loads(Path(name).read_text(encoding="utf-8")), 1.0)
    other, _ = recording.read(Path(name))
    return scaled(other.cost, 1.0)


def table(plain: Sequence[Result], results: dict[str, list[Result]]) -> str:
    """Speed over plain decoding by category: by seconds, and the mean of texts in brackets."""
    categories = dict.fromkeys(result.text.category for result in plain)
    lines = [f"{'':16}" + "".join(f"{method[:22]:>24}" for method in results)]
    for category in [*categories, "all", "lowest"]:
        line = f"{category:16}"
        for played in results.values():
            if category == "lowest":
                by_kind = [_speed_up(plain, played, kind)[0] for kind in categories]
                line += f"{min(by_kind):>9.3f}" + " " * 15
            else:
                by_seconds, mean, per_step = _speed_up(plain, played, category)
                line += f"{by_seconds:>9.3f} ({mean:.3f}) {per_step:5.2f}"
        lines.append(line)
    return "\n".join(lines)


def mixed(texts: Sequence[recording.Recorded]) -> Sequence[recording.Recorded]:
    """The texts in another order, always the same. In a recording, texts of a kind stand together,
    but clients that ask at the same time want different things."""
    return random.Random(1).sample(texts, len(texts))


def table_together(
    replay: Replay,
    texts: Sequence[recording.Recorded],
    methods: Sequence[str],
    counts: Sequence[int],
) -> str:
    """Tokens/s of all texts, the ratio to plain decoding in brackets, and rows per step."""
    lines = [f"{'texts':>6}{BASELINE:>12}" + "".join(f"{method[:24]:>26}" for method in methods)]
    for n in counts:
        plain = run_together(replay, BASELINE, texts, n)
        base = plain.n_tokens / plain.seconds
        line = f"{n:>6}{base:>12.1f}"
        for method in methods:
            played = run_together(replay, method, texts, n)
            speed = played.n_tokens / played.seconds
            line += f"{speed:>11.1f} ({speed / base:.2f}) {played.n_rows / played.n_steps:6.1f}"
        lines.append(line)
    return "\n".join(lines)


def _speed_up(
    plain: Sequence[Result], played: Sequence[Result], category: str
) -> tuple[float, float, float]:
    pairs = [
        (a, b)
        for a, b in zip(plain, played, strict=True)
        if category in (a.text.category, "all") and a.n_tokens > 0
    ]
    if not pairs:
        return 1.0, 1.0, 1.0
    rates = [_rate(b) / _rate(a) for a, b in pairs if b.seconds]
    by_seconds = (sum(b.n_tokens for _, b in pairs) / sum(b.seconds for _, b in pairs)) / (
        sum(a.n_tokens for a, _ in pairs) / sum(a.seconds for a, _ in pairs)
    )
    steps = sum(b.stats.n_steps - 1 for _, b in pairs)
    return by_seconds, fmean(rates or [1.0]), sum(b.n_tokens for _, b in pairs) / max(1, steps)


def _rate(result: Result) -> float:
    return result.n_tokens / result.seconds if result.seconds else 0.0


if __name__ == "__main__":
    sys.exit(main())
