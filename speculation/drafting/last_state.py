"""LastState: the target's state that its last token was chosen from, for heads that start there."""

from __future__ import annotations

from collections.abc import Sequence

from batching.tree import Floats
from speculation.drafter import Step


class LastState:
    """The state after the last accepted token; unknown in a text's first step.

    It is that of the prompt's last but one token there, and a prompt is read without states: they
    would cost an output for each of its rows, to save one step of the whole text.
    """

    def __init__(self) -> None:
        self._hidden: Floats | None = None
        self._n_tokens = 0  # of the text that it belongs to, and its next token

    def forget(self) -> None:
        """Another text begins."""
        self._hidden = None

    def before(self, tokens: Sequence[int]) -> Floats | None:
        """The state that the last of ``tokens`` was chosen from, (n_embd,), if it was seen."""
        known = self._n_tokens == len(tokens)
        self._n_tokens = len(tokens)
        return self._hidden if known else None

    def see(self, step: Step) -> None:
        """The step that went on from ``tokens`` is over."""
        self._hidden = step.output.hidden(step.path[-1]).copy()
        self._n_tokens += len(step.path)
