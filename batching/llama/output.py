"""Logits and hidden states of a decode: views of llama.cpp's buffers. Part of the ctypes edge."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.llama.device_sampling import DeviceSampling
from batching.llama.model import Model
from batching.llama.private_api import internal
from batching.tree import Floats

# A separate function object, since every step calls it: returns the address as an int.
_logits_address: Any = C._lib["llama_get_logits"]
_logits_address.restype = ctypes.c_void_p


class DecodeOutput:
    """Logits and hidden states of the last decode, as views of llama.cpp's buffer.

    has_hidden  hidden states are on, so every row has output
    layers      layers whose inputs are available, for every row
    """

    def __init__(
        self, handle: Any, model: Model, sampling: DeviceSampling, *, is_head: bool
    ) -> None:
        """``is_head``: hidden states are the next row's input, not the output matrix's."""
        self._handle = handle
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
        self._n_before = 0
        self._all = False  # every row has output, so logits are indexed by row

    def renew(self, outputs: Sequence[bool], n_before: int = 0) -> None:
        """Point the views at the decode just run. ``outputs``: which rows have output."""
        self._hidden = None
        if self._inputs:
            self._inputs = {}
        if self.has_hidden:
            outputs = [True] * len(outputs)
        n_outputs = sum(outputs)
        self._outputs = outputs
        self._n_before = n_before
        self._all = n_outputs == len(outputs) and not n_before
        address = _logits_address(self._handle)  # also waits for the decode to finish
        if (
            n_outputs
            and not self._sampling.is_on
            and (address != self._address or n_outputs > len(self._logits))
        ):
            self._address = address
            buffer = (ctypes.c_float * (n_outputs * self.n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(buffer).reshape(n_outputs, self.n_vocab)
            self._views = list(self._logits)

    def renew_row(self) -> None:
        """Faster ``renew`` for a single row after another."""
        address = _logits_address(self._handle)  # also waits for the decode to finish
        if self._sampling.is_on:
            return
        if address != self._address or self._hidden is not None or self._inputs:
            self.renew(self._outputs)

    def _row(self, row: int) -> int:
        if self._all:
            return row
        index = self._n_before + row
        if self._outputs[index]:
            return sum(self._outputs[:index])
        raise IndexError(f"row {row} of this batch has no output: its logits were not requested")

    def logits(self, row: int) -> Floats:
        if self._sampling.is_on:
            raise RuntimeError("logits were not requested before this decode")
        return self._views[self._row(row)]

    def argmax(self, row: int) -> int:
        if self._sampling.is_on:
            return self._sampling.choice(self._n_before + row)
        return int(self._views[row if self._all else self._row(row)].argmax())

    def argmaxes(self, first: int, n: int) -> list[int]:
        if not n:
            return []
        if self._sampling.is_on:
            return [self._sampling.choice(self._n_before + row) for row in range(first, first + n)]
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
            if self._is_head:
                pointer = internal("llama_get_embeddings_nextn")(self._handle)
            else:
                pointer = C.llama_get_embeddings(self._handle)
            shape = (len(self._outputs), self._model.n_embd_out)
            self._hidden = np.ctypeslib.as_array(pointer, shape=shape)
        hidden: Floats = self._hidden[self._n_before + row]
        return hidden

    def aux_hidden_states(self, row: int, layers: Sequence[int]) -> Floats:
        inputs = self._inputs
        row += self._n_before
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
            pointer, width = internal("llama_get_embeddings_nextn")(self._handle), model.n_embd_out
        else:
            pointer = internal("llama_get_embeddings_layer_inp")(self._handle, layer)
            width = model.n_embd
        inputs: Floats = np.ctypeslib.as_array(pointer, (len(self._outputs), width))
        return inputs
