"""Plays recorded texts through the real decode loop in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batching import clock as clocks
from batching.cache import SequenceCache
from batching.errors import InvalidParameter
from batching.rows import Rows
from batching.target import Meanwhile, Output, Watch
from batching.together import Coroutine, done
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.auto.drafter import Auto, auto_spec
from speculation.chat.detokenizer import Token
from speculation.decode import Batch, step
from speculation.drafter import (
    BASELINE,
    DraftBudget,
    Drafter,
    Method,
    MethodSpec,
    PlainSteps,
    Requirements,
    Step,
)
from speculation.drafting.confidence import LevelTime
from speculation.drafting.cost import SIZES, Cost, CostCurve
from speculation.drafting.resources import Resources
from speculation.drafting.tree_growth import Candidate, Candidates
from speculation.methods import (
    autoregressive,
    draft_model,
    parse_method,
    prompt_lookup,
    recycling,
    suffix,
)
from speculation.request import Request
from speculation.stats import Stats
from speculation.text import Text
from speculation.verify import Match
from tools.replay.recording import Draft, Header, Recorded
from tools.replay.target import Clock, PlaybackTarget

# Seconds of Python beside a small model on two cores of an EPYC, by profile (docs/measure.md).
PLAIN_STEP = 12e-6  # a step of a plain run, besides its decode
TREE_STEP = 60e-6  # a step with a tree, besides drafting and decoding
AUTO_ASK, AUTO_SELECT, AUTO_OBSERVE = 25e-6, 40e-6, 25e-6
READ = 3e-6  # a prompt token that is indexed
LOOK, DRAFT, NODE, OBSERVE = 10e-6, 35e-6, 0.3e-6, 7e-6  # of any source
RECYCLED_NODE, RECYCLED_ROW = 2e-6, 20e-6
_SOURCES = (prompt_lookup.spec, suffix.spec, recycling.spec, draft_model.spec)


@dataclass(frozen=True)
class Result:
    """One text under one method.

    ``seconds`` exclude the first step, as the bench does, and the noise that the method met.
    """

    text: Recorded
    method: str
    n_tokens: int
    seconds: float
    stats: Stats


class Replay:
    """Plays texts under several methods; each method keeps what it learns from text to text."""

    def __init__(
        self,
        header: Header,
        cost: Callable[[], Cost],
        *,
        draft_seconds: float | None = None,
        noise: float = 0.0,
        hiccups: float = 0.0,
    ) -> None:
        """``cost`` makes the true cost; a method knows it for the sizes that are measured.

        ``draft_seconds`` replaces the recorded time of the draft model's decodes, if there was one.
        """
        self.header = header
        self.cost = cost
        self.noise, self.hiccups = noise, hiccups
        self.draft_seconds = header.draft_seconds
        if self.draft_seconds and draft_seconds is not None:
            self.draft_seconds = [draft_seconds]

    def run(self, method: str, texts: Iterable[Recorded]) -> list[Result]:
        """The results of ``method``, from a fresh start, on ``texts`` in order."""
        clock = Clock()
        target = PlaybackTarget(
            self.header.n_vocab, self.cost(), clock, noise=self.noise, hiccups=self.hiccups
        )
        context = self.draft(clock)
        draft = context if self.draft_seconds else None
        resources = self.resources(draft)
        parsed = self.method(method, clock, context)
        results = []
        with clocks.using(clock):
            for text in texts:
                target.play(text)
                context.text = text
                results.append(_play(method, parsed, text, target, resources))
        return results

    def draft(self, clock: Clock) -> RecordedDraft:
        """The draft model, to which a row of a prompt costs in its steps what it costs a target."""
        curve = self.cost().near
        row = curve.at(SIZES[-1]) / SIZES[-1] / curve.at(1)
        return RecordedDraft(clock, self.draft_seconds, row)

    def resources(self, draft: RecordedDraft | None) -> Resources:
        """What the methods share at first; the draft model's time is known as if by its weights."""
        cost = measured(self.cost())
        share = self.draft_seconds[0] / cost.near.at(1) if self.draft_seconds else 0.0
        return Resources(lambda: cost, draft=draft, draft_share=share)  # type: ignore[arg-type]

    def method(self, method: str, clock: Clock, context: RecordedDraft) -> Method:
        """``method`` with the specs of this replay, whose drafters advance the clock."""
        parsed = parse_method(method)
        specs = {spec.name: _charged(spec, clock, context) for spec in _SOURCES}
        specs[BASELINE] = autoregressive.spec
        auto = auto_spec(lambda: specs.values())
        specs[auto.name] = replace(auto, make=lambda p, r: _ChargedAuto(auto.make(p, r), clock))
        if parsed.name not in specs:
            raise InvalidParameter(
                f"method {parsed.name} cannot be replayed; give one of {', '.join(specs)}"
            )
        return Method(specs[parsed.name], parsed.params)


def begun(method: Method, played: Recorded, target: PlaybackTarget, resources: Resources) -> Text:
    """A recorded text at its beginning, to be written by ``method``."""
    request = Request(tuple(played.prompt), method, max_tokens=len(played.reply))
    text = Text(request, Sink(len(played.reply), target))
    text.start(SequenceCache(target), method.drafters(resources), Match(), Greedy())
    while text.next_piece(NO_LIMIT) is not None:
        raise RuntimeError("a prompt is decoded with the first step")
    return text


class Alone:
    """Decodes for one text at a time. Implements ``speculation.decode.Decoder``."""

    def decode(
        self,
        parts: Sequence[tuple[PlaybackTarget, Rows]],
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Output]:
        ((target, rows),) = parts
        return [target.decode(rows)]


def _play(
    name: str, method: Method, played: Recorded, target: PlaybackTarget, resources: Resources
) -> Result:
    text = begun(method, played, target, resources)
    batch = Batch(Alone(), resources.known_cost)
    while not text.has_ended:
        step([text], batch)
    check(name, text, played)
    stats = text.stats
    seconds = stats.decode_seconds - target.excess
    return Result(played, name, stats.n_tokens - stats.n_first, seconds, stats)


def check(name: str, text: Text, played: Recorded) -> None:
    """Raise what ended a text, or RuntimeError if it is not the recorded one."""
    if text.error is not None:
        raise text.error
    if text.tokens != played.prompt + played.reply:
        raise RuntimeError(f"{name} wrote another text than recorded in {played.id}")


class Greedy:
    reads_logits = False

    def sample(self, output: Output, row: int) -> int:
        return output.argmax(row)

    def accept(self, token: int) -> None: ...

    def probabilities(self, logits: Floats) -> Floats:
        raise RuntimeError("a recording has no distributions")


class Sink:
    """Takes the tokens, and charges each step its time outside drafting and decoding."""

    ends: Container[int] = ()
    shown = stopped_by = ""

    def __init__(self, n_left: int, target: PlaybackTarget) -> None:
        self._n_left, self._target = n_left, target
        self.ids: list[int] = []

    def release(self, n: int, n_drafted: int) -> Sequence[Token]:
        return ()

    def rest(self) -> Sequence[Token]:
        return ()

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        n = min(len(tokens), self._n_left)
        self._target.clock.now += (
            TREE_STEP if self._target.decoded_tree else PLAIN_STEP * len(tokens)
        )
        self._n_left -= n
        return n, None if self._n_left else "length"


class _Charged(Drafter):
    """A drafter that advances the clock by what its work takes."""

    def __init__(
        self,
        drafter: Drafter,
        clock: Clock,
        node: float = NODE,
        row: float = 0.0,
        read: float = 0.0,
    ) -> None:
        self._drafter, self._clock = drafter, clock
        self._node, self._row, self._read = node, row, read
        self._n_seen = 0  # tokens at the last look
        self.share = drafter.share

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        return self._drafter.requires

    def begin(self, prompt: Sequence[int]) -> None:
        self._clock.now += self._read * len(prompt)
        self._drafter.begin(prompt)

    def n_unread(self, tokens: Sequence[int]) -> int:
        return self._drafter.n_unread(tokens)

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        n = len(tree)
        drafting = self._drafter.draft(tokens, tree, budget)
        if drafting is not None:
            yield from drafting
        self._clock.now += DRAFT + self._node * (len(tree) - n)

    def observe(self, step: Step) -> None:
        self._clock.now += OBSERVE + self._row * len(step.path)
        self._drafter.observe(step)

    def promise(self, tokens: Sequence[int]) -> float | None:
        if len(tokens) != self._n_seen:
            self._n_seen = len(tokens)
            self._clock.now += LOOK
        return self._drafter.promise(tokens)

    def observe_plain(self, steps: PlainSteps) -> None:
        self._drafter.observe_plain(steps)

    def end(self, tokens: Sequence[int]) -> None:
        self._drafter.end(tokens)


class _ChargedAuto(_Charged):
    """``auto``, whose own work takes time, too."""

    def __init__(self, auto: Drafter | None, clock: Clock) -> None:
        assert isinstance(auto, Auto)
        super().__init__(auto, clock)
        self._auto = auto
        self.cost = auto.cost

    def draft(self, tokens: Sequence[int], tree: TokenTree, budget: DraftBudget) -> Coroutine[None]:
        self._clock.now += AUTO_ASK
        yield from self._auto.draft(tokens, tree, budget)
        self.budget = self._auto.budget
        if len(tree) > 1:
            self._clock.now += AUTO_SELECT

    def keep(self, tree: TokenTree, nodes: list[int]) -> None:
        self._auto.keep(tree, nodes)

    def observe(self, step: Step) -> None:
        self._clock.now += AUTO_OBSERVE if len(step.tree) > 1 else AUTO_ASK
        self._auto.observe(step)


def _charged(spec: MethodSpec, clock: Clock, context: RecordedDraft) -> MethodSpec:
    def make(params: Any, resources: Resources) -> Drafter | None:
        drafter: Drafter | None
        if spec.name == draft_model.spec.name:
            resources.require_draft(spec.name)
            drafter = _RecordedDraftModel(
                params,
                context,  # type: ignore[arg-type]
                acceptance=resources.acceptance("draft"),
                level_time=LevelTime.of("draft", resources, resources.draft_share),
                share=resources.draft_share,
            )
            return _Charged(drafter, clock)
        drafter = spec.make(params, resources)
        assert drafter is not None
        if spec.name == recycling.spec.name:
            return _Charged(drafter, clock, RECYCLED_NODE, RECYCLED_ROW)
        return _Charged(drafter, clock, read=READ)

    return replace(spec, make=make)


class RecordedDraft:
    """Stands for the draft model's context: takes its time, and knows where the text is."""

    root_row = 0

    def __init__(self, clock: Clock, seconds: Sequence[float], row: float) -> None:
        """``row`` is the time of a prompt's row over that of a step."""
        self._clock, self._seconds, self._row = clock, seconds, row
        self.text: Recorded
        self.tree: Draft = []
        self.n_ctx, self.n_rewind, self.n_seq_max, self.target = NO_LIMIT, NO_LIMIT, 16, self
        self._n_past = self._depth = 0

    def begin(self, prompt: Sequence[int], n_leaves: int = 1) -> None:
        self.n_leaves = n_leaves
        self._n_past = self._depth = 0

    def n_unread(self, tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1 - self._n_past - self._depth)

    def root(self, tokens: Sequence[int]) -> Coroutine[RecordedDraft]:
        self._clock.now += self._seconds[0] * self.n_unread(tokens) * self._row
        self._n_past, self._depth = len(tokens), 0
        self.tree = self.text.drafts[len(tokens) - len(self.text.prompt)]
        return self.level((), ())

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[RecordedDraft]:
        self._clock.now += self._seconds[min(max(1, len(tokens)), len(self._seconds)) - 1]
        self._depth += len(tokens) if self.n_leaves == 1 else 0  # an accepted chain is kept
        return done(self)

    def logits(self, row: int) -> None:
        return None


class _RecordedDraftModel(draft_model.DraftModel):
    """Reads the draft model's choices from the recorded tree."""

    def _below(self, floor: float, nodes: Candidates, parent: int, logits: Any) -> list[Candidate]:
        tree = self._context.tree  # type: ignore[attr-defined]
        path, above = [], parent
        while above >= 0:
            path.append(nodes[above].token)
            above = nodes[above].parent
        place = -1
        for token in reversed(path):
            place = next(i for i, node in enumerate(tree) if [*node[:2]] == [place, token])
        top = [(token, q) for below, token, q in tree if below == place][: self.params.width]
        return self._likely(floor, nodes, parent, top)


def measured(true: Cost) -> Cost:
    """What a measurement would find of the true cost."""
    near, far = (
        curve and replace(curve, sizes=SIZES, seconds=[curve.at(n) for n in SIZES])
        for curve in (true.near, true.far)
    )
    assert near is not None
    return Cost(near, far)


def scaled(cost: Mapping[str, Any], factor: float) -> Cost:
    """A recorded cost, ``factor`` times as slow."""
    near, far = (
        curve
        and CostCurve(
            curve["sizes"],
            [factor * seconds for seconds in curve["seconds"]],
            factor * curve["switch_seconds"],
        )
        for curve in (cost["near"], cost["far"])
    )
    return Cost(near, far)
