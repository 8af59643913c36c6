"""Plays recorded texts through the real decode loop in simulated time, one or several at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from batching import clock as clocks
from batching.cache import SequenceCache
from batching.errors import InvalidParameter
from batching.llama.sampler import GreedySampler
from batching.rows import Rows
from batching.target import Meanwhile, Watch
from batching.together import Coroutine, done
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.auto.drafter import auto_spec
from speculation.bench.results import Run
from speculation.chat.detokenizer import Token
from speculation.drafter import Drafter, Method, MethodSpec, Step
from speculation.drafting.cost import SIZES, Cost, CostCurve
from speculation.drafting.resources import Resources, Seat
from speculation.drafting.tree_growth import Growth, LevelTime
from speculation.methods import (
    autoregressive,
    draft_model,
    parse_method,
    prompt_lookup,
    recycling,
    suffix,
)
from speculation.request import Request
from speculation.sequence import TokenSequence
from speculation.step import Batch, step
from speculation.verify import Match
from tools.replay.recording import Draft, Header, Recorded

# Seconds of Python beside a small model on two cores of an EPYC, by profile (docs/measure.md).
PLAIN_STEP = 12e-6  # a step of a plain run, besides its decode
TREE_STEP = 60e-6  # a step with a tree, besides drafting and decoding
AUTO_ASK, AUTO_SELECT, AUTO_OBSERVE = 25e-6, 40e-6, 25e-6
READ = 3e-6  # a prompt token that is indexed
LOOK, DRAFT, NODE, OBSERVE = 10e-6, 35e-6, 0.3e-6, 7e-6  # of any source
RECYCLED_NODE, RECYCLED_ROW = 2e-6, 20e-6


class Machine:
    """What computes: simulated time in seconds, which ``batching.clock`` reads.

    Stands for ``batching.slots.Slots``: one decode for the rows of all texts.

    noise      standard deviation of a decode's relative time
    hiccups    share of decodes that take four times as long: the machine did something else
    n_rows, n_steps  of all decodes so far
    excess     seconds of noise so far
    """

    def __init__(self, cost: Cost, noise: float = 0.0, hiccups: float = 0.0) -> None:
        self._cost, self._noise, self._hiccups = cost, noise, hiccups
        self._random = random.Random(1)
        self._last_rows = 0
        self.now = self.excess = 0.0
        self.n_rows = self.n_steps = 0

    def __call__(self) -> float:
        return self.now

    def decode(
        self,
        parts: Sequence[tuple[Playback, Rows]],
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Any]:
        n_past = sum([rows.positions[rows.n_before] for _, rows in parts]) // len(parts)
        self.spend(sum([len(rows) - rows.n_before for _, rows in parts]), n_past)
        return [target.decode(rows) for target, rows in parts]

    def spend(self, n_rows: int, n_past: int) -> None:
        """Advance the clock by a decode."""
        curve = self._cost.curve(n_past)
        seconds = curve.at(n_rows)
        if n_rows != self._last_rows:
            seconds += curve.switch_seconds
        self._last_rows = n_rows
        noise = max(0.5, self._random.gauss(1.0, self._noise)) if self._noise else 1.0
        if self._hiccups and self._random.random() < self._hiccups:
            noise *= 4.0
        self.now += noise * seconds
        self.excess += (noise - 1.0) * seconds
        self.n_rows += n_rows
        self.n_steps += 1


class Playback:
    """Plays one text. Stands for a ``Target``, and for the ``Output`` of all its decodes.

    At every row it has the recorded text's next token: a verifier reads rows along the accepted
    path alone, which is the recorded text.
    """

    n_batch, n_seq_max, n_rewind, n_ctx = 1 << 16, 64, NO_LIMIT, 1 << 20

    def __init__(self, n_vocab: int, machine: Machine, text: Recorded) -> None:
        self.n_vocab, self.machine, self.recorded = n_vocab, machine, text
        self._text = [*text.prompt, *text.reply]
        self._positions: Sequence[int] = ()  # of the last decode's rows with an output
        self.decoded_tree = False  # whether the last decode was a tree's
        self.excess: float | None = None  # of the machine after the first step, which is prefill

    def decode(
        self, rows: Rows, watch: Watch | None = None, meanwhile: Meanwhile | None = None
    ) -> Playback:
        return self._decoded(rows.positions[rows.n_before :], tree=True)

    def decode_row(self, token: int, position: int, seq_ids: range) -> Playback:
        self.machine.spend(1, position)
        return self._decoded((position,), tree=False)

    def _decoded(self, positions: Sequence[int], *, tree: bool) -> Playback:
        self._positions, self.decoded_tree = positions, tree
        if self.excess is None:
            self.excess = self.machine.excess
        return self

    def argmax(self, row: int) -> int:
        return self._text[min(self._positions[row] + 1, len(self._text) - 1)]

    def argmaxes(self, first: int, n: int) -> list[int]:
        return [self.argmax(row) for row in range(first, first + n)]

    def logits(self, row: int) -> Floats:
        """The recorded successors' log-probabilities; all others are very unlikely."""
        successors, logits = self.recorded.successors, np.full(self.n_vocab, -100.0, np.float32)
        place = self._positions[row] - len(self.recorded.prompt) + 1
        for token, log_prob in successors[min(place, len(successors) - 1)]:
            logits[token] = log_prob
        return logits

    def _nothing(self, *_: object) -> None: ...

    want_hidden = want_layers = want_logits = seq_rm = seq_cp = _nothing

    def has_window(self, *_: object) -> bool:
        return True


class Replay:
    """Plays texts under several methods; each method keeps what it learns from text to text.

    ``cost`` makes the true cost; a method knows it for the sizes that are measured.
    ``draft_seconds`` replaces the recorded time of the draft model's decodes, if there was one.
    """

    def __init__(
        self,
        header: Header,
        cost: Callable[[], Cost],
        draft_seconds: float | None = None,
        noise: float = 0.0,
        hiccups: float = 0.0,
    ) -> None:
        self.header, self.cost, self.noise, self.hiccups = header, cost, noise, hiccups
        self.draft_seconds = header.draft_seconds
        if self.draft_seconds and draft_seconds is not None:
            self.draft_seconds = [draft_seconds]

    def run(
        self, method: str, texts: Sequence[Recorded], n_places: int = 1
    ) -> tuple[list[Run], Machine]:
        """Play ``texts`` from a fresh start, in order, ``n_places`` at a time, each in the place of
        one that has ended. Runs are in the order in which the texts end."""
        machine = Machine(self.cost(), self.noise, self.hiccups)
        draft: Any = self._draft(machine) if self.draft_seconds else None
        cost = measured(self.cost())
        # The draft model's time is known as if by its weights.
        share = self.draft_seconds[0] / cost.near.at(1) if self.draft_seconds else 0.0
        resources = Resources(lambda: cost, seat=Seat(draft), draft_share=share)
        # As the engine measures it for texts that share a decode.
        batch = Batch(cast("Any", machine), resources.cost if n_places > 1 else None)
        waiting, active, runs = list(reversed(texts)), dict[TokenSequence, Playback](), list[Run]()
        with clocks.using(machine):
            while waiting or active:
                while waiting and len(active) < n_places:
                    target = Playback(self.header.n_vocab, machine, waiting.pop())
                    active[self._begun(method, target, resources)] = target
                n_past = sum(text.cache.n_past for text in active) // len(active)
                step(list(active), batch, n_past=n_past)
                for text in [text for text in active if text.has_ended]:
                    runs.append(_run(method, text, active.pop(text)))
        return runs, machine

    def _draft(self, machine: Machine, text: Recorded | None = None) -> RecordedDraft:
        """The draft model, to which a row of a prompt costs in its steps what it costs a target."""
        curve = self.cost().near
        row = curve.at(SIZES[-1]) / SIZES[-1] / curve.at(1)
        return RecordedDraft(machine, self.draft_seconds, row, text)

    def _begun(self, method: str, target: Playback, resources: Resources) -> TokenSequence:
        """A recorded text at its beginning."""
        parsed, machine, recorded = parse_method(method), target.machine, target.recorded
        context = self._draft(machine, recorded)
        specs = _charged_specs(machine, context)
        if parsed.name not in specs:
            raise InvalidParameter(
                f"method {parsed.name} cannot be replayed; give one of {', '.join(specs)}"
            )
        own = Method(specs[parsed.name], parsed.params)
        request = Request(tuple(recorded.prompt), own, max_tokens=len(recorded.reply))
        text, played = TokenSequence(request, cast("Any", _Sink(target))), cast("Any", target)
        text.start(SequenceCache(played), own.drafters(resources), Match(), GreedySampler())
        while text.next_piece(NO_LIMIT) is not None:
            raise RuntimeError("a prompt is decoded with the first step")
        return text


def _run(method: str, text: TokenSequence, target: Playback) -> Run:
    """Without the noise that the text met. Raises what ended it, or RuntimeError if it is not the
    recorded one."""
    played, stats = target.recorded, text.reply.stats
    if text.reply.error is not None:
        raise text.reply.error
    if text.tokens != played.prompt + played.reply:
        raise RuntimeError(f"{method} wrote another text than recorded in {played.id}")
    stats.decode_seconds -= target.machine.excess - (target.excess or 0.0)
    return Run(method, played.id, played.category, 0, played.reply, "length", stats)


class _Sink:
    """Takes the tokens, and charges each step its time outside drafting and decoding."""

    ends: Container[int] = ()
    shown = stopped_by = ""

    def __init__(self, target: Playback) -> None:
        self._n_left, self._target = len(target.recorded.reply), target
        self.ids: list[int] = []

    def release(self, n: int, n_drafted: int) -> Sequence[Token]:
        return ()

    def rest(self) -> Sequence[Token]:
        return ()

    def take(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        n = min(len(tokens), self._n_left)
        is_tree = self._target.decoded_tree
        self._target.machine.now += TREE_STEP if is_tree else PLAIN_STEP * len(tokens)
        self._n_left -= n
        return n, None if self._n_left else "length"


def _charge(
    drafter: Any,
    machine: Machine,
    draft_seconds: Callable[[int], float],
    observe_seconds: Callable[[Step], float],
    *,
    ask: float = 0.0,
    read: float = 0.0,
) -> Drafter:
    """Let the drafter's work advance the clock: that on a number of new nodes, on a step, before
    each draft, and on each prompt token. Returns it."""
    begin, draft = drafter.begin, drafter.draft
    observe, promise, n_seen = drafter.observe, drafter.promise, 0

    def charged_begin(prompt: Sequence[int]) -> Any:
        machine.now += read * len(prompt)
        return begin(prompt)

    def charged_draft(tokens: Sequence[int], tree: TokenTree, budget: Any) -> Any:
        nonlocal n_seen
        n, n_seen = len(tree), len(tokens)  # a look while it drafts is part of that
        machine.now += ask
        yield from draft(tokens, tree, budget) or ()
        machine.now += draft_seconds(len(tree) - n)

    def charged_observe(step: Step) -> None:
        machine.now += observe_seconds(step)
        observe(step)

    def charged_promise(tokens: Sequence[int], *prices: Any) -> Any:
        nonlocal n_seen
        if len(tokens) != n_seen:
            n_seen = len(tokens)
            machine.now += LOOK
        return promise(tokens, *prices)

    drafter.begin, drafter.draft = charged_begin, charged_draft
    drafter.observe, drafter.promise = charged_observe, charged_promise
    made: Drafter = drafter
    return made


def _charged_specs(machine: Machine, context: RecordedDraft) -> dict[str, MethodSpec]:
    """The methods' own specs, whose drafters advance the clock, by name."""

    def charged(spec: MethodSpec, node: float, row: float, read: float) -> MethodSpec:
        def make(params: Any, resources: Resources) -> Drafter:
            drafter: Any = None
            if spec.name == draft_model.spec.name:
                resources.require_draft(spec.name)
                acceptance = resources.acceptance("draft")
                share = resources.draft_share
                level_time = LevelTime.of("draft", resources, share)
                recorded = cast("Any", context)
                drafter = _RecordedDraftModel(
                    params, recorded, acceptance=acceptance, level_time=level_time, share=share
                )
            return _charge(
                drafter or spec.make(params, resources),
                machine,
                lambda n: DRAFT + node * n,
                lambda step: OBSERVE + row * len(step.path),
                read=read,
            )

        return replace(spec, make=make)

    def make_auto(params: Any, resources: Resources) -> Drafter:
        return _charge(
            auto.make(params, resources),
            machine,
            lambda n: AUTO_SELECT * (n > 0),
            lambda step: AUTO_OBSERVE if len(step.tree) > 1 else AUTO_ASK,
            ask=AUTO_ASK,
        )

    every = [
        autoregressive.spec,
        charged(prompt_lookup.spec, NODE, 0.0, READ),
        charged(suffix.spec, NODE, 0.0, READ),
        charged(recycling.spec, RECYCLED_NODE, RECYCLED_ROW, 0.0),
        charged(draft_model.spec, NODE, 0.0, 0.0),
    ]
    specs = {spec.name: spec for spec in every}
    auto = auto_spec(lambda: every)
    return {**specs, auto.name: replace(auto, make=make_auto)}


class RecordedDraft:
    """Stands for the draft model's context: takes its time, and knows where the text is."""

    root_row = 0

    def __init__(
        self, machine: Machine, seconds: Sequence[float], row: float, text: Recorded | None = None
    ) -> None:
        """``row`` is the time of a prompt's row over that of a step."""
        self._machine, self._seconds, self._row = machine, seconds, row
        self._text = text
        self.tree: Draft = []
        self.n_ctx, self.n_rewind, self.n_seq_max, self.target = NO_LIMIT, NO_LIMIT, 16, self
        self._n_past = self._depth = 0

    def begin(self, prompt: Sequence[int], n_leaves: int = 1) -> None:
        self.n_leaves = n_leaves
        self._n_past = self._depth = 0

    def n_unread(self, tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1 - self._n_past - self._depth)

    def root(self, tokens: Sequence[int]) -> Coroutine[RecordedDraft]:
        assert self._text is not None
        self._machine.now += self._seconds[0] * self.n_unread(tokens) * self._row
        self._n_past, self._depth = len(tokens), 0
        self.tree = self._text.drafts[len(tokens) - len(self._text.prompt)]
        return self.level((), ())

    def level(self, parents: Sequence[int], tokens: Sequence[int]) -> Coroutine[RecordedDraft]:
        self._machine.now += self._seconds[min(max(1, len(tokens)), len(self._seconds)) - 1]
        self._depth += len(tokens) if self.n_leaves == 1 else 0  # an accepted chain is kept
        return done(self)

    def logits(self, row: int) -> None:
        return None


class _RecordedDraftModel(draft_model.DraftModel):
    """Reads the draft model's choices from the recorded tree."""

    def _likeliest(self, growth: Growth, node: int, logits: Any) -> Sequence[tuple[int, float]]:
        recorded = self._context.tree  # type: ignore[attr-defined]
        place = -1
        for above in growth.tree.path_to(node)[1:]:
            token = growth.tree.tokens[above]
            place = next(i for i, found in enumerate(recorded) if [*found[:2]] == [place, token])
        below = [(token, q) for parent, token, q in recorded if parent == place]
        return below[: self.params.width]


def measured(true: Cost) -> Cost:
    """What a measurement would find of the true cost."""

    def measured_curve(of: CostCurve) -> CostCurve:
        return replace(of, sizes=SIZES, seconds=[of.at(n) for n in SIZES])

    return Cost(measured_curve(true.near), true.far and measured_curve(true.far))


def scaled(cost: Mapping[str, Any], factor: float) -> Cost:
    """A recorded cost, ``factor`` times as slow."""
    near, far = cost["near"], cost["far"]
    return Cost(CostCurve(**near).scaled(factor), far and CostCurve(**far).scaled(factor))
