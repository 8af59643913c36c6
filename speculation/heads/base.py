"""What drafting needs of heads over the target's states, and the base of those llama.cpp runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.target import Output, Target
from batching.tree import Floats


class StateHead(Protocol):
    """A head that is fed with the target's states, in a context of its own."""

    @property
    def context(self) -> Target:
        """The head's own context."""
        ...

    @property
    def drafts_blocks(self) -> bool:
        """Whether it drafts several tokens at once, and does not go on from them."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Whether the states after the target's final norm are what it reads."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of which layers of the target it reads the inputs."""
        ...

    def states_of(self, output: Output, row: int) -> Floats:
        """What the head reads of a row of the target, (width,); a view."""
        ...


class DraftHead(StateHead, Protocol):
    """A head that is autoregressive over states, as EAGLE's are.

    A row of its context takes a token and the state before it, and gives the state after it: the
    target's where that is known, or what the row above gave. ``Output.hidden`` of its context is
    what a row below takes as its state.
    """

    @property
    def attends_to_target(self) -> bool:
        """Whether it reads the target's KV cache, and so has none of its own."""
        ...

    def encode(self, states: Floats) -> Floats:
        """What was read of the target, (n, width), as the states that rows take, (n, n_embd)."""
        ...

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        """The embeddings of rows, (n, n_embd), from their tokens and the states before them."""
        ...

    @property
    def tokens(self) -> npt.NDArray[np.int32] | None:
        """The target's ids of the tokens of its logits, (n_drafted,), where they are not all."""
        ...


class BlockHead(StateHead, Protocol):
    """A head that drafts a block of tokens in one decode."""

    @property
    def n_drafts(self) -> int:
        """Tokens that a block drafts at most."""
        ...

    def block(self, last: int, n_drafts: int) -> list[int]:
        """The rows that draft ``n_drafts`` tokens after the text's last one."""
        ...

    def candidates(self, output: Output, depth: int, above: int, most: int) -> Floats:
        """The likeliest tokens, best first, and their probabilities, (2, n) with n <= ``most``.

        For the draft at ``depth`` below the text's last token (0 = the next), where the one before
        it is ``above``; ``output`` is that of the block.
        """
        ...


class HeadInContext:
    """A head whose layer llama.cpp runs, in a context of its own. Close it with the target.

    gives_states  whether its rows give more than logits: ``Output.hidden``
    """

    attends_to_target = False
    drafts_blocks = False
    gives_states = True

    def __init__(self, model: Model) -> None:
        """``model`` is what llama.cpp is to run; it is closed with the head."""
        self.model = model
        self._context: Context | None = None

    def start(self, params: ContextParams, target: Context) -> None:
        """Make the context, by what the target's is: ``flash_attn`` on or off."""
        self.stop()
        self._context = self._make_context(params, target)
        self._context.want_hidden(self.gives_states)

    def stop(self) -> None:
        """Free the context until the next start, as where that of the target is made anew."""
        if self._context is not None:
            self._context.close()
            self._context = None

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        return Context(self.model, params)

    @property
    def context(self) -> Context:
        if self._context is None:
            raise RuntimeError("start was not called before drafting")
        return self._context

    def close(self) -> None:
        """Free context and layer. Idempotent."""
        self.stop()
        self.model.close()
