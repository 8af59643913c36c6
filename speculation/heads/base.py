"""The two kinds of heads: those that see one state of the target, and those with a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.slots import Slots
from batching.target import Output, Target
from batching.together import Coroutine, done
from batching.tree import Floats


def silu(inner: Floats) -> Floats:
    """x / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) is infinite where SiLU is zero
        denominator: Floats = np.exp(-inner)
    denominator += 1.0
    return inner / denominator


class Head:
    """What the engine calls on a head. By default it has no context and keeps nothing of a text.

    attends_to_target  whether it attends to the target's KV cache and has none of its own
    """

    attends_to_target = False

    def start(self, params: ContextParams, target: Context) -> None:
        """Create the context; ``params.flash_attn`` must be on or off, as in ``target``."""

    def stop(self) -> None:
        """Free the context until the next start, for example while the target's is recreated."""

    def of_slot(self, index: int, n_slots: int) -> Head:
        """The head for one of several texts: itself if it keeps nothing of a text."""
        return self

    def close(self) -> None:
        """Free the context and the model. Idempotent."""


class HeadInContext(Head):
    """A head that takes the target's states, and whose layers llama.cpp runs in a context of its
    own. Close it with the target.

    It is autoregressive over states, as EAGLE's: a row of its context combines a token with the
    state before it. The result, ``Output.hidden``, is the predicted state at the token, which the
    row's children take; rows of the text take the target's states. DFlash's drafts blocks instead.

    needs_hidden    whether it takes the states after the target's final norm
    layers          the target's layers whose inputs (auxiliary hidden states) it takes
    tokens          the target's ids of the draft vocabulary, (n_drafted,); None = the whole one
    outputs_hidden  whether its rows have ``Output.hidden`` besides logits
    """

    needs_hidden = False
    layers: tuple[int, ...] = ()
    tokens: npt.NDArray[np.int32] | None = None
    outputs_hidden = True
    _context: Target | None = None
    _slots: Slots | None = None

    def __init__(self, model: Model) -> None:
        """``model`` has the head's layers; it is closed with the head."""
        self.model = model

    def start(self, params: ContextParams, target: Context) -> None:
        self.stop()
        self._context = self._make_context(params, target)
        self._context.want_hidden(self.outputs_hidden)

    def stop(self) -> None:
        if isinstance(self._context, Context):
            self._context.close()
            self._context = self._slots = None

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        return Context(self.model, params)

    @property
    def context(self) -> Target:
        """The head's own context."""
        if self._context is None:
            raise RuntimeError("start was not called before drafting")
        return self._context

    def of_slot(self, index: int, n_slots: int) -> HeadInContext:
        """Its context is a slot of this one's."""
        if self._slots is None:
            self._slots = Slots(self.context, n_slots)
            for slot in self._slots.slots:
                slot.wants_hidden = self.outputs_hidden
                slot.n_batch //= n_slots
        one = copy(self)
        one._context = self._slots.slots[index]
        return one

    def states_of(self, output: Output, row: int) -> Floats:
        """The states that it takes from a row of the target's output, (width,); a view."""
        return output.aux_hidden_states(row, self.layers)

    def encode(self, states: Floats) -> Coroutine[Floats]:
        """Convert the target's states, (n, width), to those that rows take, (n, n_embd)."""
        return done(states)

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        """The embeddings of rows, (n, n_embd), from their tokens and the states before them."""
        return states

    def close(self) -> None:
        self.stop()
        self.model.close()


@contextmanager
def opened(path: Path, target: Model, *, mtp: bool = False) -> Iterator[Model]:
    """A head's own model, on the devices of ``target``. It is closed if the body raises."""
    model = Model(path, placement=target.placement, mtp=mtp)
    try:
        yield model
    except BaseException:
        model.close()
        raise
