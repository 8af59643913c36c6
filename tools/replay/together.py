"""Plays recorded texts several at a time: in each step one decode for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batching import clock as clocks
from batching.rows import Rows
from batching.target import Meanwhile, Output, Watch
from speculation.decode import Batch, step
from speculation.drafting.resources import Resources
from speculation.text import Text
from tools.replay.play import Replay, begun, check
from tools.replay.recording import Recorded
from tools.replay.target import Clock, Playback, PlaybackTarget


@dataclass
class Played:
    """What playing texts together took; prompts are not counted, which are read beforehand.

    n_steps  decodes of all texts together
    """

    n_tokens: int = 0
    n_rows: int = 0
    n_steps: int = 0
    seconds: float = 0.0


class _Silent(PlaybackTarget):
    """A text's own target, whose decodes take the time of the batch."""

    batch: _Together

    def spend(self, n_rows: int, n_past: int) -> None: ...

    def decode_row(self, token: int, position: int, seq_ids: range) -> Playback:
        self.batch.spend(1)
        return super().decode_row(token, position, seq_ids)


class _Together:
    """Decodes for several texts. Implements ``speculation.decode.Decoder``."""

    def __init__(self, target: PlaybackTarget, played: Played) -> None:
        self._target, self._played = target, played
        self.n_past = 0  # tokens that a row attends to, on average

    def decode(
        self,
        parts: Sequence[tuple[PlaybackTarget, Rows]],
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[Output]:
        self.spend(sum([len(rows) - rows.n_before for _, rows in parts]))
        return [target.decode(rows) for target, rows in parts]

    def spend(self, n_rows: int) -> None:
        self._target.spend(n_rows, self.n_past)
        self._played.n_rows += n_rows
        self._played.n_steps += 1


def run_together(replay: Replay, method: str, texts: Sequence[Recorded], n_places: int) -> Played:
    """Play ``texts`` in order, ``n_places`` at a time, each in the place of one that has ended."""
    clock, played = Clock(), Played()
    target = PlaybackTarget(
        replay.header.n_vocab, replay.cost(), clock, noise=replay.noise, hiccups=replay.hiccups
    )
    draft = replay.draft(clock) if replay.draft_seconds else None
    resources = replay.resources(draft)
    together, cost = _Together(target, played), resources.cost
    batch = Batch(together, cost)
    waiting, active = list(reversed(texts)), dict[Text, Recorded]()
    with clocks.using(clock):
        while waiting or active:
            while waiting and len(active) < n_places:
                recorded = waiting.pop()
                text = _begun(replay, method, recorded, resources, together, clock)
                active[text] = recorded
            n_past = sum(len(text.cache.tokens) for text in active) // len(active)
            together.n_past = cost.n_past = n_past
            step(list(active), batch)
            for text in [text for text in active if text.has_ended]:
                check(method, text, active.pop(text))
                played.n_tokens += text.stats.n_tokens
    played.seconds = clock.now
    return played


def _begun(
    replay: Replay,
    method: str,
    recorded: Recorded,
    resources: Resources,
    together: _Together,
    clock: Clock,
) -> Text:
    target = _Silent(replay.header.n_vocab, replay.cost(), clock)
    target.batch = together
    target.play(recorded)
    context = replay.draft(clock)
    context.text = recorded
    return begun(replay.method(method, clock, context), recorded, target, resources)
