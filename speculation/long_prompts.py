"""Reads long prompts in a context of their own, while other texts are written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from batching.clock import now
from batching.errors import CacheFull, OutOfMemory
from batching.llama.context import Context
from batching.prompt_context import PromptContext
from batching.slots import Slot
from batching.tree import NO_LIMIT
from speculation.average import Average
from speculation.drafting.cost import SIZES, Cost
from speculation.runtime import Runtime
from speculation.sequence import TokenSequence

log = logging.getLogger(__name__)

_LONG = 32  # tokens of a prompt that are worth a decode of their own
_CELLS = 2048  # longer prompts are read beside other texts


class LongPrompts:
    """Decides which prompts are read in a context of their own, and how much of them in a step."""

    def __init__(self, small: Context, shared: Context, cost: Cost) -> None:
        self._small = small
        self._prompts = PromptContext(small, shared)
        # At first more than a prompt's row takes.
        self._row_seconds = Average(0.001, cost.row_seconds)

    @classmethod
    def open(cls, runtime: Runtime, n_seq_max: int, max_seconds: float) -> LongPrompts | None:
        """For texts with ``n_seq_max`` sequences each, which wait ``max_seconds`` at most.

        None if a model is too slow to read 64 rows in that time, if it cannot drop branches, if its
        cells are not in main memory, or if that is too small.
        """
        context, resources = runtime.context, runtime.resources
        model = context.model
        is_possible = context.n_rewind == NO_LIMIT and n_seq_max > 1
        is_on_cpu = model.n_host_layers == model.n_layer
        if not (is_possible and is_on_cpu) or context.n_batch < _LONG:
            return None
        cost = resources.cost
        if cost.row_seconds * SIZES[-1] > max_seconds:
            return None
        params = replace(
            context.params,
            n_ctx=min(_CELLS, context.n_ctx),
            n_seq_max=2,
            flash_attn="on" if context.flash_attn else "off",
        )
        try:
            return cls(Context(model, params), context, cost)
        except OutOfMemory as error:
            log.info("long prompts are read beside other texts: %s", error)
            return None

    def close(self) -> None:
        self._small.close()

    def takes(self, text: TokenSequence) -> bool:
        """Whether what is left of a prompt is to be read here."""
        reading = text.reading
        assert reading is not None
        is_short = reading.n_left < _LONG or len(text.request.prompt) > self._small.n_ctx
        return not (is_short or reading.needs_output)

    def read(self, texts: Sequence[TokenSequence], seconds: float) -> None:
        """Read prompts that it ``takes``, one after another, for about so many ``seconds``."""
        end = now() + seconds
        for i, text in enumerate(texts):
            n_left = int((end - now()) / self._row_seconds.value)
            n_most = min(n_left, self._small.n_batch)
            if n_most < _LONG:
                if i:
                    return
                n_most = _LONG  # the first one goes on in any case
            with text:
                self._read_piece(text, n_most)

    def _read_piece(self, text: TokenSequence, n_most: int) -> None:
        """Read at most ``n_most`` tokens of a prompt. At its end, it begins."""
        assert text.reading is not None and isinstance(text.cache.target, Slot)
        slot = text.cache.target
        slot.n_batch = n = min(n_most, text.reading.n_left)
        with self._row_seconds.timing(n):
            rows = text.next_piece(n)
            assert rows is not None
            if not self._prompts.read(text.request.prompt, slot, rows):
                raise CacheFull(f"no room for {n} tokens of a prompt")
        text.take_piece(None)
        if not text.reading.n_left:
            text.next_piece(n)
