"""Why a reply was slow, and what would help: a sentence for a newcomer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from app.page.steps import milliseconds
from app.worker.messages import Done, StepRecord
from speculation.settings import DEFAULT_METHOD

SLOW = 0.95  # times plain decoding; below, a reply is said to be slow
SHARE = 0.4  # of the time, which is then the reason
PAUSE = 3  # times the median of the steps


def why_slow(done: Done, records: Sequence[StepRecord], ratio: float) -> str:
    """Empty if the reply was not slow. ``ratio`` is as in ``outcome``; 0: not known."""
    steps = records[1:]
    if _spent([one for one in steps if one.n_texts > 1]) > SHARE * _spent(steps):
        return "Other replies were written at the same time; alone, it would have been faster"
    drafted = [one for one in steps if one.n_texts == 1 and one.n_rows > 1]
    if not 0 < ratio < SLOW or not drafted:
        return ""
    spent, usual = _spent(drafted), median(map(milliseconds, drafted))
    pauses = [one for one in drafted if milliseconds(one) > PAUSE * usual]
    drafting = sum(one.draft_ms for one in drafted)
    if _spent(pauses) > SHARE * spent:
        told = f"{_spent(pauses) / 1e3:.1f} s went into {len(pauses)} of {len(drafted)} steps"
        if sum(one.draft_ms for one in pauses) > _spent(pauses) / 2:
            return f"{told}, in which what drafts read the text first; the next reply is faster"
        return f"{told}: the machine was busy, or the model was new to it. Try again"
    if drafting > SHARE * spent:
        sources = Counter(node.source for one in drafted for node in one.nodes)
        by = "the draft model" if "draft" in sources else next(iter(sources))
        help_ = "A smaller one" if "draft" in sources else "Another method"
        took = f"{by[0].upper()}{by[1:]} took {100 * drafting / spent:.0f}% of the time"
        return f"{took}. {help_} would help"
    if 2 * done.n_accepted < done.n_drafted:
        told = f"Only {done.n_accepted} of {done.n_drafted} drafts were right"
    else:
        told = "Most drafts were right, but verifying several tokens takes long on this machine"
    if done.method.startswith(DEFAULT_METHOD):
        return f"{told}. Auto learns from that and drafts less"
    return f"{told}. The method Auto drafts only where it pays"


def _spent(steps: Sequence[StepRecord]) -> float:
    return sum(map(milliseconds, steps))
