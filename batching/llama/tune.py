"""Finds the settings with which a model is fastest on this CPU, by trying each while nothing runs.

What is fastest depends on the weights and the processor, so it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from batching.llama.context import Context, ContextParams
from batching.llama.context_params import is_quantized
from batching.llama.hardware import available_memory, physical_cores
from batching.llama.model import Model
from batching.llama.timing import decode_seconds, fill, time_ratio
from batching.watched import checkpoint

# Rows of the batches that decide, with their weights: plain steps, drafts, and prompts.
_ROWS = {1: 0.5, 4: 0.25, 64: 0.25}
_BEFORE = 256  # tokens that these attend to: with more, what is faster varies from minute to minute
_READ = 64  # of them are decoded, the others are copies
# A setting is tried in so many rounds, if they take no longer than that, but in three at least.
_MOST_ROUNDS, _SECONDS, _LEAST_ROUNDS = 15, 3.0, 3
_CLEARLY = math.log(1.05)  # how much faster other settings must be
_SPARE = 2**30  # bytes that stay free beside a second copy of the weights


@dataclass(frozen=True)
class Settings:
    """Settings that change a model's speed, and at most the rounding of its logits.

    repack      weights are rearranged for this CPU
    flash_attn  flash attention is on
    n_threads   threads that compute; 0 = as many as physical cores
    """

    repack: bool = True
    flash_attn: bool = True
    n_threads: int = 0

    def fill(self, params: ContextParams) -> ContextParams:
        """``params`` with what they leave open."""
        n_threads = params.n_threads or self.n_threads or None
        flash_attn = params.flash_attn
        if _may_lack_flash_attn(params) and not self.flash_attn:
            flash_attn = "off"
        return replace(params, n_threads=n_threads, flash_attn=flash_attn)


def fastest(model: Model, params: ContextParams, used: Settings) -> Settings:
    """The fastest settings of those that ``params`` leave open, each changed in turn.

    ``model`` was loaded with ``used``. Takes some seconds for each setting. Raises GivenUp as
    ``checkpoint`` does, ContextError and ModelError.
    """
    found = used
    for name, value in _changes(model, params, used):
        tried = replace(found, **{name: value})
        with ExitStack() as opened:
            contexts = []
            for settings in (tried, found):
                of = model
                if settings.repack != used.repack:
                    of = opened.enter_context(_again(model, settings))
                contexts.append(opened.enter_context(Context(of, _small(of, params, settings))))
            if _log_ratio(*contexts) < -_CLEARLY:
                found = tried
    return found


def _changes(model: Model, params: ContextParams, used: Settings) -> Iterator[tuple[str, Any]]:
    """What may be faster in another way."""
    if model.n_host_layers < model.n_layer or any(device.is_remote for device in model.devices):
        return
    if _may_lack_flash_attn(params):
        yield "flash_attn", not used.flash_attn
    n_threads = used.n_threads or physical_cores()
    if params.n_threads is None and n_threads > 1:
        yield "n_threads", n_threads // 2
    free = available_memory()
    if free is None or free > model.n_bytes + _SPARE:
        yield "repack", not used.repack


def _may_lack_flash_attn(params: ContextParams) -> bool:
    """Whether flash attention may be off. For several texts it is on: it skips others' cells."""
    return params.flash_attn == "auto" and params.n_slots == 1 and not is_quantized(params.kv_type)


def _again(model: Model, settings: Settings) -> Model:
    """``model``, loaded once more."""
    return Model(
        model.path,
        placement=model.placement,
        repack=settings.repack,
        progress=lambda _: checkpoint(),
    )


def _small(model: Model, params: ContextParams, settings: Settings) -> ContextParams:
    """A context to measure in."""
    n_ctx = min(_BEFORE + 2 * max(_ROWS), model.n_ctx_train, model.n_positions)
    small = replace(params, n_ctx=n_ctx, n_batch=max(_ROWS), n_seq_max=2, n_slots=1)
    return settings.fill(small)


def _log_ratio(a: Context, b: Context) -> float:
    """Log of the time of ``a`` divided by that of ``b``; negative if ``a`` is faster. Both must be
    empty."""
    n_past = min(fill(one, one.n_ctx - 2 * max(_ROWS), _READ) for one in (a, b))

    def ratio(n: int) -> float:
        ours, theirs = (partial(decode_seconds, one, n, n_past) for one in (a, b))
        return time_ratio(ours, theirs, _SECONDS / len(_ROWS), _LEAST_ROUNDS, _MOST_ROUNDS)

    return sum([share * math.log(ratio(n)) for n, share in _ROWS.items()])


def use_fewest_threads(context: Context, budget_seconds: float = 0.5) -> None:
    """Decode single rows on one thread unless all threads are faster; batches keep all.

    For a small draft model one is faster: threads synchronise after every operation, and have to be
    woken after the target's decode. This measurement finds them awake, so they must be 10% faster.
    """
    n_all = context.n_threads

    def on_threads(n: int) -> float:
        context.use_threads(n)
        decode_seconds(context, 1)  # may read weights from disk
        return decode_seconds(context, 1)

    if n_all > 1:
        ratio = time_ratio(partial(on_threads, n_all), partial(on_threads, 1), budget_seconds)
        context.use_threads(1 if ratio > 1 / 1.1 else n_all)
