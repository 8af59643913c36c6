"""How often a draft model predicts the target's tokens: agreement, tokens per step, overlap.

With a greedy target, one pass over its replies simulates drafting: accepted draft tokens are the
target's own, so the draft always continues the target's text, and a chain of k draft tokens is
accepted up to the first disagreement. With a sampled target, the acceptance rate of rejection
sampling is the overlap of the two distributions: the sum over the vocabulary of min(p, q).

    python -m tools.recipe.agreement --replies DIR/held-out.jsonl --target target.gguf \\
        --draft draft.gguf
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.rows import Rows
from tools.recipe import replies
from tools.recipe.replies import RepliedChat

CHAINS = range(1, 9)

Hits = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


def reply_positions(chat: RepliedChat) -> npt.NDArray[np.int64]:
    """Positions whose next token the target generated."""
    return np.concatenate([np.arange(start - 1, end - 1) for start, end in chat.spans])


def by_reply(hits: Hits, chat: RepliedChat) -> list[Hits]:
    """Split an array over `reply_positions` into the chat's replies."""
    return np.split(hits, np.cumsum([end - start for start, end in chat.spans])[:-1])


def steps(hits: Hits, chain: int) -> int:
    """Target decodes for a reply when every step drafts `chain` tokens.

    hits: for each token of the reply, whether the draft's first choice is that token.

    >>> steps(np.array([True, True, False, True]), 2)  # two accepted and the bonus; one accepted
    2
    """
    count = position = 0
    while position < len(hits):
        ahead = hits[position : position + chain]
        accepted = len(ahead) if ahead.all() else int(ahead.argmin())
        position += accepted + 1
        count += 1
    return count


def figures(replies_hits: Sequence[Hits]) -> dict[str, object]:
    """Agreement in percent, and tokens per step for chains of 1 to 8 draft tokens."""
    total = sum(map(len, replies_hits))
    return {
        "tokens": total,
        "agreement": round(100 * sum(int(hits.sum()) for hits in replies_hits) / total, 1),
        "tokens_per_step": {
            chain: round(total / sum(steps(hits, chain) for hits in replies_hits), 2)
            for chain in CHAINS
        },
    }


def report(hits: Iterable[tuple[RepliedChat, Hits]]) -> dict[str, object]:
    """The figures of all replies together, and by kind."""
    kinds: dict[str, list[Hits]] = {}
    for chat, chat_hits in hits:
        kinds.setdefault(chat.kind, []).extend(by_reply(chat_hits, chat))
    return {
        "all": figures([hits for kind in kinds.values() for hits in kind]),
        "by_kind": {kind: figures(kinds[kind]) for kind in replies.KINDS if kind in kinds},
    }


class Reader:
    """Runs whole chats through a GGUF."""

    def __init__(self, model: Model, threads: int | None = None) -> None:
        self.context = Context(model, ContextParams(n_ctx=2048, n_seq_max=1, n_threads=threads))

    def logits(self, chat: RepliedChat) -> Floats:
        """The logits at `reply_positions`: (positions, vocab)."""
        wanted = reply_positions(chat)
        flags = np.zeros(len(chat.ids), bool)
        flags[wanted] = True
        self.context.seq_rm(-1, 0, -1)
        parts = []
        for first in range(0, len(chat.ids), self.context.n_batch):
            here = range(first, min(first + self.context.n_batch, len(chat.ids)))
            outputs = flags[here.start : here.stop].tolist()
            tokens = chat.ids[here.start : here.stop]
            output = self.context.decode(Rows(tokens, here, [range(1)] * len(here), outputs))
            parts += [output.logits(i).copy() for i, has_output in enumerate(outputs) if has_output]
        return np.stack(parts)

    def step_seconds(self, n_past: int = 256, steps: int = 300) -> float:
        """Median time to decode one row, including its argmax."""
        context = self.context
        context.seq_rm(-1, 0, -1)
        context.decode(Rows([0] * n_past, range(n_past), [range(1)] * n_past, [True] * n_past))
        seconds = []
        for position in range(n_past, n_past + steps):
            start = time.perf_counter()
            context.decode(Rows([0], [position], [range(1)], [True])).argmax(0)
            seconds.append(time.perf_counter() - start)
        return median(seconds)


def probabilities(logits: Floats, temperature: float) -> Floats:
    scaled = logits / temperature
    scaled = np.exp(scaled - scaled.max(-1, keepdims=True))
    result: Floats = scaled / scaled.sum(-1, keepdims=True)
    return result


def measure(
    target: Reader, draft: Reader, chats: Sequence[RepliedChat], temperatures: Sequence[float]
) -> dict[str, object]:
    """Agreement on the greedy chats; overlap at several temperatures on the sampled ones."""
    hits: list[tuple[RepliedChat, Hits]] = []
    overlaps: dict[float, list[Floats]] = {temperature: [] for temperature in temperatures}
    for chat in chats:
        q = draft.logits(chat)
        if chat.temperature == 0:
            hits.append((chat, q.argmax(-1) == np.array(chat.ids)[reply_positions(chat) + 1]))
            continue
        p = target.logits(chat)
        for temperature, shares in overlaps.items():
            both = np.minimum(probabilities(p, temperature), probabilities(q, temperature))
            shares.append(both.sum(-1))
    means = {t: round(float(np.concatenate(s).mean()), 3) for t, s in overlaps.items() if s}
    return {**report(hits), "overlap": means}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a draft model against its target.")
    parser.add_argument("--replies", type=Path, required=True, help="held-out file from `replies`")
    parser.add_argument("--target", type=Path, required=True, help="GGUF that made the replies")
    parser.add_argument("--draft", type=Path, required=True, help="GGUF of the draft model")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.8, 1.0])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with Model(args.target) as target_model, Model(args.draft) as draft_model:
        target, draft = Reader(target_model, args.threads), Reader(draft_model, args.threads)
        found = measure(target, draft, replies.read(args.replies), args.temperatures)
        found["step_us"] = {
            "target": round(1e6 * target.step_seconds()),
            "draft": round(1e6 * draft.step_seconds()),
        }
        found["bytes"] = args.draft.stat().st_size
        target.context.close()
        draft.context.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
