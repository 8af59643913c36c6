"""Plans and computes each tensor of an upscaled Llama model. NumPy only; no file access."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.upscale.shape import Shape, UpscaleError

Floats = npt.NDArray[np.float32]

VOCAB = "vocab"  # the axis that keeps its size
RANDOM_SCALE = 0.02  # new weights are uniform in ±RANDOM_SCALE


class Kind(NamedTuple):
    """The axes of a tensor, ``(row axis, column axis)`` or ``(axis,)``, and its new values.

    fill  zero    where other values would change the hidden state
          random  where a zero elsewhere cancels the result
          one     norms; scaled like the source's norms
    """

    axes: tuple[str, ...]
    fill: str


KINDS = {
    "token_embd.weight": Kind((VOCAB, "width"), "zero"),
    "output.weight": Kind((VOCAB, "width"), "random"),
    "output_norm.weight": Kind(("width",), "one"),
    "attn_norm.weight": Kind(("width",), "one"),
    "attn_q.weight": Kind(("heads", "width"), "random"),
    "attn_k.weight": Kind(("kv_heads", "width"), "random"),
    "attn_v.weight": Kind(("kv_heads", "width"), "random"),
    "attn_output.weight": Kind(("width", "heads"), "zero"),
    "ffn_norm.weight": Kind(("width",), "one"),
    "ffn_gate.weight": Kind(("hidden", "width"), "random"),
    "ffn_up.weight": Kind(("hidden", "width"), "random"),
    "ffn_down.weight": Kind(("width", "hidden"), "zero"),
    "attn_q.bias": Kind(("heads",), "zero"),
    "attn_k.bias": Kind(("kv_heads",), "zero"),
    "attn_v.bias": Kind(("kv_heads",), "zero"),
    "attn_output.bias": Kind(("width",), "zero"),
}
UNCHANGED = ("rope_freqs.weight",)  # depends on the head size, which stays the same
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


class Plan(NamedTuple):
    """A tensor of the upscaled model, in the order of the file.

    kind    None = the source's tensor is copied unchanged
    source  whether the source has this tensor; new layers' tensors are not in it
    """

    name: str
    kind: Kind | None
    source: bool


def plans(names: Sequence[str], layers: int, new_layers: int) -> Iterator[Plan]:
    """The tensors of a model with ``new_layers`` layers, from one with ``layers`` and ``names``.

    New layers follow the old ones and have the first layer's tensors, except biases. Raises
    UpscaleError for an unknown tensor.
    """
    for name in names:
        yield Plan(name, None if name in UNCHANGED else kind_of(name), source=True)
    first = [name for name in names if name.startswith("blk.0.") and name.endswith(".weight")]
    for layer in range(layers, new_layers):
        for name in first:
            new = f"blk.{layer}.{name.removeprefix('blk.0.')}"
            yield Plan(new, kind_of(name), source=False)


def kind_of(name: str) -> Kind:
    """The kind of a tensor by its name, with or without ``blk.N.``. Raises UpscaleError."""
    block = _BLOCK.fullmatch(name)
    kind = KINDS.get(block[2] if block else name)
    if kind is None:
        raise UpscaleError(
            f"the model has a tensor {name}, which is not part of a plain Llama model; only plain "
            f"ones can be upscaled (no experts, no adapters)"
        )
    return kind


def new_shape(kind: Kind, to: Shape, n_vocab: int) -> tuple[int, ...]:
    """The tensor's shape in the upscaled model, rows first."""
    return tuple(n_vocab if axis == VOCAB else to.size(axis) for axis in kind.axes)


def upscaled_tensor(
    values: Floats | None,
    kind: Kind,
    shape: tuple[int, ...],
    widening: float,
    rng: np.random.Generator,
) -> Floats:
    """A tensor of ``shape`` with ``values`` in its first corner; None = an entirely new tensor.

    ``widening`` is D/d; norms are divided by its square root.
    """
    if kind.fill == "random":
        result = rng.random(shape, dtype=np.float32)
        result -= 0.5
        result *= 2 * RANDOM_SCALE
    else:
        result = np.full(shape, 1.0 if kind.fill == "one" else 0.0, np.float32)
    if values is not None:
        result[tuple(slice(n) for n in values.shape)] = values
    if kind.fill == "one":
        result /= math.sqrt(widening)
    return result
