"""Records a model's replies through a method that drafts nothing and observes every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter

import numpy as np

from batching.draft_context import DraftContext
from batching.target import Output
from batching.together import Coroutine, done, run
from batching.tree import Floats
from speculation.auto.calibration import measure
from speculation.bench.prompt_file import Prompt
from speculation.bench.suites.cost import SIZES
from speculation.chat.template import Message
from speculation.drafter import Drafter, Method, MethodSpec, NoParams, Step
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import grow, top_children, top_tokens
from speculation.engine import Engine
from speculation.sampling import SamplingParams
from speculation.settings import Settings
from tools.replay.recording import Draft, Header, Recorded, Successors

COST_SECONDS = 10.0  # to measure the cost of nearly every number of rows
N_SUCCESSORS = 8  # as many as token recycling keeps
DEPTH, WIDTH = 16, 4  # levels of the draft model's tree, and nodes of each with children
MIN_PROB = 0.03  # the least path probability of a node


class Recorder(Drafter):
    """Notes the successors and the draft model's tree at every place of one text."""

    def __init__(self, draft: DraftContext | None) -> None:
        self._draft = draft
        self.successors: list[Successors] = []
        self.drafts: list[Draft] = []
        self.seconds: list[list[float]] = [[] for _ in range(WIDTH)]  # by rows of the draft model
        self._tokens: list[int] = []

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
            self.seconds[len(tokens) - 1].append(perf_counter() - start)
            return done(output)

        children = top_children(top_tokens, WIDTH, MIN_PROB, lambda candidate: candidate.prob)
        output = run(draft.root(self._tokens))
        nodes = run(grow(children, level, output, draft.root_row, depth=DEPTH, width=WIDTH))
        return [(node.parent, node.token, round(node.prob, 4)) for node in nodes]


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
    *,
    sampling: SamplingParams | None = None,
    raw: bool = False,
    on_text: Callable[[Recorded], None] = lambda text: None,
) -> tuple[Header, list[Recorded]]:
    """Record the reply to every turn of ``prompts``; of a conversation, each with those before."""
    draft = None if engine.draft is None else DraftContext(engine.draft)
    texts: list[Recorded] = []
    seconds: list[list[float]] = [[] for _ in range(WIDTH)]
    for prompt in prompts:
        messages: list[Message] = []
        for turn, user in enumerate(prompt.turns, 1):
            recorder = Recorder(draft)
            method = Method(_spec(recorder), NoParams())
            messages.append({"role": "user", "content": user})
            settings = Settings(method=method, sampling=sampling, max_tokens=n_predict)
            start = engine.generate(user, **settings) if raw else engine.chat(messages, **settings)
            generation = start.run()
            messages.append({"role": "assistant", "content": generation.answer})
            reply = list(generation.token_ids)
            text = Recorded(
                prompt.turn_id(turn),
                prompt.category,
                generation.prompt,
                reply,
                recorder.successors[: len(reply)],
                recorder.drafts[: len(reply)],
            )
            for every, new in zip(seconds, recorder.seconds, strict=True):
                every += new
            texts.append(text)
            on_text(text)
    engine.call(lambda: engine.cache.truncate(0))
    cost = engine.call(lambda: measure(engine.context, COST_SECONDS, sizes=SIZES))
    measured = {"near": asdict(cost.near), "far": cost.far and asdict(cost.far)}
    drafted = [median(some) for some in seconds if some]
    return Header(engine.model.path.name, engine.model.n_vocab, measured, drafted), texts


def _spec(recorder: Recorder) -> MethodSpec:
    def make(params: NoParams, resources: Resources) -> Drafter:
        return recorder

    return MethodSpec(name="record", title="Record", make=make)
