"""What all trainings of heads have in common: the steps down, and what they are judged by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from speculation.train import TrainError
from speculation.train.states import States

_WARM_UP = 0.03  # share of the steps
_LAST_RATE = 0.05  # of the learning rate, at the end


def rate_at(step: int, n_steps: int) -> float:
    """The learning rate as a share of the highest: a short rise, then down along a cosine."""
    warm_up = max(1, int(_WARM_UP * n_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    along = (step - warm_up) / max(1, n_steps - warm_up)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * along))


def held_out_from(states: States, share: float) -> int:
    """The first token of the pieces that are held out: the last ones, one at least.

    Only pieces count that have something to learn, so that heads are judged by some: a prompt
    without room for a reply has none. Raises TrainError when nothing would be left.
    """
    # Heads learn from the state before a token what the target says after it.
    is_some = np.append(states.until[1:], 0) > np.arange(len(states)) + 2
    bounds = itertools.pairwise([0, *states.ends])
    some = [start for start, end in bounds if is_some[start:end].any()]
    if not some:
        raise TrainError("no token of the data can be learnt from; give longer texts")
    n_held_out = max(1, round(share * len(some)))
    if len(some) - n_held_out < 1:
        raise TrainError(
            f"the data make {len(some)} piece of text, and some must be held out; give more"
        )
    return int(some[-n_held_out])


class Descent:
    """AdamW along the schedule, a step for each loss."""

    def __init__(
        self,
        parameters: Iterable[Any],
        rate: float,
        n_steps: int,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """``progress(step, n_steps, loss)`` is called after each step."""
        import torch

        self._parameters = [p for p in parameters if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=rate, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: rate_at(step, n_steps)
        )
        self._clip = torch.nn.utils.clip_grad_norm_
        self._n_done, self._n_steps, self._progress = 0, n_steps, progress

    def step(self, loss: Any) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._clip(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._n_done += 1
        if self._progress is not None:
            self._progress(self._n_done, self._n_steps, loss.item())
