"""A llama.cpp context: rows in, logits out. The ctypes edge.

One ``llama_batch`` points into NumPy arrays for the life of the context, so a step fills slices
and allocates nothing. Return codes become exceptions here. Knows nothing about trees or methods.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.errors import (
    CacheFull,
    CannotRewind,
    ContextError,
    InvalidParameter,
    UnsupportedModel,
)
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.abort import DecodeWatch
from batching.llama.batch import BatchMemory, write_trace
from batching.llama.context_params import FLASH_ATTN, KV_TYPES, ContextParams, is_quantized
from batching.llama.create import (
    check_length,
    create_context,
    max_tokens,
    n_spare,
    out_of_memory,
)
from batching.llama.device_sampling import DeviceSampling
from batching.llama.log import recent_log
from batching.llama.model import Model
from batching.llama.native import NativeContext
from batching.llama.output import DecodeOutput, closed
from batching.llama.private_api import internal
from batching.pages import pages
from batching.rows import Rows, rows_back
from batching.target import Meanwhile, Output, Watch
from batching.tree import NO_LIMIT, Floats

__all__ = ["FLASH_ATTN", "KV_TYPES", "Context", "ContextParams"]

# A separate function object, since every step calls it: its arguments already have C types, so
# ctypes need not convert them.
_llama_decode: Any = C._lib["llama_decode"]
_PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # without the KV cache, which can be truncated
_ONE = (True,)  # outputs of a single row


class Context:
    """A ``llama_context`` with a unified KV cache and its batch memory.

    Any thread may close it; later use raises ContextError, or ModelError if the model is closed.

    Raises OutOfMemory if the cache does not fit into memory, UnsupportedModel if the model does not
    generate text, InvalidParameter if the context is longer than the model can read.
    """

    has_computed = False  # whether this process has had one: ggml reads switches once

    def __init__(
        self,
        model: Model,
        params: ContextParams | None = None,
        *,
        trace: str | Path | None = None,
        mtp: bool = False,
        other: Context | None = None,
        causal: bool = True,
    ) -> None:
        """Create a context for ``model``.

        trace   file that gets one JSON line per decode
        mtp     run the model's first multi-token-prediction layer; a row has a token and a state
        other   context whose embeddings and output matrix, or KV cache, this one shares
        causal  False: rows also attend to later rows of the same decode
        """
        params = params or ContextParams()
        self.model = model
        if model.is_head and other is None:
            raise UnsupportedModel(
                f"{model.path} ({model.description}) contains drafting heads, which do not "
                f"generate text by themselves; {TEXT_MODEL}"
            )
        if model.is_mtp_only and not mtp:
            raise UnsupportedModel(
                f"{model.path} contains only multi-token-prediction layers, not the model itself"
            )
        self._is_head = mtp or model.is_head
        if params.exact and model.n_window:
            raise UnsupportedModel(
                f"{model.path} ({model.description}) has a sliding window, whose cells are used "
                f"again in any order, so {{exact}} is not possible; load it without",
                settings=("exact",),
            )
        if not self._is_head:  # a head keeps to its target's length
            check_length(model, params)
        flash_attn = _flash_attn(model, params)
        shared = None if other is None else other.native
        native = create_context(model, params, flash_attn, mtp=mtp, other=shared)
        # Only the log tells.
        is_possible = "Flash Attention not supported" not in recent_log()
        self.flash_attn = flash_attn != "off" and is_possible
        if not causal:
            C.llama_set_causal_attn(native.handle, False)
        self._native: NativeContext | None = native
        Context.has_computed = True
        # Held in a decode, for which ``close`` waits. Reentrant, for closing it from a callback.
        self._lock = threading.RLock()
        self.params = params
        self.n_vocab = model.n_vocab
        self.n_ctx: int = min(C.llama_n_ctx(native.handle), model.n_positions)
        own = C.llama_n_ctx_seq(native.handle)  # cells that one text may use
        self.text_limit: int = min(own, self.n_ctx, max_tokens(model))  # tokens of one text
        self.n_batch: int = C.llama_n_batch(native.handle)
        self.n_seq_max: int = C.llama_n_seq_max(native.handle) - n_spare(model)
        self.n_threads: int = C.llama_n_threads(native.handle)
        self.n_rewind = NO_LIMIT
        if not (mtp or model.can_rewind):
            self.n_rewind = int(C.llama_n_rs_seq(native.handle))
        # Tokens in the window of layers that have a cache of their own for it; 0 = there are none.
        self._window = 0
        if n_spare(model) and other is None:
            partial, full = (
                C.llama_state_seq_get_size_ext(native.handle, 0, flags) for flags in (_PARTIAL, 0)
            )
            self._window = model.n_window if partial < full else 0
        # By sequence: rows of the last decode that can be rolled back, if limited.
        self._n_back: dict[int, int] = {}
        self._invalid: set[int] = set()  # sequences whose recurrent state a failed decode spoiled
        self._watch = DecodeWatch(model.n_bytes)
        # RPC workers are waited for at once.
        is_remote = any(device.is_remote for device in model.devices)
        self._has_device = not (model.n_host_layers or model.n_cpu_moe or is_remote)
        dual_input = mtp or model.dual_input
        self._batch = BatchMemory(self.n_batch, self.n_seq_max, dual_input=dual_input)
        self._sampling = DeviceSampling(model)
        self._output = DecodeOutput(native, model, self._sampling, is_head=self._is_head)
        self._features: BatchMemory | None = None  # for ``encode``, allocated on first use
        self._row_ids: range | None = None  # of the last ``decode_row``; None after another decode
        self.trace_path = trace
        self._trace = None if trace is None else _open_trace(Path(trace))
        model.users.add(self)
        if model.is_closed:  # by another thread, meanwhile
            self.close()
            raise closed(model)

    @property
    def native(self) -> NativeContext:
        """The native context, to be held while it is used. Raises as any use once closed."""
        native = self._native
        if native is None:
            raise closed(self.model)
        return native

    def decode(
        self,
        rows: Rows,
        watch: Watch | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Output:
        """Run one ``llama_decode``; the returned views are valid until the next one.

        Raises CacheFull if no cells are free, TreeError if the rows exceed the batch,
        ContextError if llama.cpp rejects them or fails, Cancelled if ``watch`` returns True; see
        ``Target``.
        """
        with self._lock:
            self._launch(self.native, rows, watch)
            if meanwhile is not None and self._has_device:
                meanwhile()
            self._output.fetch()
            return self._output

    def _launch(self, native: NativeContext, rows: Rows, watch: Watch | None) -> None:
        """Start a decode; a CPU has then computed it, a device may still compute."""
        self._row_ids = None
        if self._invalid and not self._invalid.isdisjoint(s for ids in rows.seq_ids for s in ids):
            raise ContextError("the state of a text was lost in a failed decode; start it again")
        if self._sampling.is_possible:
            self._sampling.prepare(native, rows)
        # A head's graph computes all rows, but llama.cpp copies only as many as have output.
        self._batch.fill(rows, all_output=self._is_head and self._output.has_hidden)
        if self._trace is not None:
            write_trace(self._trace, rows)
        n_rows = len(rows)
        if n_rows > self._watch.max_unwatched:
            self._decode_watched(native, n_rows, watch)
        elif code := _llama_decode(native.handle, self._batch.struct):
            raise self._error(code, n_rows)
        if self.n_rewind < NO_LIMIT:
            self._n_back = rows_back(rows, self.n_rewind)
        self._output.renew(rows.outputs)

    def _decode_watched(self, native: NativeContext, n_rows: int, watch: Watch | None) -> None:
        handle, struct = native.handle, self._batch.struct
        try:
            code = self._watch.run(handle, lambda: _llama_decode(handle, struct), watch)
        except BaseException:
            self._spoil()
            raise
        _ = self.native  # may be closed by now, in ``watch``
        if code:
            raise self._error(code, n_rows)

    def decode_row(self, token: int, position: int, seq_ids: range) -> Output:
        """See ``Target``. A row in the same sequences as the last changes only two numbers."""
        if seq_ids != self._row_ids or self._trace is not None:
            output = self.decode(Rows([token], [position], [seq_ids], _ONE))
            self._row_ids = seq_ids
            return output
        batch = self._batch
        with self._lock:
            native = self._native
            if native is None:
                raise closed(self.model)
            batch.first_token.value = token
            batch.first_pos.value = position
            code = _llama_decode(native.handle, batch.struct)
            if code:
                raise self._error(code, 1)
            self._n_back = {}
            self._output.renew_row(native)
            return self._output

    def _spoil(self) -> None:
        """A decode failed. It may have moved the state of any sequence, or half of it."""
        self._row_ids = None
        if self.n_rewind < NO_LIMIT:
            self._invalid.update(range(self.n_seq_max))

    def _error(self, code: int, n_rows: int) -> ContextError:
        if code == 1:  # nothing was decoded or moved
            return CacheFull(
                f"no room for {n_rows} rows in a KV cache of {self.n_ctx} cells; "
                f"shorten the prompt or raise {{n_ctx}}",
                settings=("n_ctx",),
                requested=n_rows,
                available=self.n_ctx,
            )
        self._spoil()
        log = recent_log()[-400:]
        if code == -2:
            return out_of_memory(f"not enough memory to compute {n_rows} rows ({log})", self.model)
        # A GPU may have room for the cache but not for the compute buffers.
        return ContextError(
            f"llama_decode returned {code} for {n_rows} rows: {log}; if memory is short, lower "
            f"{{n_ctx}} or {{n_gpu_layers}}",
            settings=("n_ctx", "n_gpu_layers"),
        )

    def want_hidden(self, wanted: bool) -> None:
        """See ``Target``. Raises UnsupportedModel if llama.cpp would abort."""
        if wanted and not self._is_head and self.model.n_embd_out != self.model.n_embd:
            # llama.cpp would copy states of the width its own draft layers take.
            raise UnsupportedModel(
                f"llama.cpp does not expose the hidden states of {self.model.path} "
                f"({self.model.description}), so heads cannot draft for it; use another method"
            )
        native = self.native
        # Each call makes llama.cpp rebuild its compute graph.
        if wanted != self._output.has_hidden:
            if self._is_head:
                internal("llama_set_embeddings_nextn")(native.handle, wanted, True)
            else:
                C.llama_set_embeddings(native.handle, wanted)
            self._output.has_hidden = wanted

    def want_layers(self, layers: Sequence[int]) -> None:
        """See ``Target``. Raises UnsupportedModel if llama.cpp does not expose them."""
        native = self.native
        if tuple(layers) == self._output.layers:
            return
        self.model.check_layer_inputs(layers)
        for layer in {*self._output.layers} ^ {*layers}:
            if layer == self.model.n_layer:
                internal("llama_set_embeddings_nextn")(native.handle, layer in layers, False)
            else:
                switch = internal("llama_set_embeddings_layer_inp")
                switch(native.handle, layer, layer in layers)
        self._output.layers = tuple(layers)

    def want_logits(self, wanted: bool) -> None:
        """See ``Target``."""
        if self._sampling.is_possible and self._sampling.wanted == wanted:
            self._sampling.wanted = not wanted
            self._row_ids = None

    def encode(self, features: Floats) -> Floats:
        """Run a head's encoder on features of its target, (n, width) -> (n, n_embd).

        Raises ContextError if llama.cpp rejects them or fails.
        """
        if self._features is None:
            self._features = BatchMemory(self.n_batch, self.n_seq_max)
        encoded: Floats = np.empty((len(features), self.model.n_embd_out), np.float32)
        for first in range(0, len(features), self.n_batch):
            end = first + self.n_batch
            self._encode(self._features, features[first:end], encoded[first:end])
        return encoded

    def _encode(self, batch: BatchMemory, chunk: Floats, encoded: Floats) -> None:
        n = len(chunk)
        with self._lock:
            native = self.native
            # Rows are encoded independently, but llama.cpp requires consecutive positions.
            start = C.llama_memory_seq_pos_max(native.memory, 0) + 1
            rows = Rows([0] * n, range(start, start + n), [range(1)] * n, [True] * n, chunk)
            batch.fill(rows)
            code = C.llama_encode(native.handle, batch.struct)
            if code:
                raise ContextError(f"llama_encode returned {code} for {n} rows of {chunk.shape[1]}")
            address = internal("llama_get_embeddings_nextn")(native.handle)
            buffer = (ctypes.c_float * encoded.size).from_address(address)
            encoded[:] = np.ctypeslib.as_array(buffer).reshape(encoded.shape)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        native = self.native
        if seq_id < 0 and p0 == 0 and p1 < 0:
            C.llama_memory_clear(native.memory, False)  # works for recurrent memory, too
            self._invalid.clear()
        elif self.n_rewind == NO_LIMIT:
            C.llama_memory_seq_rm(native.memory, seq_id, p0, p1)
        elif p0 == 0 and p1 < 0:
            C.llama_memory_seq_rm(native.memory, seq_id, 0, -1)
            self._invalid.discard(seq_id)
        else:
            self._roll_back(native, range(self.n_seq_max) if seq_id < 0 else [seq_id], p0)

    def _roll_back(self, native: NativeContext, seq_ids: Sequence[int], position: int) -> None:
        """Truncate sequences of a recurrent memory at ``position``.

        It keeps a copy of a sequence's state before each of its last rows in the last decode and
        can return to one of them, once. llama.cpp would silently accept older copies, too, so
        ``_n_back`` counts.
        """
        memory = native.memory
        past = {s: C.llama_memory_seq_pos_max(memory, s) + 1 - position for s in seq_ids}
        past = {s: n for s, n in past.items() if n > 0 or s in self._invalid}
        can_go_back = all(
            n <= self._n_back.get(s, 0) and s not in self._invalid for s, n in past.items()
        )
        if not can_go_back or not all(C.llama_memory_seq_rm(memory, s, position, -1) for s in past):
            raise CannotRewind(
                f"{self.model.path} ({self.model.description}) cannot roll back "
                f"{max(past.values())} tokens: its memory is recurrent; use method ar"
            )
        for s in past:
            self._n_back[s] = 0

    def has_window(self, seq_id: int, n_tokens: int) -> bool:
        """See ``Target``. llama.cpp reuses cells outside of it that one sequence alone has."""
        first: int = C.llama_memory_seq_pos_min(self.native.memory, seq_id) if self._window else 0
        return first <= max(0, n_tokens - self._window + 1)

    def save(self, seq_id: int) -> object:
        """Copy the recurrent part of a sequence's memory: megabytes, in main memory."""
        native = self.native
        size = C.llama_state_seq_get_size_ext(native.handle, seq_id, _PARTIAL)
        state = (ctypes.c_uint8 * size)()
        n_copied = C.llama_state_seq_get_data_ext(native.handle, state, size, seq_id, _PARTIAL)
        if not size or n_copied != size:
            raise ContextError(f"llama.cpp could not save the state of {self.model.path}")
        return state

    def restore(self, seq_id: int, state: Any, n_tokens: int) -> None:
        native, size = self.native, len(state)
        if C.llama_state_seq_set_data_ext(native.handle, state, size, seq_id, _PARTIAL) != size:
            raise ContextError(f"llama.cpp could not restore the state of {self.model.path}")
        self._n_back[seq_id] = 0
        self._invalid.discard(seq_id)
        C.llama_memory_seq_rm(native.memory, seq_id, n_tokens, -1)  # the KV cache part

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        native = self.native
        C.llama_memory_seq_cp(native.memory, source, dest, p0, p1)

    @property
    def can_share(self) -> bool:
        """Whether texts share cells: not if each has its own."""
        return not (self.params.exact and self.params.n_slots > 1)

    @property
    def can_repeat(self) -> bool:
        """Whether ``repeat`` works: not with a recurrent memory, nor with one sequence alone."""
        native = self.native
        can_shift = bool(C.llama_memory_can_shift(native.memory))
        has_two = self.n_seq_max > 1 and self.can_share
        return can_shift and self.n_rewind == NO_LIMIT and has_two

    def repeat(self, n_tokens: int) -> None:
        """Fill sequence 0 up to ``n_tokens`` with copies of itself, for measuring a long context.

        Costs copies and one rotation of the keys at the next decode, where decoding the tokens
        might take minutes. Uses sequence 1. Raises ContextError if llama.cpp makes no copy.
        """
        native = self.native
        memory = native.memory
        n = C.llama_memory_seq_pos_max(memory, 0) + 1
        state = self.copy_out(0)
        for first in range(n, n_tokens, n):
            if not self.copy_in(1, state):
                raise ContextError(f"llama.cpp could not copy {n} tokens of {self.model.path}")
            C.llama_memory_seq_rm(memory, 1, n_tokens - first, -1)
            C.llama_memory_seq_add(memory, 1, 0, -1, first)
            C.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            C.llama_memory_seq_rm(memory, 1, -1, -1)

    def copy_out(self, seq_id: int) -> Any:
        """A copy of a sequence in main memory: an array of bytes."""
        handle = self.native.handle
        sizes = [
            C.llama_state_seq_get_size_ext(handle, part, flags)
            for part, flags in self._windows(seq_id)
        ]
        state = pages(sum(sizes))
        start = 0
        for size, (part, flags) in zip(sizes, self._windows(seq_id), strict=True):
            piece = (ctypes.c_uint8 * size).from_buffer(state, start)
            C.llama_state_seq_get_data_ext(handle, piece, size, part, flags)
            start += size
        return state

    def _windows(self, seq_id: int) -> Iterator[tuple[int, int]]:
        """The copies that have all of a sequence, as sequences and flags: of layers with a sliding
        window, llama.cpp copies the last window alone."""
        yield seq_id, 0
        memory, spare = self.native.memory, self.n_seq_max
        first = C.llama_memory_seq_pos_min(memory, seq_id)
        end = C.llama_memory_seq_pos_max(memory, seq_id) + 1
        while self._window and (end := end - self._window) > first:
            C.llama_memory_seq_cp(memory, seq_id, spare, 0, end)
            yield spare, _PARTIAL
            C.llama_memory_seq_rm(memory, spare, -1, -1)

    def copy_in(self, seq_id: int, state: Any) -> bool:
        """Put a copy into an empty sequence; returns whether there was room."""
        native, spare = self.native, self.n_seq_max
        self._n_back[seq_id] = 0
        n_bytes = len(state)
        start = n = C.llama_state_seq_set_data(native.handle, state, n_bytes, seq_id)
        while n and start < n_bytes:  # the windows before the last
            piece = (ctypes.c_uint8 * (n_bytes - start)).from_buffer(state, start)
            n = C.llama_state_seq_set_data_ext(native.handle, piece, len(piece), spare, _PARTIAL)
            start += n
            C.llama_memory_seq_cp(native.memory, spare, seq_id, 0, -1)
            C.llama_memory_seq_rm(native.memory, spare, -1, -1)
        if not n:
            C.llama_memory_seq_rm(native.memory, seq_id, -1, -1)
        return bool(n)

    def use_threads(self, n: int) -> None:
        """Decode single rows on ``n`` threads; larger batches keep theirs."""
        handle = self.native.handle
        C.llama_set_n_threads(handle, n, C.llama_n_threads_batch(handle))
        self.n_threads = n

    @property
    def is_closed(self) -> bool:
        return self._native is None

    def close(self) -> None:
        """Free the context and close the trace, after a running decode. Idempotent.

        In a callback of the decode, which then raises, the context is freed when it has ended.
        """
        self._native = None  # before the wait: no other decode starts
        with self._lock:
            self._output.close()
            if self._trace is not None:
                self._trace.close()
                self._trace = None

    def forget(self) -> None:
        """Close it in a fork of its process, where whoever decodes is not."""
        self._native, self._lock = None, threading.RLock()
        self.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_trace(path: Path) -> IO[str]:
    try:
        # It tells what people wrote.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(file, "a", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(
            f"cannot write the batch trace {path}: {error.strerror}; give a file in a writable "
            f"folder"
        ) from None


def _flash_attn(model: Model, params: ContextParams) -> str:
    """``params.flash_attn``, or what auto means: on if it must be or on a CPU, until ``tune`` knows
    better. On a GPU llama.cpp decides: not every GPU supports every head size, and the CPU would
    then compute the attention."""
    if is_quantized(params.kv_type) or params.exact:
        return "on"
    if params.flash_attn == "auto" and model.n_host_layers >= model.n_layer:
        return "on"
    return params.flash_attn
