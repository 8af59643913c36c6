"""Texts whose prompt matters for itself: its tokens' probabilities, or that it is read anew."""

from __future__ import annotations

from collections.abc import Callable

from batching.cache import Reading, SequenceCache
from batching.target import Output
from speculation.request import Request
from speculation.sampling import token_logprobs
from speculation.text import Text


def needs_scored_text(request: Request) -> bool:
    """Whether a request's text must be a ``ScoredText``."""
    return request.reads_all or request.max_tokens == 0


class ScoredText(Text):
    """A text whose prompt is read to its end before it is written, and perhaps anew.

    If its request wants the prompt's log probabilities, every row of the prompt has output: row i
    has the probability of token i + 1. The rows ride in the same batches as those of other texts,
    so that nobody waits longer than for any other prompt.
    """

    def _read(self, cache: SequenceCache) -> Reading:
        request = self.request
        if request.scored is not None:
            cache.target.want_logits(True)
        return Reading(
            cache,
            request.prompt[:-1],
            self.needed.prompt_reader,
            reuse=not request.reads_all,
            score=self._score if request.scored is not None else None,
        )

    def _score(self, first: int, n: int, output: Output) -> None:
        """Hand out the log probabilities of the tokens after ``first`` to ``first + n``."""
        request = self.request
        assert request.scored is not None
        following, n_top = request.prompt[first + 1 : first + n + 1], request.logprobs or 0
        request.scored(
            [
                token_logprobs(output.logits(row), token, n_top)
                for row, token in enumerate(following)
            ]
        )

    def _end_reading(self) -> None:
        super()._end_reading()
        if self.request.max_tokens == 0:
            self.end("length")

    def _leaving(self) -> list[Callable[[], object]]:
        if self._chain is None:  # it never started
            return super()._leaving()
        return [*super()._leaving(), lambda: self.cache.target.want_logits(False)]
