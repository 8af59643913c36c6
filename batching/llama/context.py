"""A llama.cpp context: rows in, logits out. The ctypes edge.

The batch memory is NumPy arrays that one ``llama_batch`` points into for the life of the context,
so a step fills slices and allocates nothing. Return codes become exceptions here. Nothing in this
module knows of trees or methods.
"""

from __future__ import annotations

import atexit
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import llama_cpp.llama_cpp as C
import numpy as np

from batching.errors import (
    CacheFull,
    CannotRewind,
    ContextError,
    DecodeFailed,
    InvalidParameter,
    OutOfMemory,
    UnsupportedModel,
)
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.abort import DecodeWatch
from batching.llama.batch import BatchMemory, write_trace
from batching.llama.hardware import available_memory, physical_cores
from batching.llama.interrupts import held_interrupts
from batching.llama.model import Model, recent_log, whole_log
from batching.llama.output import DecodeOutput
from batching.llama.private_api import check_taps, internal
from batching.rows import Rows
from batching.target import Output, Watch
from batching.timing import all_over_one, log_ratio
from batching.tree import NO_LIMIT, Floats

MAX_SEQUENCES = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS; with ever more the process ends
MOST_REWIND = 16  # with more, llama.cpp ends the process over graphs of LFM2 models of usual size
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml_type
KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # a value; q8_0 has a scale for each 32
# A function object of our own for what every step calls: what goes in has C's types already, and
# nothing is converted.
_llama_decode: Any = C._lib["llama_decode"]
_PARTIAL = C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY  # without the KV cache, which can be cut
_ONE = (True,)  # the outputs of a single row
MOST_CELLS = 2**31 - 256
PADDING = 256  # cells: llama.cpp makes the context a multiple of it
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # llama_flash_attn_type


@dataclass(frozen=True)
class ContextParams:
    """How a context is set up.

    n_ctx       cells of the KV cache; 0 = the length the model was trained for, 8192 at most
    n_batch     rows one decode can hold, at least n_seq_max; prompts are decoded in chunks of it
    n_seq_max   sequences; up to 64 cost nothing, 256 cost 45 µs a decode (measured on 2 cores);
                a recurrent or hybrid model, which cannot take drafts back, gets one
    n_rewind    drafts that a recurrent or hybrid model can take back, where llama.cpp can do that:
                it keeps a copy of the state for each
    n_threads   None = physical cores
    kv_type     type of the KV cache: f32, f16 or q8_0
    flash_attn  on, off, or auto = measured when the context is made; on a GPU on if it can do that
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_seq_max: int = 64
    n_rewind: int = 8
    n_threads: int | None = None
    kv_type: str = "f16"
    flash_attn: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.n_ctx <= MOST_CELLS:
            raise InvalidParameter(
                f"n_ctx is {self.n_ctx}; give 0 (the model's own) to {MOST_CELLS}"
            )
        if not self.n_batch >= 1:
            raise InvalidParameter(f"n_batch is {self.n_batch}; give at least 1")
        if not 1 <= self.n_seq_max <= MAX_SEQUENCES:
            raise InvalidParameter(f"n_seq_max is {self.n_seq_max}; give 1 to {MAX_SEQUENCES}")
        if not 0 <= self.n_rewind <= MOST_REWIND:
            raise InvalidParameter(f"n_rewind is {self.n_rewind}; give 0 to {MOST_REWIND}")
        if self.n_threads is not None and not 1 <= self.n_threads <= MAX_THREADS:
            raise InvalidParameter(f"n_threads is {self.n_threads}; give 1 to {MAX_THREADS}")
        if self.kv_type not in KV_TYPES:
            raise InvalidParameter(
                f"kv_type is {self.kv_type!r}; give one of {', '.join(KV_TYPES)}"
            )
        if self.flash_attn not in FLASH_ATTN:
            raise InvalidParameter(
                f"flash_attn is {self.flash_attn!r}; give one of {', '.join(FLASH_ATTN)}"
            )
        if self.kv_type == "q8_0" and self.flash_attn == "off":
            raise InvalidParameter("a q8_0 KV cache needs flash attention; drop one of the two")


class Context:
    """A ``llama_context`` with a unified KV cache, and the batch memory that feeds it.

    Raises OutOfMemory when there is no memory for the cache asked for, UnsupportedModel where the
    model goes on with no text.
    """

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
        """Make a context for ``model``; ``trace`` names a file that gets one JSON line a decode.

        With ``mtp`` it is one for the first of the layers that predict further tokens: its rows
        take a token and a state. ``other`` is a context, to be closed later, of the model whose
        embeddings and output matrix, or KV cache, this one shares. Without ``causal`` the rows of
        a decode see those after them as well.
        """
        params = params or ContextParams()
        self.model = model
        if model.is_head and other is None:
            raise UnsupportedModel(
                f"{model.path} ({model.description}) drafts for the model that it came with and "
                f"does not go on with a text by itself; {TEXT_MODEL}"
            )
        if model.is_mtp_alone and not mtp:
            raise UnsupportedModel(
                f"{model.path} holds a model's layers for multi-token prediction and not the model"
            )
        self._is_head = mtp or model.is_head
        flash_attn = choose_flash_attn(model, params)
        with whole_log() as log:
            self._handle: Any = _new_context(model, params, flash_attn, mtp=mtp, other=other)
        refused = any("Flash Attention not supported" in line for line in log)
        self.flash_attn = flash_attn != "off" and not refused
        if not causal:
            C.llama_set_causal_attn(self._handle, False)
        self.params = params
        self.n_vocab = model.n_vocab
        self.n_ctx: int = min(C.llama_n_ctx(self._handle), model.n_positions)
        self.n_batch: int = C.llama_n_batch(self._handle)
        self.n_seq_max: int = C.llama_n_seq_max(self._handle)
        self.n_threads: int = C.llama_n_threads(self._handle)
        self.n_rewind = NO_LIMIT
        if not (mtp or model.can_rewind):
            self.n_rewind = int(C.llama_n_rs_seq(self._handle))
        self._n_back = 0  # of the last decode's rows, those that can be taken back, if limited
        # Whether a decode was broken off: a recurrent state is then of no text.
        self._is_lost = False
        self._watch = DecodeWatch(model.n_bytes)
        self._memory = C.llama_get_memory(self._handle)
        takes_both = mtp or model.takes_both
        self._batch = BatchMemory(self.n_batch, self.n_seq_max, takes_both=takes_both)
        self._output = DecodeOutput(self._handle, model, is_head=self._is_head)
        self._features: BatchMemory | None = None  # of encode, made when it is needed first
        self._row_seq = 0  # sequences of the last decode's row, where that was a plain step's
        self.trace_path = trace
        self._trace: IO[str] | None = None
        atexit.register(self.close)  # what was made last is closed first, so before the model
        if trace is not None:
            try:
                self._trace = _open_trace(Path(trace))
            except InvalidParameter:
                self.close()
                raise

    def decode(self, rows: Rows, watch: Watch | None = None) -> Output:
        """Run one ``llama_decode``; the views it returns are valid until the next one.

        Raises CacheFull when no cells are free, TreeTooLarge when the batch memory cannot hold the
        rows, DecodeFailed when llama.cpp refuses them or fails, Cancelled when ``watch`` says so;
        see ``Target``.
        """
        self._row_seq = 0
        # The graph of a head computes all rows, and llama.cpp takes its output from the first.
        self._batch.fill(rows, all_output=self._is_head and self._output.has_hidden)
        if self._trace is not None:
            write_trace(self._trace, rows)
        n_rows = len(rows)
        if n_rows > self._watch.most_rows:
            self._decode_watched(n_rows, watch)
        elif code := _llama_decode(self._handle, self._batch.struct):
            raise self._error(code, n_rows)
        self._n_back = min(n_rows - 1, self.n_rewind)
        self._output.renew(rows.outputs, rows.n_before)
        return self._output

    def _decode_watched(self, n_rows: int, watch: Watch | None) -> None:
        handle, struct = self._handle, self._batch.struct
        self._is_lost = True
        if code := self._watch.run(handle, lambda: _llama_decode(handle, struct), watch):
            raise self._error(code, n_rows)
        self._is_lost = False

    def decode_row(self, token: int, position: int, n_seq: int) -> Output:
        """As ``decode``: another row of the same shape changes two numbers of the batch."""
        if n_seq != self._row_seq or self._trace is not None:
            output = self.decode(Rows([token], [position], [range(n_seq)], _ONE))
            self._row_seq = n_seq
            return output
        batch = self._batch
        batch.first_token.value = token
        batch.first_pos.value = position
        code = _llama_decode(self._handle, batch.struct)
        if code:
            raise self._error(code, 1)
        self._n_back = 0
        self._output.renew_row()
        return self._output

    def _error(self, code: int, n_rows: int) -> ContextError:
        if code == 1:
            return CacheFull(
                f"no room for {n_rows} rows in a KV cache of {self.n_ctx} cells; "
                f"shorten the prompt or raise {{n_ctx}}",
                settings=("n_ctx",),
                requested=n_rows,
                available=self.n_ctx,
            )
        log = recent_log()[-400:]
        # A GPU may have had room for the cache, and none for what is computed.
        if code == -2 or (code == -3 and "memory" in log.lower()):
            return _out_of_memory(
                f"there is no memory left to compute {n_rows} rows ({log})",
                self.model,
            )
        return DecodeFailed(f"llama_decode returned {code} for {n_rows} rows: {log}")

    def want_hidden(self, wanted: bool) -> None:
        """See ``Target``. Raises UnsupportedModel where llama.cpp would end the process."""
        if wanted and not self._is_head and self.model.n_embd_out != self.model.n_embd:
            # It would read states of the width that the model's own draft layers take.
            raise UnsupportedModel(
                f"llama.cpp does not give out the hidden states of {self.model.path} "
                f"({self.model.description}), so heads cannot draft for it; use another method"
            )
        # A change makes llama.cpp build another compute graph, so it is told of changes only.
        if wanted != self._output.has_hidden:
            if self._is_head:
                internal("llama_set_embeddings_nextn")(self._handle, wanted, True)
            else:
                C.llama_set_embeddings(self._handle, wanted)
            self._output.has_hidden = wanted

    def want_layers(self, layers: Sequence[int]) -> None:
        """See ``Target``. Raises UnsupportedModel where this model does not give them out."""
        if tuple(layers) == self._output.layers:
            return
        check_taps(self.model, layers)
        for layer in {*self._output.layers} ^ {*layers}:
            if layer == self.model.n_layer:
                internal("llama_set_embeddings_nextn")(self._handle, layer in layers, False)
            else:
                switch = internal("llama_set_embeddings_layer_inp")
                switch(self._handle, layer, layer in layers)
        self._output.layers = tuple(layers)

    def encode(self, features: Floats) -> Floats:
        """What the encoder of a head makes of features of its target, (n, width) -> (n, n_embd).

        Raises DecodeFailed when llama.cpp refuses them or fails.
        """
        if self._features is None:
            self._features = BatchMemory(self.n_batch, self.n_seq_max)
        found: Floats = np.empty((len(features), self.model.n_embd_out), np.float32)
        for first in range(0, len(features), self.n_batch):
            some = features[first : first + self.n_batch]
            n = len(some)
            # Each row is encoded by itself; llama.cpp wants positions to go on nevertheless.
            place = C.llama_memory_seq_pos_max(self._memory, 0) + 1
            rows = Rows([0] * n, range(place, place + n), [range(1)] * n, [True] * n, some)
            self._features.fill(rows)
            code = C.llama_encode(self._handle, self._features.struct)
            if code:
                raise DecodeFailed(f"llama_encode returned {code} for {n} rows of {some.shape[1]}")
            pointer = internal("llama_get_embeddings_nextn")(self._handle)
            found[first : first + n] = np.ctypeslib.as_array(pointer, (n, found.shape[1]))
        return found

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        if seq_id < 0 and p0 == 0 and p1 < 0:
            C.llama_memory_clear(self._memory, False)  # recurrent memory, too, can do this
            self._is_lost = False
        elif self.n_rewind == NO_LIMIT:
            C.llama_memory_seq_rm(self._memory, seq_id, p0, p1)
        else:
            self._take_back(p0)

    def _take_back(self, position: int) -> None:
        """Have a recurrent memory end before ``position``.

        It has copies of its state from before each of the last rows of one decode, however old the
        others are that llama.cpp would take without a word; and goes back to one of them once.
        """
        n = C.llama_memory_seq_pos_max(self._memory, 0) + 1 - position
        if n <= 0 and not self._is_lost:
            return
        can_go_back = n <= self._n_back and not self._is_lost
        if not can_go_back or not C.llama_memory_seq_rm(self._memory, 0, position, -1):
            raise CannotRewind(
                f"{self.model.path} ({self.model.description}) cannot take back {n} tokens: its "
                f"memory is recurrent; use method ar"
            )
        self._n_back = 0

    def save(self) -> object:
        """What of the memory is recurrent, as it is: megabytes, in main memory."""
        size = C.llama_state_seq_get_size_ext(self._handle, 0, _PARTIAL)
        state = (ctypes.c_uint8 * size)()
        found = C.llama_state_seq_get_data_ext(self._handle, state, size, 0, _PARTIAL)
        if not size or found != size:
            raise ContextError(f"llama.cpp could not save the state of {self.model.path}")
        return state

    def restore(self, state: Any, n_tokens: int) -> None:
        size = len(state)
        if C.llama_state_seq_set_data_ext(self._handle, state, size, 0, _PARTIAL) != size:
            raise ContextError(f"llama.cpp could not restore the state of {self.model.path}")
        self._n_back = 0
        self._is_lost = False
        C.llama_memory_seq_rm(self._memory, 0, n_tokens, -1)  # what of it is a KV cache

    def seq_cp(self, source: int, dest: int, p0: int, p1: int) -> None:
        C.llama_memory_seq_cp(self._memory, source, dest, p0, p1)

    def use_fewest_threads(self, budget_seconds: float = 0.5) -> None:
        """Decode single rows on one thread where all of them are no faster; batches keep all.

        That is so for a small draft model: its threads wait for each other after every operation,
        and those that slept while the target was checked have to be woken. All count as faster
        from a tenth on, since here they are awake: with 1M parameters on 2 cores two threads took
        1.05 of one thread's time in a row, and a step of method ``draft`` took 1.04.
        """
        n_all = self.n_threads

        def use_threads(n: int) -> None:
            C.llama_set_n_threads(self._handle, n, n_all)

        if n_all > 1 and all_over_one(self, use_threads, n_all, budget_seconds) > 1 / 1.1:
            use_threads(1)
            self.n_threads = 1

    def close(self) -> None:
        """Free the context and close the trace. Idempotent; the model stays loaded."""
        if self._handle is not None:
            if not self.model.is_closed:  # without its model it cannot be freed
                C.llama_free(self._handle)
            self._handle = None
            atexit.unregister(self.close)
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_trace(path: Path) -> IO[str]:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(
            f"batches cannot be traced to {path}: {error.strerror}; give a file in a folder that "
            f"exists and can be written"
        ) from None


def choose_flash_attn(model: Model, params: ContextParams, budget_seconds: float = 1.0) -> str:
    """Whether flash attention is to be on or off: as asked, or whichever decodes faster here.

    On a GPU it is to be on, but not all of them have it for every size of heads, and then the CPU
    would compute it: ``auto`` leaves that to llama.cpp. On a CPU it depends on heads, batch and
    context, so contexts of both kinds decode some rows after some text, in turn
    (``timing.log_ratio``). It is off where that is at least 5% faster: with 7.5M parameters on 2
    cores the two were equal while the machine was quiet, and on took 0.83 of off's time while it
    was busy.
    """
    if params.kv_type == "q8_0":
        return "on"
    if params.flash_attn != "auto" or model.n_host_layers < model.n_layer:
        return params.flash_attn
    # Without it values lie transposed, a row of cells for each dimension, so their number counts.
    n_ctx, n_past = (1024, 192) if model.n_bytes < 2**30 else (256, 8)
    n_ctx, n_past = min(n_ctx, model.n_positions), max(1, min(n_past, model.n_positions - 16))
    small = replace(params, n_ctx=n_ctx, n_batch=256, n_seq_max=1)
    with (
        Context(model, replace(small, flash_attn="on")) as on,
        Context(model, replace(small, flash_attn="off")) as off,
    ):
        return "on" if log_ratio(on, off, n_past, budget_seconds) < math.log(1.05) else "off"


def _new_context(
    model: Model,
    params: ContextParams,
    flash_attn: str,
    *,
    mtp: bool = False,
    other: Context | None = None,
) -> Any:
    if params.n_ctx > model.n_positions:
        raise ContextError(
            f"{model.path} has learned {model.n_positions:,} positions, and a context of "
            f"{params.n_ctx:,} tokens is wanted; lower {{n_ctx}}",
            settings=("n_ctx",),
            requested=params.n_ctx,
            available=model.n_positions,
        )
    native = C.llama_context_default_params()
    can_rewind = mtp or model.can_rewind
    if mtp:
        native.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
    if other is not None:
        native.ctx_other = other._handle
    native.n_ctx = params.n_ctx or min(model.n_ctx_train, 8192)
    # A model without drafts needs no branches, and a recurrent state for each would be gigabytes.
    n_seq_max = params.n_seq_max if can_rewind else 1
    # llama.cpp ends the process over a batch, or a context, that has not a row for every sequence.
    native.n_ctx = max(native.n_ctx, n_seq_max)
    native.n_ctx = -(-native.n_ctx // PADDING) * PADDING
    native.n_batch = max(min(params.n_batch, native.n_ctx), n_seq_max)
    if not can_rewind:  # it also ends it over a batch that the copies and their row fill
        native.n_batch = max(native.n_batch, params.n_rewind + 2)
    native.n_ubatch = native.n_batch
    native.n_seq_max = n_seq_max
    native.n_rs_seq = 0 if can_rewind else params.n_rewind
    native.kv_unified = True  # rows may belong to several sequences
    native.pooling_type = C.LLAMA_POOLING_TYPE_NONE  # hidden states of rows, not of sequences
    native.n_threads = native.n_threads_batch = params.n_threads or physical_cores()
    native.type_k = native.type_v = KV_TYPES[params.kv_type]
    native.flash_attn_type = FLASH_ATTN[flash_attn]
    native.no_perf = True
    _check_memory(model, 1 if mtp else model.n_host_layers, native.n_ctx, params.kv_type)
    handle = None
    try:
        with held_interrupts():
            handle = C.llama_init_from_model(model.handle, native)
    except BaseException:
        if handle:
            C.llama_free(handle)
        raise
    if not handle:
        log = recent_log()
        reason = log.splitlines()[-1] if log else "no reason given"
        message = (
            f"llama.cpp could not make a context of {native.n_ctx:,} tokens "
            f"(KV cache {params.kv_type}) for {model.path}: {reason}"
        )
        if "alloc" in log.lower() or "memory" in log.lower():
            raise _out_of_memory(message, model)
        # Of some models the cache cannot be quantised: by the size of heads, or for want of flash
        # attention.
        if "cache" in reason:
            raise ContextError(f"{message}; use {{kv_type}} f16", settings=("kv_type",))
        raise ContextError(message)
    if not C.llama_get_memory(handle):
        C.llama_free(handle)
        raise UnsupportedModel(
            f"{model.path} ({model.description}) keeps nothing of what it read, as models for "
            f"embeddings or sound do, and so cannot go on with a text; {TEXT_MODEL}"
        )
    return ctypes.c_void_p(handle)


def _check_memory(model: Model, n_layer: int, n_ctx: int, kv_type: str) -> None:
    """Refuse a cache that main memory cannot hold: llama.cpp would end the process over it."""
    needed = n_ctx * (n_layer * model.kv_values_per_layer * KV_BYTES[kv_type] + 64)
    available = available_memory()
    if available is not None and needed > available:
        raise _out_of_memory(
            f"a context of {n_ctx:,} tokens needs {needed / 2**30:,.1f} GiB for its {kv_type} KV "
            f"cache and {available / 2**30:,.1f} GiB are free",
            model,
            requested=math.ceil(needed),
            available=available,
        )


def _out_of_memory(
    message: str, model: Model, requested: int | None = None, available: int | None = None
) -> OutOfMemory:
    """The error, with what takes less memory; amounts are in bytes."""
    fewer = " or {n_gpu_layers}," if model.n_host_layers < model.n_layer else ""
    return OutOfMemory(
        f"{message}; lower {{n_ctx}}{fewer} or use {{kv_type}} q8_0, and load the model again",
        settings=("n_ctx", "n_gpu_layers", "kv_type"),
        requested=requested,
        available=available,
    )
