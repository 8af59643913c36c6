"""Recordings: the texts of one model with all that a policy's result depends on.

A file is gzipped JSON Lines: a header, then one line a text. ``record`` makes them through a method
that drafts nothing and observes every step.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from batching.draft_context import DraftContext
from batching.errors import InvalidParameter
from batching.target import Output
from batching.together import Coroutine, done, run
from batching.tree import Floats
from speculation.auto.calibration import measure
from speculation.bench.prompt_file import Prompt
from speculation.bench.suites.cost import SIZES
from speculation.chat.template import Message
from speculation.drafter import Drafter, Method, MethodSpec, NoParams, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.tree_growth import Growth, top_tokens
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from speculation.settings import Settings

VERSION = 2
COST_SECONDS = 10.0  # to measure the cost of nearly every number of rows
N_SUCCESSORS = 8  # as many as token recycling keeps
DEPTH, WIDTH = 16, 4  # levels of the draft model's tree, and nodes of each with children
MIN_PROB = 0.03  # the least path probability of a node
Successors = list[tuple[int, float]]  # token, log-probability; likeliest first
Draft = list[tuple[int, int, float]]  # parent (-1 = the root), token, q; parents first


@dataclass
class Header:
    """What holds for all texts of a file.

    model          its file name
    n_vocab        tokens in its vocabulary
    cost           its measured cost: ``near`` and ``far`` in the context, row counts and seconds
    draft_seconds  time of a decode of the draft model with 1, 2, … rows; empty = none was loaded
    """

    model: str
    n_vocab: int
    cost: dict[str, Any]
    draft_seconds: list[float] = field(default_factory=list)
    version: int = VERSION


@dataclass
class Recorded:
    """A prompt and the model's reply.

    successors  the likeliest tokens after the prompt and after each token of the reply but the last
    drafts      the draft model's tree at the same places; empty without a draft model
    """

    id: str
    category: str
    prompt: list[int]
    reply: list[int]
    successors: list[Successors] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)


def write(path: Path, header: Header, texts: Sequence[Recorded]) -> None:
    """Write a recording. Raises OSError."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in (asdict(header), *map(asdict, texts)))


def read(path: Path) -> tuple[Header, list[Recorded]]:
    """Read a recording. Raises InvalidParameter for anything else."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            header = Header(**json.loads(file.readline()))
            if header.version == VERSION:
                return header, [Recorded(**json.loads(line)) for line in file]
        raise ValueError(f"it has version {header.version}")
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise InvalidParameter(f"{path} is not a recording: {error}; record it anew") from error


class Recorder(Drafter):
    """Notes the successors and the draft model's tree at every place of one text.

    ``seconds`` gets the times of the draft model's decodes, by their rows.
    """

    def __init__(self, draft: DraftContext | None, seconds: Sequence[list[float]]) -> None:
        self._draft, self._seconds = draft, seconds
        self.successors: list[Successors] = []
        self.drafts: list[Draft] = []
        self._tokens: list[int] = []

    def made(self, *_: object) -> Drafter:
        return self

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        if self._draft is not None:
            self._draft.begin(prompt, WIDTH)
            self.drafts.append(self._tree(self._draft))

    def observe(self, step: Step) -> None:
        self.successors.append(_top(step.output.logits(0)))
        self._tokens += step.tokens
        if self._draft is not None:
            self.drafts.append(self._tree(self._draft))

    def _tree(self, draft: DraftContext) -> Draft:
        def level(parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[Output]:
            start = perf_counter()
            output = run(draft.level(parents, tokens))
            self._seconds[len(tokens) - 1].append(perf_counter() - start)
            return done(output)

        def add_below(node: int, logits: Floats) -> None:
            for token, prob in top_tokens(logits, WIDTH):
                if growth.path_probs[node] * prob >= MIN_PROB:
                    growth.add(node, token, prob)

        growth = Growth(self._tokens[-1], Acceptance())
        output = run(draft.root(self._tokens))
        run(growth.levels(add_below, level, output, draft.root_row, depth=DEPTH, width=WIDTH))
        tree = growth.tree
        nodes = [*zip(tree.parents, tree.tokens, growth.given, strict=True)]
        return [(parent - 1, token, round(prob, 4)) for parent, token, prob in nodes[1:]]


def _top(logits: Floats) -> Successors:
    top = np.argpartition(logits, -N_SUCCESSORS)[-N_SUCCESSORS:]
    top = top[logits[top].argsort()[::-1]]
    peak = float(logits.max())
    total = float(np.log(np.exp(logits - peak).sum())) + peak
    return [(int(token), round(float(logits[token]) - total, 3)) for token in top]


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    n_predict: int,
    sampling: SamplingParams,
    *,
    raw: bool,
) -> tuple[Header, list[Recorded]]:
    """Record the reply to every turn of ``prompts``; of a conversation, each with those before."""
    draft = None if engine.draft is None else DraftContext(engine.draft)
    texts: list[Recorded] = []
    seconds: list[list[float]] = [[] for _ in range(WIDTH)]
    for prompt in prompts:
        messages: list[Message] = []
        for turn, user in enumerate(prompt.turns, 1):
            recorder = Recorder(draft, seconds)
            spec = MethodSpec(name="record", title="Record", make=recorder.made)
            messages.append({"role": "user", "content": user})
            settings = Settings(
                method=Method(spec, NoParams()), sampling=sampling, max_tokens=n_predict
            )
            start = engine.generate(user, **settings) if raw else engine.chat(messages, **settings)
            done_text = start.run()
            messages.append({"role": "assistant", "content": done_text.answer})
            n = len(done_text.token_ids)
            text = Recorded(
                prompt.turn_id(turn),
                prompt.category,
                done_text.prompt,
                list(done_text.token_ids),
                recorder.successors[:n],
                recorder.drafts[:n],
            )
            texts.append(text)
            print(f"{text.id}: {len(text.reply)} tokens", file=sys.stderr)
    engine.call(lambda: engine.cache.truncate(0))
    cost = engine.call(lambda: measure(engine.context, COST_SECONDS, sizes=SIZES))
    measured = {"near": asdict(cost.near), "far": cost.far and asdict(cost.far)}
    drafted = [median(some) for some in seconds if some]
    return Header(engine.model.path.name, engine.model.n_vocab, measured, drafted), texts
