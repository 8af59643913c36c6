"""Parameters of training, one dataclass for each kind of heads; their fields are the flags.

Needs no PyTorch, so that ``--help`` and errors come without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from batching.errors import InvalidParameter, check_ranges
from batching.llama.model import Model

FILE_TYPES = ("f32", "f16", "q8_0")


@dataclass(frozen=True)
class TrainingParams:
    """Parameters that all kinds have.

    vocab     draft vocabulary: the most frequent tokens in the data; 0 = all tokens
    epochs    passes over the data
    batch     sequences per step
    rate      peak learning rate
    held_out  share of the sequences held out for evaluation, from the end of the data
    seed      random seed
    """

    vocab: int = 0
    epochs: float = 8.0
    batch: int = 8
    rate: float = 3e-3
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            (
                ("vocab", 0, 2**31),
                ("epochs", 0.0, 1000.0),
                ("batch", 1, 2**20),
                ("rate", 0.0, 1.0),
                ("held_out", 0.001, 0.5),
                ("seed", 0, 2**32 - 1),
            ),
        )

    def layers_read(self, model: Model) -> tuple[int, ...]:
        """The layers of ``model`` whose inputs the head reads. Raises if they cannot be read."""
        return ()


@dataclass(frozen=True)
class MedusaTraining(TrainingParams):
    """Parameters of Medusa training.

    heads   number of heads; each drafts one token further ahead
    blocks  residual blocks per head
    batch   states per step
    """

    epochs: float = 4.0
    batch: int = 256
    heads: int = 4
    blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, (("heads", 1, 8), ("blocks", 1, 8)))


@dataclass(frozen=True)
class ReDrafterTraining(TrainingParams):
    """Parameters of ReDrafter training.

    length  draft length the head is trained for
    blocks  residual blocks after the first
    """

    length: int = 5
    blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, (("length", 1, 16), ("blocks", 0, 8)))


@dataclass(frozen=True)
class EagleTraining(TrainingParams):
    """Parameters of EAGLE training.

    eagle3  train an EAGLE-3 head, which reads three layers (default: for EAGLE-1 and -2)
    layers  the three layers for EAGLE-3, counted from 0 (default: 2, n/2 and n-3 of n)
    ff      width of the feed-forward block; 0 = the target's
    passes  passes over a sequence, each on the head's predictions from the pass before
    states  weight of the loss on hidden states; EAGLE-3 does not use it
    noise   uniform noise added to the input states, relative to their size
    kind    tensor type of the matrices: f32, f16 or q8_0
    """

    rate: float = 1e-3
    eagle3: bool = False
    layers: tuple[int, ...] = ()
    ff: int = 0
    passes: int = 3
    states: float = 1.0
    noise: float = 0.1
    kind: str = "q8_0"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self,
            (
                ("ff", 0, 2**20),
                ("passes", 1, 8),
                ("states", 0.0, 1000.0),
                ("noise", 0.0, 10.0),
            ),
        )
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
