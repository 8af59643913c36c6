"""Meter: counts a sequence's steps, times them, and records them for whoever asks for that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batching.clock import now
from batching.tree import TokenTree
from speculation.drafter import PlainSteps

STRUCTURE = "structure"  # the source of drafts that a schema or grammar forces
PHASES = ("draft", "build", "decode", "verify", "commit")


@dataclass(slots=True)
class Stats:
    """Counters and times of a generation. Seconds are wall-clock.

    n_prompt         prompt tokens
    n_reused         prompt tokens reused from the KV cache
    n_read           prompt tokens decoded: fewer if the text was cancelled before
    n_tokens         generated tokens, including an end-of-generation token
    n_first          tokens of the first step, which counts as prefill
    n_steps          target decodes after the prompt, one per step
    n_rows           rows in those decodes, without the prompt's
    n_drafted        draft tokens
    n_accepted       draft tokens that became text
    n_expected       how many were expected to, as ``auto`` chose them; 0 for other methods
    prefill_seconds  time to the first token: the prompt, the drafters' preparation, and the first
                     step, which also decodes the end of the prompt
    first_seconds    the part of ``prefill_seconds`` for the first step's drafts, by their rows
    decode_seconds   from the first step's end to the last one's; in between, other texts may be
                     served, too
    phase_seconds    decode_seconds by phase; the difference to the sum is the loop itself, and what
                     was done for other texts
    rows_histogram   rows of a step -> number of steps
    tokens_histogram  tokens of a step -> number of steps
    accepted_by_source  draft source -> accepted tokens; empty for methods with one source
    """

    n_prompt: int = 0
    n_reused: int = 0
    n_read: int = 0
    n_tokens: int = 0
    n_first: int = 0
    n_steps: int = 0
    n_rows: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_expected: float = 0.0
    prefill_seconds: float = 0.0
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rows_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tokens_histogram: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Excludes the first step; 0 if there was no other."""
        return rate(self.n_tokens, self.n_first, self.decode_seconds)

    @property
    def tokens_per_step(self) -> float:
        """Tokens generated per target decode (mean acceptance length)."""
        return self.n_tokens / self.n_steps if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0


def rate(n_tokens: int, n_first: int, decode_seconds: float) -> float:
    """Tokens per second without the first step, which made ``n_first``; 0 if there was no other."""
    return (n_tokens - n_first) / decode_seconds if decode_seconds else 0.0


class Draft(NamedTuple):
    """A draft of a step.

    parent  the number of the draft before it, or -1 for the root, the text's last token
    source  who drafted it: a source of ``auto``, ``structure``, or the method
    """

    parent: int
    token: int
    source: str


class RecordedStep(NamedTuple):
    """A step of a text. Seconds are wall-clock, without the loop's own: some microseconds.

    draft_seconds   drafting and building the batch's rows
    decode_seconds  the decode, of all rows in the batch
    accept_seconds  verifying, committing, and what the drafters learn
    n_rows          rows of this text's tree; the first decode has those of the prompt's end, too
    n_texts         texts with rows in the batch, including those whose prompts are read
    drafts          in the order of their rows
    path            numbers of the drafts that became text
    bonus           the token that the model added; None if the text ended before it

    In a run of plain steps, each decode is timed; drafting and accepting are the run's average.
    """

    draft_seconds: float
    decode_seconds: float
    accept_seconds: float
    n_rows: int
    n_texts: int = 1
    drafts: Sequence[Draft] = ()
    path: Sequence[int] = ()
    bonus: int | None = None


def drafts_of(tree: TokenTree, method: str, forced: Sequence[int] = ()) -> list[Draft]:
    """The drafts of ``tree``, which a text's ``method`` made.

    ``forced`` are the tokens that the text's structure forces. Drafts of them are its own, unless
    ``auto`` has said otherwise.
    """
    names = dict.fromkeys(tree.follow(0, forced), STRUCTURE) | tree.sources
    return [
        Draft(tree.parents[node] - 1, tree.tokens[node], names.get(node, method))
        for node in range(1, tree.n_drafted + 1)
    ]


class Meter:
    """Counts and times the steps of a sequence.

    submitted   when it was asked for
    draft_seconds, build_seconds  of the present step, before its decode
    """

    def __init__(self, stats: Stats, steps: list[RecordedStep] | None) -> None:
        """``stats`` gets the counters; ``steps`` gets the steps, unless it is None."""
        self.stats, self._steps = stats, steps
        self.submitted = self._started = self._since = self._last = now()
        self.draft_seconds = self.build_seconds = 0.0

    def start(self, n_reused: int) -> None:
        """The prompt begins to be read, ``n_reused`` tokens of which need not be."""
        self._started = now()
        self.stats.n_reused = n_reused

    def stop(self, n_read: int) -> None:
        """It ended before its first step, when ``n_read`` tokens of the prompt were read."""
        self.stats.n_read = n_read
        self.stats.prefill_seconds = now() - self._started

    def lap(self) -> float:
        """Seconds since the last one."""
        last, self._last = self._last, now()
        return self._last - last

    def add_step(
        self,
        tree: TokenTree,
        drafts: Sequence[Draft],
        path: Sequence[int],
        tokens: Sequence[int],
        n_prompt: int,
        n_texts: int,
        seconds: Sequence[float],
    ) -> None:
        """Count a step that ended with the last lap.

        tree     as decoded with the last ``n_prompt`` tokens of the prompt; ``drafts``, the same
        path     its accepted nodes
        tokens   what became text of those and the bonus token
        seconds  of decoding, verifying, committing, and of what the drafters learnt
        """
        decoding, verifying, committing, learning = seconds
        proposing = self.draft_seconds + self.build_seconds
        accepting = verifying + committing + learning
        stats, n, n_rows = self.stats, len(tokens), len(tree)
        if not stats.n_steps:
            self._since = self._last
            stats.n_first, stats.n_read = n, stats.n_prompt - stats.n_reused
            stats.prefill_seconds = self._last - self._started
            share = (n_rows - 1) / (n_prompt + n_rows)
            stats.first_seconds = share * (proposing + decoding + accepting)
        else:
            phases = stats.phase_seconds
            stats.decode_seconds = self._last - self._since
            phases["draft"] += self.draft_seconds + learning
            phases["build"] += self.build_seconds
            phases["decode"] += decoding
            phases["verify"] += verifying
            phases["commit"] += committing
        stats.n_tokens += n
        stats.n_steps += 1
        stats.n_rows += n_rows
        stats.n_drafted += tree.n_drafted
        stats.rows_histogram[n_rows] += 1
        stats.tokens_histogram[n] += 1
        accepted = path[1 : n + 1]
        stats.n_accepted += len(accepted)
        if tree.sources:
            counts = stats.accepted_by_source
            for node in accepted:
                source = tree.sources.get(node, STRUCTURE)
                counts[source] = counts.get(source, 0) + 1
        if self._steps is not None:
            nodes, bonus = [node - 1 for node in accepted], tokens[-1] if n == len(path) else None
            spent = proposing, decoding, accepting
            self._steps.append(RecordedStep(*spent, n_rows, n_texts, drafts, nodes, bonus))

    def add_plain(
        self, steps: PlainSteps, drafting: float, verifying: float, n_texts: int = 1
    ) -> None:
        """Count steps of one row and one token each, which ended with the last lap. The seconds of
        drafting and verifying are those of all of them."""
        stats, phases, n = self.stats, self.stats.phase_seconds, len(steps.tokens)
        stats.n_tokens += n
        stats.n_steps += n
        stats.n_rows += n
        stats.rows_histogram[1] += n
        stats.tokens_histogram[1] += n
        stats.decode_seconds = self._last - self._since
        phases["draft"] += drafting
        phases["decode"] += sum(steps.seconds)
        phases["verify"] += verifying
        if self._steps is not None:
            self._steps += [
                RecordedStep(drafting / n, seconds, verifying / n, 1, n_texts, bonus=token)
                for token, seconds in zip(*steps, strict=True)
            ]
