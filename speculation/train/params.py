"""Parameters of training, one dataclass for each kind of heads; their fields are the flags.

Needs no PyTorch, so that ``--help`` and errors come without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from batching.errors import InvalidParameter
from batching.llama.model import Model
from speculation.system.params import Params, param

FILE_TYPES = ("f32", "f16", "q8_0")


@dataclass(frozen=True)
class TrainingParams(Params):
    """Parameters that all kinds have."""

    vocab: int = param(
        0, "draft vocabulary: the most frequent tokens in the data; 0 = all tokens", (0, 2**31)
    )
    epochs: float = param(8.0, "passes over the data", (0.0, 1000.0))
    batch: int = param(8, "sequences per step", (1, 2**20))
    rate: float = param(3e-3, "peak learning rate", (0.0, 1.0))
    held_out: float = param(
        0.05,
        "share of the sequences held out for evaluation, from the data's end",
        (0.001, 0.5),
    )
    seed: int = param(0, "random seed", (0, 2**32 - 1))

    def layers_read(self, model: Model) -> tuple[int, ...]:
        """The layers of ``model`` whose inputs the head reads. Raises if they cannot be read."""
        return ()


@dataclass(frozen=True)
class MedusaTraining(TrainingParams):
    heads: int = param(4, "number of heads; each drafts one token further ahead", (1, 8))
    blocks: int = param(2, "residual blocks per head", (1, 8))


@dataclass(frozen=True)
class ReDrafterTraining(TrainingParams):
    length: int = param(5, "draft length the head is trained for", (1, 16))
    blocks: int = param(1, "residual blocks after the first", (0, 8))


@dataclass(frozen=True)
class EagleTraining(TrainingParams):
    rate: float = param(1e-3, "peak learning rate", (0.0, 1.0))
    eagle3: bool = param(
        False, "train an EAGLE-3 head, which reads three layers (default: for EAGLE-1 and -2)"
    )
    layers: tuple[int, ...] = param(
        (), "the three layers for EAGLE-3, counted from 0 (default: 2, n/2 and n-3 of n)"
    )
    ff: int = param(0, "width of the feed-forward block; 0 = the target's", (0, 2**20))
    passes: int = param(
        3, "passes over a sequence, each on the head's predictions from the pass before", (1, 8)
    )
    states: float = param(
        1.0, "weight of the loss on hidden states; EAGLE-3 does not use it", (0.0, 1000.0)
    )
    noise: float = param(
        0.1, "uniform noise added to the input states, relative to their size", (0.0, 10.0)
    )
    kind: str = param("q8_0", "tensor type of the matrices: f32, f16 or q8_0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in FILE_TYPES:
            raise InvalidParameter(f"kind is {self.kind!r}; give one of {', '.join(FILE_TYPES)}")
        if self.layers and not self.eagle3:
            raise InvalidParameter(
                "--layers is for EAGLE-3 only; add --eagle3 or leave --layers out"
            )

    def layers_read(self, model: Model) -> tuple[int, ...]:
        """EAGLE-3's layers; by default those of its authors and of llama.cpp's converter.

        The default is clamped for models with few layers.
        """
        if not self.eagle3:
            return ()
        n = model.n_layer
        layers = tuple(self.layers) or (min(2, n - 1), n // 2, max(n - 3, 0))
        for layer in layers:
            if not 0 <= layer < n:
                raise InvalidParameter(
                    f"--layers has {layer}, but the model has {n} layers; give numbers from 0 to "
                    f"{n - 1}"
                )
        model.check_layer_inputs(layers)
        return layers
