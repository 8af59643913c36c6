"""Plays recorded texts several at a time: in each step one decode for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching.cache import SequenceCache
from batching.together import run
from speculation.auto.cost import Cost
from speculation.auto.choose import choose, follow
from speculation.continuation import Continuation
from speculation.resources import Resources
from speculation.stats import Stats
from speculation.verify import Match
from tools.replay.play import Greedy, RecordedDraft, Replay, Sink, measured, simulated
from tools.replay.recording import Text
from tools.replay.target import Clock, PlaybackTarget


class _Silent(PlaybackTarget):
    """A text's own target, whose decodes take no time: the batch's do."""

    def spend(self, n_rows: int, n_past: int) -> None: ...


@dataclass
class Played:
    """What playing texts together took; prompts are not counted, which are read beforehand.

    n_steps  decodes of all texts together
    """

    n_tokens: int = 0
    n_rows: int = 0
    n_steps: int = 0
    seconds: float = 0.0


def run_together(replay: Replay, method: str, texts: Sequence[Text], n_places: int) -> Played:
    """Play ``texts`` in order, ``n_places`` at a time, each in the place of one that has ended."""
    clock, played = Clock(), Played()
    batch = PlaybackTarget(
        replay.header.n_vocab, replay.cost(), clock, noise=replay.noise, hiccups=replay.hiccups
    )
    draft = RecordedDraft(clock, replay.draft_seconds) if replay.draft_seconds else None
    resources = Resources(lambda: measured(replay.cost()), draft=draft)  # type: ignore[arg-type]
    waiting, active = list(reversed(texts)), list[tuple[Continuation, PlaybackTarget]]()
    cost = resources.cost
    with simulated(clock):
        while waiting or active:
            while waiting and len(active) < n_places:
                active.append(_begun(replay, method, waiting.pop(), resources, clock))
            active = _step(active, cost, batch, clock, played)
    played.seconds = clock.now
    return played


def _begun(
    replay: Replay, method: str, text: Text, resources: Resources, clock: Clock
) -> tuple[Continuation, PlaybackTarget]:
    target = _Silent(replay.header.n_vocab, replay.cost(), clock)
    target.play(text)
    context = RecordedDraft(clock, replay.draft_seconds)
    context.text = text
    cache = SequenceCache(target)
    cache.prefill(text.prompt[:-1])
    continuation = Continuation(
        cache=cache,
        tokens=list(text.prompt),
        drafters=replay.method(method, clock, context).drafters(resources),
        verifier=Match(),
        sampler=Greedy(),
        text=Sink(len(text.reply), target, clock),
        stats=Stats(n_prompt=len(text.prompt)),
        max_length=len(text.prompt) + len(text.reply),
    )
    run(continuation.begin())
    return continuation, target


def _step(
    active: Sequence[tuple[Continuation, PlaybackTarget]],
    cost: Cost,
    batch: PlaybackTarget,
    clock: Clock,
    played: Played,
) -> list[tuple[Continuation, PlaybackTarget]]:
    """One step of all texts; returns those that go on."""
    texts = [text for text, _ in active]
    cost.n_texts = len(texts)
    cost.n_past = sum(text.cache.n_past for text in texts) // len(texts)
    for text in texts:
        if (proposing := text.propose()) is not None:
            run(proposing)
    choose(texts)
    rows = [text.rows() for text in texts]
    n_rows, before = sum(len(one) for one in rows), clock.now
    batch.spend(n_rows, cost.n_past)
    seconds = clock.now - before
    follow(texts, n_rows, seconds)
    left = []
    for (text, target), one in zip(active, rows, strict=True):
        emitted = text.accept(target.decode(one), seconds)
        played.n_tokens += len(emitted.tokens)
        if emitted.finish_reason is None:
            left.append((text, target))
        else:
            text.end()
    played.n_rows += n_rows
    played.n_steps += 1
    return left
