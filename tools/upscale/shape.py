"""The sizes of a Llama model, and checks for larger ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batching.errors import SpeculationError

BLOCK = 32  # weights that share a scale in the quantised types
MAX_LAYERS = 512  # llama.cpp aborts with more


class UpscaleError(SpeculationError):
    """The model cannot be upscaled, or not to that size."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model.

    width     of the hidden state (n_embd)
    layers    transformer blocks
    hidden    feed-forward units per block
    heads     query heads
    kv_heads  key/value heads, each shared by heads / kv_heads query heads
    head_dim  width of a head
    norm_eps  RMSNorm's epsilon
    """

    width: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float

    def size(self, axis: str) -> int:
        """Length of a tensor's axis: width, hidden, heads or kv_heads (both times head_dim)."""
        return {
            "width": self.width,
            "hidden": self.hidden,
            "heads": self.heads * self.head_dim,
            "kv_heads": self.kv_heads * self.head_dim,
        }[axis]

    def upscaled(self, width: int | None = None, layers: int | None = None) -> Shape:
        """The upscaled shape; ``hidden`` grows with the width. None keeps a size.

        The head size and the query heads per key head stay the same. Raises UpscaleError for
        smaller sizes, or a width that is not a whole number of heads.
        """
        width = self.width if width is None else width
        layers = self.layers if layers is None else layers
        hidden = max(self.hidden, BLOCK * round(self.hidden * width / self.width / BLOCK))
        for name, new, old in (("width", width, self.width), ("layers", layers, self.layers)):
            if new < old:
                raise UpscaleError(
                    f"--{name} is {new}, but the model has {old}; give at least that"
                )
        if layers > MAX_LAYERS:
            raise UpscaleError(
                f"--layers is {layers}, but llama.cpp supports at most {MAX_LAYERS}; give fewer"
            )
        group = self.heads // self.kv_heads
        step = self.head_dim * group
        if width % step:
            shared = f" x {group} query heads per key head" if group > 1 else ""
            raise UpscaleError(
                f"--width {width} is not a multiple of {step} (head size {self.head_dim}{shared}); "
                f"give {width // step * step} or {width // step * step + step}"
            )
        heads = width // self.head_dim
        if heads < self.heads:
            raise UpscaleError(
                f"--width {width} makes {heads} heads of {self.head_dim}, but the model has "
                f"{self.heads}; give {self.heads * self.head_dim} or more"
            )
        return replace(
            self,
            width=width,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads // group,
            norm_eps=self.norm_eps * self.width / width,
        )

    def check_blocks(self, quantization: str) -> None:
        """Raise UpscaleError unless the matrices' rows are multiples of 32 weights."""
        for axis in ("width", "hidden", "heads"):
            if self.size(axis) % BLOCK:
                raise UpscaleError(
                    f"{quantization} packs {BLOCK} weights of a row at a time, but {axis} is "
                    f"{self.size(axis)}, here or in the source; give a multiple of {BLOCK}, "
                    f"or --type f16"
                )
