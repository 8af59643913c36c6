"""Generates chats from the exercises with replies by the target itself.

A draft model continues the target's own text, not the correct answers, so `distil` trains on these
chats and `agreement` measures on them. Half of the chats are greedy, half are sampled. Chat i
depends only on (seed, i) and the GGUF, and is one line of the file, so a stopped run can resume.

    python -m tools.recipe.replies --data DIR --tokenizer DIR/tokenizer.model \\
        --gguf target.gguf --out DIR/replies.jsonl --chats 9000
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from batching.llama.context import ContextParams
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from tools.recipe import corpus as corpora
from tools.recipe import tasks, wishes
from tools.recipe.corpus import Corpus
from tools.recipe.rows import Mix, RowSource
from tools.recipe.tokenizer import BOS, END, ROLES, Tokenizer

METHOD = "prompt-lookup"  # lossless, so the text is plain decoding's
PROSE = "prose"  # not a chat: the target continues the beginning of a paragraph
WISH = "wish"  # a question unlike any exercise
KINDS: dict[str, float] = {
    **{name: weight for name, (weight, _) in tasks.TASKS.items()},
    "dialogue": 20.0,
    PROSE: 8.0,
    WISH: 80.0,
}


@dataclass(frozen=True)
class Limits:
    """Maximum lengths in tokens and turns, and the sampling temperature."""

    reply: int = 160
    chat: int = 768
    turns: int = 4
    temperature: float = 0.8  # of the sampled chats


@dataclass(frozen=True)
class RepliedChat:
    """A chat with the target's replies.

    ids    the whole chat, starting with BOS
    spans  (start, end) of each reply, including its END
    """

    kind: str
    temperature: float
    ids: list[int]
    spans: list[tuple[int, int]]


class Writer:
    """Draws chats from a corpus and generates the target's replies.

    With `even`, kinds alternate, for evaluation; otherwise they are drawn by weight.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, engine: Engine, limits: Limits, *,
        seed: int, even: bool,
    ) -> None:  # fmt: skip
        self.source = RowSource(corpus, tokenizer, Mix(), seed)
        self.tokenizer, self.engine, self.limits = tokenizer, engine, limits
        self.seed, self.even = seed, even

    def chat(self, index: int) -> RepliedChat:
        """Chat number `index`."""
        draw = tasks.Draw(self.source.corpus, random.Random(f"replies/{self.seed}/{index}"))
        kinds = list(KINDS)
        if self.even:
            kind, greedy = kinds[index % len(kinds)], index // len(kinds) % 2 == 0
        else:
            kind = draw.rng.choices(kinds, list(KINDS.values()))[0]
            greedy = draw.chance(0.5)
        sampling = SamplingParams(
            temperature=0.0 if greedy else self.limits.temperature, seed=index
        )
        ids = [BOS]
        spans: list[tuple[int, int]] = []
        for prompt in self._prompts(draw, kind):
            if len(ids) + len(prompt) + self.limits.reply > self.limits.chat:
                break
            ids += prompt
            reply = self._reply(ids, sampling)
            spans.append((len(ids), len(ids) + len(reply)))
            ids += reply
            if ids[-1] != END:  # truncated
                ids.append(END)
        if not spans:  # the first message alone exceeds the limit
            return self.chat(index + 1_000_000)
        return RepliedChat(kind, sampling.temperature, ids, spans)

    def _prompts(self, draw: tasks.Draw, kind: str) -> Iterator[list[int]]:
        """The tokens before each reply, up to where the target continues."""
        if kind == PROSE:
            yield self.source.prose(draw, draw.rng.randint(8, 160))[1:].tolist()
            return
        others = {"dialogue": tasks.telling.dialogue, WISH: wishes.wish}
        make = others[kind] if kind in others else tasks.TASKS[kind][1]
        pending: list[int] = []
        turns = 0
        for role, text in self.source.with_system(draw, make(draw)):
            if role == "assistant":
                yield [*pending, ROLES["assistant"]]
                pending = []
                turns += 1
                if turns == self.limits.turns:
                    return
            else:
                pending += [ROLES[role], *self.tokenizer.encode(text), END]

    def _reply(self, ids: list[int], sampling: SamplingParams) -> list[int]:
        generation = self.engine.generate(
            ids, method=METHOD, sampling=sampling, max_tokens=self.limits.reply
        )
        return generation.run().token_ids


def read(path: Path) -> list[RepliedChat]:
    """The chats of a file."""
    chats = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        fields["spans"] = [(start, end) for start, end in fields["spans"]]
        chats.append(RepliedChat(**fields))
    return chats


def collect(writer: Writer, out: Path, chats: int) -> None:
    """Add chats to `out` until it has `chats` of them."""
    with out.open("ab+") as file:
        file.seek(0)
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)  # drop an incomplete last line
        for index in range(written.count(b"\n"), chats):
            line = json.dumps(asdict(writer.chat(index)), separators=(",", ":"))
            file.write(f"{line}\n".encode())
            if index % 500 == 499:
                print(f"{index + 1} chats", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the target's replies to the exercises.")
    parser.add_argument("--data", type=Path, required=True, help="folder of *.jsonl.gz sources")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True, help="the target")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to append to")
    parser.add_argument("--chats", type=int, required=True, help="chats in the file at the end")
    parser.add_argument("--held-out", action="store_true", help="held-out data, alternating kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    training, held_out = corpora.load(args.data)
    corpus = held_out if args.held_out else training
    context = ContextParams(n_ctx=2048, n_seq_max=1, n_threads=args.threads)
    with Engine.load(args.gguf, context) as engine:
        writer = Writer(
            corpus, Tokenizer(args.tokenizer), engine, Limits(),
            seed=args.seed, even=args.held_out,
        )  # fmt: skip
        collect(writer, args.out, args.chats)


if __name__ == "__main__":
    main()
