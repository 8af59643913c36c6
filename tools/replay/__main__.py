"""``python -m tools.replay record`` and ``play``; see docs/measure.md."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from batching.llama.context import ContextParams
from speculation.bench.prompt_file import BUILTIN, read_prompts, select_prompts
from speculation.bench.results import Run
from speculation.bench.summary import Row, summarise
from speculation.drafter import BASELINE
from speculation.drafting.cost import Cost, CostCurve
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from speculation.system.console import run_command
from tools.replay import recording
from tools.replay.play import Replay, scaled

COSTS = "own, a factor of it such as 8x, another recording, FILE.json, or STEP:ROW in ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=__doc__)
    commands = parser.add_subparsers(required=True)
    to_record = commands.add_parser("record", help="record a model's replies")
    to_record.set_defaults(run=_record)
    add = to_record.add_argument
    add("--model", help="a GGUF or a name in models.txt")
    add("--draft-model", help="whose chains are recorded, too")
    add("--prompts", nargs="+", default=[BUILTIN], help="files of prompts")
    add("--limit", type=int, help="prompts of each category and file")
    add("--n-predict", type=int, default=128, help="most tokens of a reply")
    add("--raw", action="store_true", help="use no chat template")
    add("--temperature", type=float, default=0.0, help="0 = greedy")
    add("--ctx", type=int, default=0, help="context in tokens; 0 = the model's")
    add("--threads", type=int, help="threads of llama.cpp")
    add("--out", type=Path, required=True, help="the recording to write")
    to_play = commands.add_parser("play", help="play recordings under some methods and costs")
    to_play.set_defaults(run=_play)
    add = to_play.add_argument
    add("recordings", nargs="+", type=Path)
    add("--methods", nargs="+", default=["auto", "prompt-lookup"])
    add("--costs", nargs="+", default=["own"], help=COSTS)
    add("--draft-seconds", type=float, help="time of a draft model's decode")
    add("--noise", type=float, default=0.0, help="relative, of a decode's time")
    add("--hiccups", type=float, default=0.0, help="share of decodes 4x as slow")
    add("--first", type=int, help="only the first texts of each recording")
    add("--together", type=int, nargs="+", metavar="N", help="N texts at a time: tokens/s of all")
    options = parser.parse_args(argv)
    return run_command(lambda: options.run(options))


def _record(options: argparse.Namespace) -> None:
    params = ContextParams(n_ctx=options.ctx, n_threads=options.threads)
    prompts = [
        prompt
        for source in options.prompts
        for prompt in select_prompts(read_prompts(source), None, options.limit)
    ]
    with Engine.load(options.model, params, draft_model=options.draft_model) as engine:
        sampling = SamplingParams(temperature=options.temperature, seed=1)
        header, texts = recording.record(
            engine, prompts, options.n_predict, sampling, raw=options.raw
        )
    recording.write(options.out, header, texts)


def _play(options: argparse.Namespace) -> None:
    for path in options.recordings:
        header, texts = recording.read(path)
        chosen = texts[: options.first]
        for name in options.costs:
            replay = Replay(
                header,
                lambda name=name, header=header: _cost(name, header),  # type: ignore[misc]
                options.draft_seconds,
                options.noise,
                options.hiccups,
            )
            print(f"\n{path.name}, cost {name}, {len(chosen)} texts")
            if options.together:
                print(table_together(replay, chosen, options.methods, options.together))
            else:
                played = dict.fromkeys((BASELINE, *options.methods))
                runs = [run for method in played for run in replay.run(method, chosen)[0]]
                print(table(runs, options.methods))


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
    return scaled(recording.read(Path(name))[0].cost, 1.0)


def table(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """Speed over plain decoding by category: by seconds, and the mean of texts in brackets."""
    rows = {(row.category, row.method): row for row in summarise(runs)}
    categories = dict.fromkeys(category for category, _ in rows)
    lines = [f"{'':16}" + "".join(f"{method[:22]:>24}" for method in methods)]
    for category in categories:
        own = [rows[category, method] for method in methods]
        lines.append(f"{category:16}" + "".join(map(_cell, own)))
    lowest = [min(rows[one, method].speed_up_overall for one in categories) for method in methods]
    lines.append(f"{'lowest':16}" + "".join(f"{speed:>9.3f}{'':15}" for speed in lowest))
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row.speed_up_overall:>9.3f} ({row.speed_up_mean:.3f}) {row.tokens_per_step:5.2f}"


def table_together(
    replay: Replay,
    texts: Sequence[recording.Recorded],
    methods: Sequence[str],
    counts: Sequence[int],
) -> str:
    """Tokens/s of all texts, the ratio to plain decoding in brackets, and rows per step.

    Texts are in another order, always the same: in a recording, texts of a kind stand together, but
    clients that ask at the same time want different things.
    """
    mixed = random.Random(1).sample(texts, len(texts))

    def speed(method: str, n: int) -> tuple[float, float]:
        runs, machine = replay.run(method, mixed, n)
        n_tokens = sum(run.stats.n_tokens for run in runs)
        return n_tokens / machine.now, machine.n_rows / machine.n_steps

    lines = [f"{'texts':>6}{BASELINE:>12}" + "".join(f"{method[:24]:>26}" for method in methods)]
    for n in counts:
        base, _ = speed(BASELINE, n)
        line = f"{n:>6}{base:>12.1f}"
        for method in methods:
            own, rows = speed(method, n)
            line += f"{own:>11.1f} ({own / base:.2f}) {rows:6.1f}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
