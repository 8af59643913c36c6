"""Shared by all training: the learning-rate schedule, AdamW, and the held-out split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from speculation.train import TrainError
from speculation.train.states import States

_WARM_UP = 0.03  # share of the steps
_FINAL_RATE = 0.05  # learning rate at the last step, as a share of its peak


def rate_at(step: int, n_steps: int) -> float:
    """The learning rate as a share of its peak: linear warm-up, then cosine decay."""
    warm_up = max(1, int(_WARM_UP * n_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, n_steps - warm_up)
    return _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def held_out_start(states: States, share: float) -> int:
    """Index of the first held-out token. The last ``share`` of the sequences is held out, at least
    one.

    Counts only sequences with a token to train on, so that the evaluation has some too: a prompt
    without room for a reply has none. Raises TrainError if no sequence is left for training.
    """
    # From the state before a token, heads learn the target's choice after it: two tokens ahead.
    trainable = np.append(states.span_end[1:], 0) > np.arange(len(states)) + 2
    bounds = itertools.pairwise([0, *states.ends])
    starts = [start for start, end in bounds if trainable[start:end].any()]
    if not starts:
        raise TrainError("the data has no token to train on; give longer texts")
    n_held_out = max(1, round(share * len(starts)))
    if len(starts) - n_held_out < 1:
        raise TrainError("the data has only one sequence, and one must be held out; give more")
    return int(starts[-n_held_out])


class ScheduledAdamW:
    """AdamW with the learning-rate schedule and gradient clipping; one step per loss."""

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
