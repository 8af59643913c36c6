"""Creates the native context: sizes, memory check, and errors if llama.cpp rejects it."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp.llama_cpp as C

from batching.errors import ContextError, OutOfMemory, UnsupportedModel
from batching.gguf.unsupported import TEXT_MODEL
from batching.llama.context_params import FLASH_ATTN, KV_TYPES, ContextParams
from batching.llama.device_memory import CacheSize, free_memory
from batching.llama.devices import joined
from batching.llama.hardware import available_memory, physical_cores
from batching.llama.interrupts import deferred_interrupts
from batching.llama.log import recent_log
from batching.llama.model import Model

PADDING = 256  # cells; llama.cpp rounds the context up to a multiple


def create_context(
    model: Model, params: ContextParams, flash_attn: str, *, mtp: bool = False, other: Any = None
) -> Any:
    """Create a ``llama_context *`` for ``model``.

    mtp    for the model's first multi-token-prediction layer
    other  the ``llama_context *`` whose embeddings, output matrix or KV cache this one shares

    Raises OutOfMemory, ContextError or UnsupportedModel.
    """
    if params.n_ctx > model.n_positions:
        raise ContextError(
            f"a context of {params.n_ctx:,} tokens exceeds the {model.n_positions:,} positions "
            f"that {model.path} supports; lower {{n_ctx}}",
            settings=("n_ctx",),
            requested=params.n_ctx,
            available=model.n_positions,
        )
    native = _native_params(model, params, flash_attn, mtp=mtp)
    if other is not None:
        native.ctx_other = other
    _check_memory(model, CacheSize(native.n_ctx, params.kv_type), mtp=mtp)
    handle = None
    try:
        with deferred_interrupts():
            handle = C.llama_init_from_model(model.handle, native)
    except BaseException:
        if handle:
            C.llama_free(handle)
        raise
    if not handle:
        raise _creation_error(model, native.n_ctx, params.kv_type)
    if not C.llama_get_memory(handle):
        C.llama_free(handle)
        raise UnsupportedModel(
            f"{model.path} ({model.description}) keeps no KV cache, like embedding and audio "
            f"models, and cannot generate text; {TEXT_MODEL}"
        )
    return ctypes.c_void_p(handle)


def _native_params(model: Model, params: ContextParams, flash_attn: str, *, mtp: bool) -> Any:
    native = C.llama_context_default_params()
    can_rewind = mtp or model.can_rewind
    if mtp:
        native.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
    native.n_ctx = params.n_ctx or min(model.n_ctx_train, 8192)
    # Without rewind there are no branches, and each sequence has a state of megabytes.
    n_seq_max = params.n_seq_max if can_rewind else params.n_slots
    # llama.cpp aborts if the batch or the context has fewer rows than there are sequences.
    native.n_ctx = max(native.n_ctx, n_seq_max)
    native.n_ctx = -(-native.n_ctx // PADDING) * PADDING
    native.n_batch = max(min(params.n_batch, native.n_ctx), n_seq_max)
    if not can_rewind:  # llama.cpp aborts if the state copies and their row fill the batch
        native.n_batch = max(native.n_batch, params.n_rewind + 2)
    native.n_ubatch = native.n_batch
    native.n_outputs_max_per_seq = native.n_batch  # rows of a text whose choices a device makes
    native.n_seq_max = n_seq_max
    native.n_rs_seq = 0 if can_rewind else params.n_rewind
    native.kv_unified = True  # a row may belong to several sequences
    native.pooling_type = C.LLAMA_POOLING_TYPE_NONE  # hidden states per row, not per sequence
    native.n_threads = native.n_threads_batch = params.n_threads or physical_cores()
    native.type_k = native.type_v = KV_TYPES[params.kv_type]
    native.flash_attn_type = FLASH_ATTN[flash_attn]
    native.no_perf = True
    return native


def _creation_error(model: Model, n_ctx: int, kv_type: str) -> ContextError:
    """Choose the exception for a failed creation from llama.cpp's log."""
    log = recent_log()
    reason = log.splitlines()[-1] if log else "no reason given"
    message = (
        f"llama.cpp could not create a context of {n_ctx:,} tokens (KV cache {kv_type}) for "
        f"{model.path}: {reason}"
    )
    if "alloc" in log.lower() or "memory" in log.lower():
        return out_of_memory(message, model)
    # Some models cannot quantise the cache: because of the head size, or without flash attention.
    if "cache" in reason:
        return ContextError(f"{message}; use {{kv_type}} f16", settings=("kv_type",))
    return ContextError(message)


def _check_memory(model: Model, cache: CacheSize, *, mtp: bool) -> None:
    """Reject a cache larger than the memory it goes to: llama.cpp would abort."""
    per_layer = cache.bytes_per_layer(model.kv_values_per_layer)
    n_host = model.n_host_layers
    places = [("", 1 if mtp else n_host, available_memory())]
    if model.devices and not mtp:
        places.append(
            (f" on {joined(model.devices)}", model.n_layer - n_host, free_memory(model.devices))
        )
    for where, n_layer, available in places:
        needed = n_layer * per_layer + (0 if where else cache.n_ctx * 64)
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
