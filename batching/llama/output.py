"""Logits and hidden states of a decode: views of llama.cpp's buffers. Part of the ctypes edge."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.errors import ContextError, ModelError
from batching.llama.device_sampling import DeviceSampling
from batching.llama.model import Model
from batching.llama.native import NativeContext
from batching.llama.private_api import internal
from batching.tree import Floats

# Separate function objects, which return addresses as ints.
_logits_address: Any = C._lib["llama_get_logits"]
_embeddings_address: Any = C._lib["llama_get_embeddings"]
_logits_address.restype = _embeddings_address.restype = ctypes.c_void_p


class DecodeOutput:
    """Logits and hidden states of the last decode, as views of llama.cpp's buffers.

    The buffers live as long as a view of them. Raises ContextError once the context is closed.

    has_hidden  hidden states are on, so every row has output
    layers      layers whose inputs are available, for every row
    """

    def __init__(
        self, native: NativeContext, model: Model, sampling: DeviceSampling, *, is_head: bool
    ) -> None:
        """``is_head``: hidden states are the next row's input, not the output matrix's."""
        self._native: NativeContext | None = native
        self._model = model
        self.n_vocab = model.n_vocab
        self._sampling = sampling
        self._is_head = is_head
        self.has_hidden = False
        self.layers: tuple[int, ...] = ()
        self._inputs: dict[int, Floats] = {}  # by layer, fetched on demand
        self._hidden: Floats | None = None
        self._address = 0
        self._logits: Floats = np.zeros((0, model.n_vocab), np.float32)
        self._views: list[Floats] = []  # one view per row of logits
        self._outputs: Sequence[bool] = ()
        self._n_outputs = 0
        self._all = False  # every row has output, so logits are indexed by row

    def close(self) -> None:
        """Give up the buffers."""
        self._native = self._hidden = None
        self._inputs, self._views = {}, []
        self._logits = np.zeros((0, self.n_vocab), np.float32)
        self._address, self._all = 0, False

    @property
    def _open(self) -> NativeContext:
        if self._native is None:
            raise closed(self._model)
        return self._native

    def renew(self, outputs: Sequence[bool]) -> None:
        """A decode has started. ``outputs``: which of its rows have output."""
        self._hidden = None
        if self._inputs:
            self._inputs = {}
        if self.has_hidden:
            outputs = [True] * len(outputs)
        self._n_outputs = sum(outputs)
        self._outputs = outputs
        self._all = self._n_outputs == len(outputs)

    def fetch(self) -> None:
        """Wait until the decode is done, and point the views at its output."""
        n_outputs = self._n_outputs
        address = _logits_address(self._open.handle)  # waits
        if (
            n_outputs
            and not self._sampling.is_on
            and (address != self._address or n_outputs > len(self._logits))
        ):
            self._address = address
            self._logits = self._view(address, n_outputs, self.n_vocab)
            self._views = list(self._logits)

    def renew_row(self, native: NativeContext) -> None:
        """Faster ``renew`` for a single row after another."""
        address = _logits_address(native.handle)  # waits
        if self._sampling.is_on:
            return
        if address != self._address or self._hidden is not None or self._inputs:
            self.renew(self._outputs)
            self.fetch()

    def _view(self, address: int, n_rows: int, width: int) -> Floats:
        """A view of a buffer, (n_rows, width)."""
        buffer: Any = (ctypes.c_float * (n_rows * width)).from_address(address)
        buffer.owner = self._open
        return np.ctypeslib.as_array(buffer).reshape(n_rows, width)

    def _row(self, row: int) -> int:
        if self._all:
            return row
        _ = self._open
        if self._outputs[row]:
            return sum(self._outputs[:row])
        raise IndexError(f"row {row} of this batch has no output: its logits were not requested")

    def logits(self, row: int) -> Floats:
        if self._sampling.is_on:
            raise RuntimeError("logits were not requested before this decode")
        return self._views[self._row(row)]

    def argmax(self, row: int) -> int:
        if self._sampling.is_on:
            return self._sampling.choice(self._open, row)
        return int(self._views[row if self._all else self._row(row)].argmax())

    def argmaxes(self, first: int, n: int) -> list[int]:
        if not n:
            return []
        if self._sampling.is_on:
            return [self.argmax(row) for row in range(first, first + n)]
        start, end = self._row(first), self._row(first + n - 1) + 1
        if end - start != n:
            raise IndexError(f"not all of the rows {first} to {first + n - 1} have output")
        tokens: list[int] = self._logits[start:end].argmax(axis=1).tolist()
        return tokens

    def hidden(self, row: int) -> Floats:
        if self._hidden is None:
            if not self.has_hidden:
                raise RuntimeError("hidden states were not requested before this decode")
            # They follow the logits, so their address depends on this batch's number of rows.
            get = internal("llama_get_embeddings_nextn") if self._is_head else _embeddings_address
            address = get(self._open.handle)
            self._hidden = self._view(address, len(self._outputs), self._model.n_embd_out)
        hidden: Floats = self._hidden[row]
        return hidden

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        inputs = self._inputs
        for layer in layers:
            if layer not in inputs:
                inputs[layer] = self._inputs_of(layer)
        if len(layers) == 1:
            single: Floats = inputs[layers[0]][row]
            return single
        return np.concatenate([inputs[layer][row] for layer in layers])

    def _inputs_of(self, layer: int) -> Floats:
        """The inputs of a layer, (n_rows, n_embd)."""
        model = self._model
        if layer not in self.layers:
            raise RuntimeError(f"inputs of layer {layer} were not requested before this decode")
        if layer == model.n_layer:
            address = internal("llama_get_embeddings_nextn")(self._open.handle)
            return self._view(address, len(self._outputs), model.n_embd_out)
        address = internal("llama_get_embeddings_layer_inp")(self._open.handle, layer)
        return self._view(address, len(self._outputs), model.n_embd)


def closed(model: Model) -> Exception:
    """The error for use of a context that is closed, or of one whose model is."""
    if model.is_closed:
        return ModelError(f"the model {model.path} is closed; load it again")
    return ContextError(f"the context of {model.path} is closed; create it or load the model again")
