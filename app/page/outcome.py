"""What came of a reply's drafts: a sentence for a newcomer, and the figures behind it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.worker.messages import Done, StepRecord


@dataclass(frozen=True)
class Outcome:
    """What is said below a reply.

    sentence  for a newcomer
    figures   (label, value), for those who want to know more
    """

    sentence: str
    figures: tuple[tuple[str, str], ...]


def outcome(
    done: Done,
    records: Sequence[StepRecord] = (),
    message: str = "",
    *,
    plain: Done | None = None,
    plain_speed: float = 0.0,
    n_left_out: int = 0,
) -> Outcome:
    """What to say of a reply that ended with ``done``.

    records      its steps, or nothing if they were not recorded
    message      what the user wrote, to tell what was copied from it
    plain        the end of a plain run of the same request, if there was one
    plain_speed  tokens per second of plain decoding with this model, measured earlier; 0 = unknown
    n_left_out   how many earlier turns the prompt left out
    """
    raise NotImplementedError
