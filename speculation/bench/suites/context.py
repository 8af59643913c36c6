"""Speed over context length: plain decoding, prompt lookup, and the time of the lookup itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from speculation.bench.prompt_file import BUILTIN, Prompt, read_prompts
from speculation.bench.results import Results
from speculation.bench.run import Plan
from speculation.bench.suites.suite import Suite
from speculation.bench.summary import ALL, Row, summarise
from speculation.bench.table import Table
from speculation.drafter import BASELINE
from speculation.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)  # tokens, including the generated ones
LOOKUP = "prompt-lookup"


class ContextLength(Suite):
    """Continues texts of 1k to 32k tokens, as far as they fit the context, as plain text."""

    name = "context"
    title = "speed and lookup time from 1k to 32k tokens of context"
    methods = (BASELINE, LOOKUP)
    defaults = {"n_predict": 64, "raw": True}  # noqa: RUF012
    own_prompts = True

    def prompts(self, given: Sequence[Prompt], engine: Engine, plan: Plan) -> list[Prompt]:
        fitting = [n for n in LENGTHS if n <= engine.context.n_ctx] or [engine.context.n_ctx]
        text = "\n\n".join(turn for prompt in read_prompts(BUILTIN) for turn in prompt.turns)
        return [
            Prompt(length_name(n), length_name(n), (_cut(engine, text, n - plan.n_predict),))
            for n in fitting
            if n > plan.n_predict
        ]

    def notes(self, engine: Engine, plan: Plan) -> list[str]:
        n_ctx = engine.context.n_ctx
        notes = [
            "the texts repeat the built-in prompts: the times are meaningful, the acceptance is "
            "not that of real text"
        ]
        if n_ctx < LENGTHS[-1]:
            notes.append(
                f"the context has {n_ctx} tokens, so longer texts are left out; give --ctx "
                f"{LENGTHS[-1]} for all"
            )
        return notes

    def tables(self, results: Results) -> list[Table]:
        rows = [
            [
                plain.category,
                f"{prompt_length(results, plain.category)}",
                f"{plain.tokens_per_second:.1f}",
                f"{lookup.tokens_per_second:.1f}",
                f"{lookup.speed_up_overall:.2f}",
                f"{lookup.tokens_per_step:.2f}",
                f"{1e3 * plain.phase_seconds['decode']:.3f}",
                f"{1e6 * lookup.phase_seconds['draft']:.1f}",
                f"{plain.prefill_seconds:.3f}",
                f"{lookup.prefill_seconds:.3f}",
            ]
            for plain, lookup in by_length(results)
        ]
        headings = [
            *("context", "prompt", "plain tok/s", "lookup tok/s", "speed-up", "tokens/step"),
            *("plain decode ms", "lookup µs/step", "plain prefill s", "lookup prefill s"),
        ]
        note = (
            "plain decode: one row; lookup: indexing, matching and drafting in a step; the prefill "
            "of prompt\nlookup includes indexing the prompt"
        )
        return [Table("speed over context length", headings, rows, note)]

    def figures(self, results: Results) -> list[tuple[str, str, Figure]]:
        from speculation.bench.plots import colours, subplots

        pairs = by_length(results)
        tokens = [prompt_length(results, plain.category) for plain, _ in pairs]
        colour = colours([BASELINE, LOOKUP])
        figure, axes = subplots(n_columns=2, height=3.2)
        left, right = axes[0]
        for i, name in enumerate((BASELINE, LOOKUP)):
            rates = [pair[i].tokens_per_second for pair in pairs]
            left.plot(tokens, rates, marker="o", color=colour[name], label=name)
        right.plot(
            tokens,
            [1e6 * lookup.phase_seconds["draft"] for _, lookup in pairs],
            marker="o",
            color=colour[LOOKUP],
        )
        left.set_ylabel("tokens per second")
        right.set_ylabel("lookup, µs per step")
        left.legend()
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_xticks(tokens, [plain.category for plain, _ in pairs])
            ax.minorticks_off()
            ax.set_xlabel("tokens of context")
            ax.set_ylim(bottom=0)
        caption = (
            "Left: speed over context length. Right: time per step that prompt lookup spends on "
            "matching and drafting, without the decode."
        )
        return [("context", caption, figure)]


def by_length(results: Results) -> list[tuple[Row, Row]]:
    """Rows of plain decoding and prompt lookup for each length, shortest first."""
    rows = [row for row in summarise(results.runs) if row.category != ALL]
    plain = [row for row in rows if row.method == BASELINE]
    lookup = {row.category: row for row in rows if row.method == LOOKUP}
    return [(row, lookup[row.category]) for row in plain]


def prompt_length(results: Results, category: str) -> int:
    """Tokens of the category's prompt."""
    return next(run.n_prompt for run in results.runs if run.category == category)


def length_name(n_tokens: int) -> str:
    """``4k`` for 4096 tokens; the number itself if it is not a multiple of 1024."""
    return f"{n_tokens // 1024}k" if n_tokens % 1024 == 0 else str(n_tokens)


def _cut(engine: Engine, text: str, n_tokens: int) -> str:
    """``text``, repeated as needed and truncated to at most ``n_tokens`` tokens."""
    model = engine.model
    once = model.tokenize(text + "\n\n")
    tokens = (once * (n_tokens // len(once) + 1))[:n_tokens]
    while True:
        cut = model.detokenize(tokens).decode("utf-8", "ignore")
        over = len(model.tokenize(cut)) - n_tokens  # a cut can tokenize to more tokens
        if over <= 0:
            return cut
        tokens = tokens[:-over]
