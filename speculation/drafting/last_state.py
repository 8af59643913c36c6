"""LastState: the target's last hidden state, for heads that draft from it alone."""

from __future__ import annotations

from collections.abc import Sequence

from batching.tree import Floats
from speculation.drafter import Step


class LastState:
    """The state after the last accepted token; unknown in a text's first step.

    The first step would need a state from the prompt, which is decoded without hidden states: they
    would cost one output per prompt row, to save a single step.
    """

    def __init__(self) -> None:
        self._hidden: Floats | None = None
        self._n_tokens = 0  # length of the text including the token chosen from the state

    def reset(self) -> None:
        """Forget the state: another text begins."""
        self._hidden = None

    def get(self, tokens: Sequence[int]) -> Floats | None:
        """The state the last of ``tokens`` was chosen from, (n_embd,); None if unknown."""
        known = self._n_tokens == len(tokens)
        self._n_tokens = len(tokens)
        return self._hidden if known else None

    def observe(self, step: Step) -> None:
        """Store the state of the last accepted node."""
        self._hidden = step.output.hidden(step.path[-1]).copy()
        self._n_tokens += len(step.path)
