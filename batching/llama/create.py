"""Creates the native context: sizes, memory check, and errors if llama.cpp rejects it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp.llama_cpp as C

from batching.errors import ContextError, InvalidParameter, OutOfMemory, UnsupportedModel
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.context_params import (
    BF16,
    FLASH_ATTN,
    KV_TYPES,
    MAX_SEQUENCES,
    ContextParams,
    is_quantized,
)
from batching.llama.devices import CacheSize, free_memory, joined
from batching.llama.hardware import available_memory, physical_cores
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import clear_log, reason
from batching.llama.model import Model
from batching.llama.native import NativeContext

PADDING = 256  # cells; llama.cpp rounds the context up to a multiple


def create_context(
    model: Model,
    params: ContextParams,
    flash_attn: str,
    *,
    mtp: bool = False,
    other: NativeContext | None = None,
) -> NativeContext:
    """Create a context for ``model``.

    mtp    for the model's first multi-token-prediction layer
    other  the context whose embeddings, output matrix or KV cache this one shares

    Raises OutOfMemory, ContextError or UnsupportedModel.
    """
    native = _native_params(model, params, flash_attn, mtp=mtp)
    if other is not None:
        native.ctx_other = other.handle
    _check_memory(model, CacheSize(native.n_ctx, params.kv_type), mtp=mtp)
    created = initialised(model, native, other)
    if created is None:
        raise _creation_error(model, native.n_ctx, params.kv_type)
    if not created.memory:
        raise UnsupportedModel(
            f"{model.path} ({model.description}) keeps no KV cache, like embedding and audio "
            f"models, and cannot generate text; {TEXT_MODEL}"
        )
    return created


def initialised(model: Model, params: Any, other: NativeContext | None) -> NativeContext | None:
    """What llama.cpp makes of its own ``params``; None if it fails, and its log tells why."""
    used, created = model.native, None
    clear_log()
    with deferred_interrupts():
        handle = C.llama_init_from_model(used.handle, params)
        if handle:
            created = NativeContext(ctypes.c_void_p(handle), used, other)
    return created


def max_tokens(model: Model) -> int:
    """The longest text that ``model`` can read: as trained, or more by its RoPE scaling."""
    scaling = f"{model.architecture}.rope.scaling"
    if model.metadata(f"{scaling}.type") in (None, "none"):
        return model.n_ctx_train
    original = int(model.metadata(f"{scaling}.original_context_length") or model.n_ctx_train)
    factor = float(model.metadata(f"{scaling}.factor") or 1)
    return max(model.n_ctx_train, int(original * factor))


def check_length(model: Model, params: ContextParams) -> None:
    """Raise InvalidParameter if each text could be longer than the model can read.

    llama.cpp only warns, and the model writes nonsense past that length; or it aborts, past the end
    of learned positions.
    """
    longest = max_tokens(model)
    limit = min(_padded(longest * params.n_slots), model.n_positions)
    if params.n_ctx > limit:
        texts = f", in each of {params.n_slots} texts" if params.n_slots > 1 else ""
        raise InvalidParameter(
            f"a context of {params.n_ctx:,} tokens is too long for {model.path}, which was trained "
            f"for {longest:,}{texts}; lower {{n_ctx}} to {limit:,} or less",
            settings=("n_ctx",),
            requested=params.n_ctx,
            available=limit,
        )


def n_spare(model: Model) -> int:
    """Sequences that ``Context`` keeps for copies: one if layers have a sliding window."""
    return int(model.can_rewind and model.n_window > 0)


def _padded(n_cells: int) -> int:
    return -(-n_cells // PADDING) * PADDING


def _native_params(model: Model, params: ContextParams, flash_attn: str, *, mtp: bool) -> Any:
    native = C.llama_context_default_params()
    can_rewind = mtp or model.can_rewind
    if mtp:
        native.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
    native.n_ctx = params.n_ctx or model.n_ctx_train
    # Without rewind there are no branches, and each sequence has a state of megabytes.
    has_own_cells = params.exact and params.n_slots > 1
    n_seq_max = params.n_slots if has_own_cells or not can_rewind else params.n_seq_max
    n_seq_max = min(n_seq_max + n_spare(model), MAX_SEQUENCES)
    # llama.cpp aborts if the batch or the context has fewer rows than there are sequences.
    native.n_ctx = _padded(max(native.n_ctx, n_seq_max))
    native.n_batch = max(min(params.n_batch, native.n_ctx), n_seq_max)
    if not can_rewind:  # llama.cpp aborts if state copies and their row fill a batch or its part
        native.n_batch = max(native.n_batch, params.n_rewind + 2)
    native.n_ubatch = min(params.n_ubatch or native.n_batch, native.n_batch)
    native.n_outputs_max_per_seq = native.n_batch  # rows of a text whose choices a device makes
    native.n_seq_max = n_seq_max
    native.n_rs_seq = 0 if can_rewind else max(0, min(params.n_rewind, native.n_ubatch - 2))
    native.kv_unified = not has_own_cells  # a row may belong to several sequences
    native.pooling_type = C.LLAMA_POOLING_TYPE_NONE  # hidden states per row, not per sequence
    native.n_threads = native.n_threads_batch = params.n_threads or physical_cores()
    native.type_k = native.type_v = KV_TYPES[params.kv_type]
    if params.exact and params.kv_type == "f16" and model.n_host_layers:
        # With keys and values of one type, llama.cpp divides the cells of a single row among
        # threads, and adds values in tiles from 64 rows on: both round in their own way.
        native.type_v = BF16
    native.flash_attn_type = FLASH_ATTN[flash_attn]
    native.no_perf = True
    return native


def _creation_error(model: Model, n_ctx: int, kv_type: str) -> ContextError:
    """The exception for a failed creation. Some models cannot quantise the cache: because of the
    head size, or without flash attention. Otherwise memory is what is missing."""
    message = (
        f"llama.cpp could not create a context of {n_ctx:,} tokens (KV cache {kv_type}) for "
        f"{model.path}: {reason()}"
    )
    if is_quantized(kv_type):
        return ContextError(
            f"{message}; use {{kv_type}} f16, or lower {{n_ctx}}", settings=("kv_type", "n_ctx")
        )
    return out_of_memory(message, model)


def _check_memory(model: Model, cache: CacheSize, *, mtp: bool) -> None:
    """Reject a cache larger than the memory it goes to: llama.cpp would abort."""
    n_host, values = model.n_host_layers, model.kv_values
    places = [("", values[-1:] if mtp else values[:n_host], available_memory())]
    if model.devices and not mtp:
        where = f" on {joined(model.devices)}"
        places.append((where, values[n_host : model.n_layer], free_memory(model.devices)))
    for where, layers, available in places:
        needed = cache.n_bytes(sum(layers)) + (0 if where else cache.n_ctx * 64)
        if available is not None and needed > available:
            raise out_of_memory(
                f"a context of {cache.n_ctx:,} tokens needs {needed / 2**30:,.1f} GiB{where} for "
                f"its {cache.kv_type} KV cache, but only {available / 2**30:,.1f} GiB are free",
                model,
                requested=math.ceil(needed),
                available=available,
            )


def out_of_memory(
    message: str, model: Model, requested: int | None = None, available: int | None = None
) -> OutOfMemory:
    """An OutOfMemory error that names the settings to lower; amounts are in bytes."""
    fewer = " or {n_gpu_layers}," if model.n_host_layers < model.n_layer else ""
    return OutOfMemory(
        f"{message}; lower {{n_ctx}}{fewer} or use {{kv_type}} q8_0, and load the model again",
        settings=("n_ctx", "n_gpu_layers", "kv_type"),
        requested=requested,
        available=available,
    )
