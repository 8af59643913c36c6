"""Records a model's replies through a method that drafts nothing and observes every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter

import numpy as np

from batching.draft_context import DraftContext
from batching.target import Output
from batching.tree import Floats
from speculation.auto.calibration import measure
from speculation.bench.prompt_file import Prompt
from speculation.bench.suites.cost import SIZES
from speculation.chat.template import Message
from speculation.drafter import Drafter, MethodSpec, NoParams, Step
from speculation.drafting.tree_growth import top_tokens
from speculation.engine import Engine
from speculation.generation import Settings
from speculation.methods import Method
from speculation.resources import Resources
from speculation.sampling import SamplingParams
from tools.replay.recording import Chain, Header, Successors, Text

COST_SECONDS = 10.0  # to measure the cost of nearly every number of rows
N_SUCCESSORS = 8  # as many as token recycling keeps
CHAIN = 16  # tokens of the draft model's chain
MIN_PROB = 0.05  # a chain ends before a token with a lower path probability


class Recorder(Drafter):
    """Notes the successors and the draft model's chain at every place of one text."""

    def __init__(self, draft: DraftContext | None) -> None:
        self._draft = draft
        self.successors: list[Successors] = []
        self.chains: list[Chain] = []
        self.draft_seconds: list[float] = []
        self._tokens: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        if self._draft is not None:
            self._draft.begin(prompt)
            self.chains.append(self._chain(self._draft))

    def observe(self, step: Step) -> None:
        self.successors.append(_top(step.output.logits(0)))
        self._tokens += step.tokens
        if self._draft is not None:
            self.chains.append(self._chain(self._draft))

    def _chain(self, draft: DraftContext) -> Chain:
        output: Output = draft.root(self._tokens)
        chain: Chain = []
        row, path_prob = draft.root_row, 1.0
        while True:
            ((token, q),) = top_tokens(output.logits(row), 1)
            path_prob *= q
            if chain and path_prob < MIN_PROB:
                return chain
            chain.append((token, round(q, 4)))
            if len(chain) == CHAIN:
                return chain
            start = perf_counter()
            output, row = draft.level([0], [token]), 0
            self.draft_seconds.append(perf_counter() - start)


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
    on_text: Callable[[Text], None] = lambda text: None,
) -> tuple[Header, list[Text]]:
    """Record the reply to every turn of ``prompts``; of a conversation, each with those before."""
    draft = None if engine.draft is None else DraftContext(engine.draft)
    texts, seconds = [], []
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
            text = Text(
                prompt.turn_id(turn),
                prompt.category,
                generation.prompt,
                reply,
                recorder.successors[: len(reply)],
                recorder.chains[: len(reply)],
            )
            seconds += recorder.draft_seconds
            texts.append(text)
            on_text(text)
    engine.stop_running()
    engine.cache.truncate(0)
    cost = measure(engine.context, COST_SECONDS, sizes=SIZES)
    measured = {"near": asdict(cost.near), "far": cost.far and asdict(cost.far)}
    header = Header(
        engine.model.path.name, engine.model.n_vocab, measured, median(seconds) if seconds else 0.0
    )
    return header, texts


def _spec(recorder: Recorder) -> MethodSpec:
    def make(params: NoParams, resources: Resources) -> Drafter:
        return recorder

    return MethodSpec(name="record", title="Record", make=make)
