"""Whether a model fits into memory, and which change would make it fit. Pure: reads no hardware.

The estimate is that of the engine's process: weights, KV cache, what llama.cpp computes a batch
with, and the process itself. Against the memory that the process really had, after a prompt of
3,000 tokens: SmolLM2 135M Q8_0 with 8,192 tokens 514 and 501 MiB, with 2,048 tokens 379 and
364 MiB, with a q8_0 cache 429 and 396 MiB; the bundled model 149 and 156 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batching.llama.context_params import ContextParams
from batching.llama.devices import KV_BYTES
from speculation.registry.describe import Shape
from speculation.system.files import in_words

USUAL_CTX = 8192  # for which a GPU gets as many layers as fit; all of a model's layers matter more
_STEP = 1024  # in which a context is made smaller
LEAST_CTX = 1024  # below, no chat is worth suggesting
_N_BATCH = ContextParams.n_batch
PROCESS = 90 * 2**20  # Python and its libraries
_GIB = 2**30


class Wanted(NamedTuple):
    """How a model is to be loaded: ``n_ctx`` 0 is ``own_context``, ``n_gpu_layers`` None all that
    fit, ``n_cpu_moe`` None the experts that do not."""

    n_ctx: int = 0
    kv_type: str = "f16"
    n_gpu_layers: int | None = None
    n_cpu_moe: int | None = None


class Memory(NamedTuple):
    """Bytes that are free if no model is loaded; None: not known, and 0 for one of the ``devices``,
    by name."""

    main: int | None
    devices: tuple[tuple[str, int], ...] = ()


class Need(NamedTuple):
    """Bytes of the weights, the KV cache, and all else."""

    weights: int
    cache: int
    compute: int

    @property
    def total(self) -> int:
        return sum(self)


class Smaller(NamedTuple):
    """A file with a smaller quantisation of the same model."""

    name: str
    n_bytes: int


@dataclass(frozen=True)
class Change:
    """What would make a model fit: a sentence, and the settings or the model to take."""

    text: str
    n_ctx: int | None = None
    kv_type: str | None = None
    n_gpu_layers: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class Fit:
    """Whether a model fits; ``fits`` None: not known. ``is_least``: only its size is known."""

    fits: bool | None
    sentence: str
    changes: tuple[Change, ...] = ()
    is_least: bool = False


def own_context(shape: Shape, wanted: Wanted, memory: Memory) -> int:
    """Tokens in a model's context if nobody asks for a number: all that it was trained for, or as
    many as memory allows.

    The cache takes half of the main memory that the rest leaves, since other programs and idle
    texts need some, too. It takes what is left on a GPU, but moves no weights off it, except up to
    ``USUAL_CTX``. 0 if the file does not tell the model's own; ``USUAL_CTX`` at most if memory is
    not known.
    """
    usual, main = min(shape.n_ctx_train, USUAL_CTX), memory.main
    if main is None or not all(free for _, free in memory.devices):
        return usual

    def on_devices(n_ctx: int) -> tuple[int, int]:
        return _on_devices(shape, wanted._replace(n_ctx=n_ctx), memory)

    usual_weights = on_devices(usual)[0]

    def holds(n_ctx: int) -> bool:
        weights, cache = on_devices(n_ctx)
        if n_ctx > usual and (weights < usual_weights or weights + cache > _room(memory)):
            return False
        needed = need(shape, wanted._replace(n_ctx=n_ctx))
        return 2 * (needed.cache - cache) <= main - (needed.weights - weights + needed.compute)

    lower = range((shape.n_ctx_train - 1) // _STEP * _STEP, LEAST_CTX, -_STEP)
    return next((n for n in (shape.n_ctx_train, *lower) if holds(n)), min(usual, LEAST_CTX))


def context_in_words(n_ctx: int, trained: int, wanted: Wanted) -> str:
    """The context of a model that was loaded as ``wanted`` and trained for so many tokens, and what
    would make it larger."""
    told = f"Context {n_ctx:,}"
    if n_ctx >= trained:
        return f"{told} tokens (the model's own)"
    told += f" of the model's {trained:,} tokens"
    if wanted.n_ctx:
        return f"{told} (--ctx)"
    packed = min(trained, int(n_ctx * KV_BYTES[wanted.kv_type] / KV_BYTES["q8_0"]))
    more = f"--kv-type q8_0 allows about {packed:,}, " if packed > n_ctx else ""
    return f"{told}, as memory allows; {more}--ctx asks for more"


def need(shape: Shape, wanted: Wanted) -> Need:
    """What a model needs with a context of ``wanted.n_ctx``, in bytes."""
    per_row = shape.n_vocab + 4 * shape.n_embd + 2 * shape.n_ff
    cache = int(wanted.n_ctx * shape.kv_values * KV_BYTES[wanted.kv_type])
    return Need(shape.n_bytes, cache, PROCESS + 4 * _N_BATCH * per_row)


def fit(shape: Shape, wanted: Wanted, memory: Memory, smaller: Sequence[Smaller] = ()) -> Fit:
    """Whether a model fits, and else the changes after each of which it does."""
    asked, n_ctx = wanted.n_ctx, wanted.n_ctx or own_context(shape, wanted, memory)
    wanted, trained = wanted._replace(n_ctx=n_ctx), shape.n_ctx_train
    found = _fit(shape, wanted, memory)
    told = f" The model was trained for {trained:,} tokens." if 0 < trained < n_ctx else ""
    if n_ctx < trained and not asked:
        told = f" Its context is then {n_ctx:,} of {trained:,} tokens."
    found = replace(found, sentence=found.sentence + told)
    if found.fits is not False:
        return found
    return replace(found, changes=_changes(shape, wanted, memory, smaller))


def _fit(shape: Shape, wanted: Wanted, memory: Memory) -> Fit:
    needed = need(shape, wanted)
    on_devices = sum(_on_devices(shape, wanted, memory))
    main = needed.weights + needed.cache - on_devices + needed.compute
    is_least = not shape.n_layer
    room = _room(memory)
    if on_devices > room:
        names = " and ".join(name for name, _ in memory.devices)
        told = f"{wanted.n_gpu_layers} layers need {in_words(on_devices)} on {names}"
        return Fit(False, f"{told}, where {in_words(room)} are free.", is_least=is_least)
    if memory.main is None:
        return Fit(None, f"Needs {in_words(main)}.", is_least=is_least)
    least = "at least " if is_least else ""
    beside = f" and {in_words(on_devices)} on the GPU" if on_devices else ""
    parts = f"{in_words(needed.weights)} weights, {in_words(needed.cache)} KV cache"
    told = "" if is_least else f" ({parts}, {in_words(needed.compute)} to compute with)"
    sentence = f"Needs {least}{in_words(main)}{beside}{told}; {in_words(memory.main)} are free."
    return Fit(main <= memory.main, sentence, is_least=is_least)


def _room(memory: Memory) -> int:
    """What the devices have for layers: a part stays free, as when llama.cpp loads."""
    free = sum(free for _, free in memory.devices)
    return free - min(_GIB, free // 8)


def _on_devices(shape: Shape, wanted: Wanted, memory: Memory) -> tuple[int, int]:
    """Bytes of the weights and of the cache that are on the devices, as if all layers were alike:
    the last layers, and the experts of the last of these."""
    if not memory.devices:
        return 0, 0
    n_layer, room, cache = shape.n_layer + 1, _room(memory), need(shape, wanted).cache
    rest, experts = shape.n_bytes - shape.expert_bytes, shape.expert_bytes / n_layer
    with_experts = 0 if wanted.n_cpu_moe is None else max(0, n_layer - wanted.n_cpu_moe)

    def size(n: int) -> float:
        return (rest + cache) * n / n_layer + experts * min(n, with_experts)

    n = wanted.n_gpu_layers
    if n is None:  # the output matrix counts as one
        n = next((n for n in range(n_layer, 0, -1) if size(n) <= room), 0)
    n = min(n, n_layer)
    if wanted.n_cpu_moe is None and experts:
        with_experts = max(0, int((room - size(n)) // experts))
    return int(rest * n / n_layer + experts * min(n, with_experts)), cache * n // n_layer


def _changes(
    shape: Shape, wanted: Wanted, memory: Memory, smaller: Sequence[Smaller]
) -> tuple[Change, ...]:
    """The changes by themselves, the least first; then several together."""
    found = []

    def holds(other: Wanted) -> bool:
        return _fit(shape, other, memory).fits is True

    if wanted.n_gpu_layers:
        layers = range(wanted.n_gpu_layers - 1, -1, -1)
        n = next((n for n in layers if holds(wanted._replace(n_gpu_layers=n))), None)
        if n is not None:
            found.append(Change(f"Put {n} layers on the GPU", n_gpu_layers=n))
    packed = wanted._replace(kv_type="q8_0")
    if shape.kv_values and wanted.kv_type != "q8_0" and holds(packed):
        found.append(Change("Use a q8_0 KV cache", kv_type="q8_0"))
    # Below the wanted one, and not beyond what the model was trained for.
    n_ctx = min(wanted.n_ctx, shape.n_ctx_train + 1)
    for start, with_kv in ((wanted, ""), (packed, " and a q8_0 KV cache")):
        fitting = [n for n in _contexts(n_ctx) if holds(start._replace(n_ctx=n))]
        if shape.kv_values and fitting:
            text = f"Use a context of {fitting[0]:,} tokens{with_kv}"
            kv_type = start.kv_type if with_kv else None
            found.append(Change(text, n_ctx=fitting[0], kv_type=kv_type))
            break
    lighter = sorted(smaller, key=lambda one: -one.n_bytes)
    for other in lighter:
        if other.n_bytes < shape.n_bytes:
            changed = replace(shape, n_bytes=other.n_bytes)
            if _fit(changed, wanted, memory).fits:
                text = f"Take a smaller quantisation: {other.name}, {in_words(other.n_bytes)}"
                found.append(Change(text, model=other.name))
                break
    return tuple(found)


def _contexts(n_ctx: int) -> list[int]:
    """Powers of two below ``n_ctx``, the largest first."""
    powers = [LEAST_CTX << bits for bits in range(20)]
    return [n for n in reversed(powers) if n < n_ctx]
