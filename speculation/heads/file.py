"""Files of heads: one GGUF for each set, with the model it was trained on written in it.

docs/heads-file.md lists metadata and tensors. What is common to every kind of heads stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError, OutOfMemory
from batching.gguf.reader import fingerprint
from batching.gguf.writer import NewTensor, TensorType, Value, write_gguf
from batching.llama.hardware import available_memory
from batching.llama.model import Model
from batching.llama.weights import Weights, encoded_tensor
from batching.tree import Floats

ARCHITECTURE = "speculation-heads"


@dataclass(frozen=True)
class HeadsInfo:
    """What heads are, and of which model.

    method       the method that drafts with them
    target_name  the target's own name, or that of its file
    fingerprint  the target's, by ``batching.gguf.reader.fingerprint``
    n_embd       width of the target's hidden states
    n_vocab      tokens of its vocabulary
    """

    method: str
    target_name: str
    fingerprint: str
    n_embd: int
    n_vocab: int

    @classmethod
    def of_target(cls, method: str, model: Model) -> HeadsInfo:
        """Heads of ``method`` for ``model``."""
        return cls(
            method, model_name(model), fingerprint(model.path), model.n_embd_out, model.n_vocab
        )


class HeadsFile:
    """A heads file that is open, and whole: its metadata, its tensors by name and shape.

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF, or HeadsError for a GGUF of something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = Weights(path)
        architecture = self.gguf.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise HeadsError(
                f"{path} holds no drafting heads but the architecture {architecture!r}; give a "
                f"file made by python -m speculation.train, or a draft model as --draft-model"
            )
        self.info = HeadsInfo(
            method=self.value("heads.method", str),
            target_name=self.value("heads.target.name", str),
            fingerprint=self.value("heads.target.fingerprint", str),
            n_embd=self.value("heads.embedding_length", int),
            n_vocab=self.value("heads.vocab_size", int),
        )

    def check_target(self, model: Model) -> None:
        """Refuse heads that were trained on another model: HeadsError with both names.

        Another quantisation of the same model counts as another: its states are not the same.
        """
        info = self.info
        if info.fingerprint != fingerprint(model.path):
            raise HeadsError(
                f"the heads {self.path.name} were trained on {info.target_name!r} (file "
                f"{info.fingerprint}), and the model is {model_name(model)!r} ({model.path.name}, "
                f"file {fingerprint(model.path)}); load that model, or train heads for this one"
            )
        for name, heads, target in (
            ("hidden states are", info.n_embd, model.n_embd_out),
            ("vocabularies are", info.n_vocab, model.n_vocab),
        ):
            if heads != target:
                raise HeadsError(
                    f"{self.path.name}: its {name} {heads} wide, those of {model_name(model)!r} "
                    f"{target}; train the heads again"
                )

    def value(self, key: str, kind: type[Any]) -> Any:
        """A metadata value of the type ``kind``. Raises HeadsError where there is none."""
        found = self.gguf.metadata.get(key)
        if not isinstance(found, kind):
            raise HeadsError(f"{self.path} has {found!r} for {key}; train the heads again")
        return found

    def tensor(self, name: str, *shape: int) -> Floats:
        """A tensor of the shape that it must have, as float32.

        Raises HeadsError where it is missing or has another shape.
        """
        self.check_tensor(name, *shape)
        return self.gguf.tensor(name)

    def check_tensor(self, name: str, *shape: int) -> None:
        """Raise HeadsError where a tensor is missing or has another shape."""
        tensor = self.gguf.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"is {_sizes(tensor.shape)}"
            raise HeadsError(
                f"{self.path}: {name} {found}, where heads for hidden states of "
                f"{self.info.n_embd} have {_sizes(shape)}; train the heads again"
            )

    def tokens(self) -> npt.NDArray[np.int32] | None:
        """The tokens that are drafted at all, where it is not the whole vocabulary.

        Raises HeadsError where they are not of the vocabulary.
        """
        if "tokens" not in self.gguf.tensors:
            return None
        found = self.gguf.integers("tokens")
        if found.min() < 0 or found.max() >= self.info.n_vocab:
            raise HeadsError(
                f"{self.path}: it drafts tokens beyond {self.info.n_vocab}; train it again"
            )
        return found

    def output_matrix(self, shares_target: bool, target: Path | None) -> Floats:
        """The output matrix, (n_drafted, n_embd): the target's own, or the one in this file.

        ``target`` is the target's GGUF. Without it a shared matrix is empty, (0, n_embd): for tools
        that need only the rest. Raises what ``tensor`` and ``target_output`` raise.
        """
        tokens, n_embd, n_vocab = self.tokens(), self.info.n_embd, self.info.n_vocab
        if shares_target and target is None:
            return np.empty((0, n_embd), np.float32)
        if target is not None and shares_target:
            return target_output(target, n_vocab, n_embd, tokens)
        return self.tensor("output.weight", n_vocab if tokens is None else len(tokens), n_embd)


def target_output(
    path: Path, n_vocab: int, n_embd: int, tokens: npt.NDArray[np.int32] | None = None
) -> Floats:
    """The target's output matrix, or its rows for ``tokens``, as float32.

    Raises OutOfMemory, UnsupportedModel where the file has none, HeadsError where it has another
    shape.
    """
    needed, free = 4 * n_vocab * n_embd, available_memory()
    if free is not None and needed > free:
        raise OutOfMemory(
            f"the output matrix of {path.name} takes {needed / 2**30:,.1f} GiB and "
            f"{free / 2**30:,.1f} GiB are free; choose a smaller model"
        )
    matrix = Weights(path).output_matrix()
    if matrix.shape != (n_vocab, n_embd):
        raise HeadsError(
            f"the output matrix of {path.name} is {matrix.shape[0]} × {matrix.shape[1]}, not "
            f"{n_vocab} × {n_embd}: heads cannot share it; train them with --output each"
        )
    return matrix if tokens is None else matrix[tokens]


def write_heads(
    path: Path,
    info: HeadsInfo,
    metadata: Mapping[str, Value],
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    tokens: npt.NDArray[np.integer[Any]] | None = None,
    kind: str = "f16",
) -> None:
    """Write heads to one GGUF, matrices as ``kind``. The file appears when it is whole.

    ``tokens`` are those that the heads draft, (n_drafted,); None where they draft every token.
    Raises DiskFull.
    """
    common: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.name": f"{info.method} heads for {info.target_name}",
        "heads.method": info.method,
        "heads.target.name": info.target_name,
        "heads.target.fingerprint": info.fingerprint,
        "heads.embedding_length": info.n_embd,
        "heads.vocab_size": info.n_vocab,
    }
    stored = {name: new_tensor(values, kind) for name, values in tensors.items()}
    if tokens is not None:
        stored["tokens"] = new_tensor(tokens.astype(np.int32), kind)
    write_gguf(path, {**common, **metadata}, stored)


def new_tensor(values: npt.NDArray[Any], kind: str) -> NewTensor:
    """A tensor to write: a matrix as ``kind`` (f32, f16 or q8_0), a vector or integers as they are.

    A matrix whose rows do not divide into Q8_0's blocks of 32 becomes F16.
    """
    if values.dtype == np.int64:
        return encoded_tensor(values, TensorType.I64)
    if values.dtype == np.int32:
        return encoded_tensor(values, TensorType.I32)
    if values.ndim < 2 or kind == "f32":
        return encoded_tensor(values, TensorType.F32)
    whole_blocks = values.shape[-1] % 32 == 0
    return encoded_tensor(
        values, TensorType.Q8_0 if kind == "q8_0" and whole_blocks else TensorType.F16
    )


def model_name(model: Model) -> str:
    """The name in the GGUF, or that of the file."""
    return model.metadata("general.name") or model.path.stem


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
