"""Files of drafting heads: how kinds are recognised, and what Medusa, ReDrafter and EAGLE share.

A file records the model the heads were trained on. docs/heads.md explains the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import ModelError, OutOfMemory
from batching.gguf.reader import GGUFFile, fingerprint
from batching.gguf.writer import NewTensor, TensorType, Value, write_gguf
from batching.llama.hardware import available_memory
from batching.llama.model import Model
from batching.llama.weights import Weights, encoded_tensor
from batching.tree import Floats
from speculation.heads.base import Head

ARCHITECTURE = "speculation-heads"


@dataclass(frozen=True)
class HeadsInfo:
    """The method that heads are for, and the model they were trained on.

    method       the method that drafts with them
    target_name  the target's name, or its file name
    fingerprint  the target's, see ``batching.gguf.reader.fingerprint``
    n_embd       width of the target's hidden states
    n_vocab      size of its vocabulary
    """

    method: str
    target_name: str
    fingerprint: str
    n_embd: int
    n_vocab: int

    @classmethod
    def of_target(cls, method: str, model: Model) -> HeadsInfo:
        """For heads of ``method`` trained on ``model``."""
        return cls(
            method, model_name(model), fingerprint(model.path), model.n_embd_out, model.n_vocab
        )


class HeadsWeights(NamedTuple):
    """The parameters of heads that end with the target's output matrix.

    tensors  by their names in the file
    output   rows of the target's output matrix, (n_drafted, n_embd)
    tokens   the draft vocabulary, a token per row, (n_drafted,); None = all tokens
    """

    tensors: Mapping[str, Floats]
    output: Floats
    tokens: npt.NDArray[np.int32] | None


class HeadsFile:
    """An open heads file: its metadata, and its tensors by name and shape.

    Raises ModelError if the file is missing, damaged or incomplete, or has no heads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = Weights(path)
        architecture = self.gguf.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelError(
                f"{path} contains no drafting heads: its architecture is {architecture!r}; give a "
                f"file made by python -m speculation.train, or if this is a draft model, give it "
                f"with {{draft_model}}",
                settings=("draft_model",),
            )
        self.info = HeadsInfo(
            method=self.value("heads.method", str),
            target_name=self.value("heads.target.name", str),
            fingerprint=self.value("heads.target.fingerprint", str),
            n_embd=self.value("heads.embedding_length", int),
            n_vocab=self.value("heads.vocab_size", int),
        )

    def check_target(self, model: Model) -> None:
        """Raise ModelError if the heads were trained on another model.

        Another quantization counts as another model, because its hidden states differ.
        """
        info = self.info
        check_trained_on(self.path, info.target_name, info.fingerprint, model)
        for name, in_file, in_target in (
            ("width of hidden states", info.n_embd, model.n_embd_out),
            ("vocabulary size", info.n_vocab, model.n_vocab),
        ):
            if in_file != in_target:
                raise ModelError(
                    f"the {name} is {in_file} in {self.path.name}, but {in_target} in "
                    f"{model_name(model)!r}; train the heads again"
                )

    def value(self, key: str, kind: type[Any]) -> Any:
        """A metadata value. Raises ModelError if it is missing or not of type ``kind``."""
        found = self.gguf.metadata.get(key)
        if not isinstance(found, kind):
            raise ModelError(f"{key} is {found!r} in {self.path}; train the heads again")
        return found

    def check_tensor(self, name: str, *shape: int) -> None:
        """Raise ModelError if a tensor is missing or not of this shape."""
        tensor = self.gguf.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"is {_sizes(tensor.shape)}"
            raise ModelError(
                f"{self.path}: {name} {found}; heads for hidden states {self.info.n_embd} wide "
                f"need {_sizes(shape)}; train the heads again"
            )

    def tokens(self) -> npt.NDArray[np.int32] | None:
        """The draft vocabulary, (n_drafted,); None = the whole vocabulary.

        Raises ModelError if it has tokens outside the vocabulary.
        """
        if "tokens" not in self.gguf.tensors:
            return None
        tokens = self.gguf.integers("tokens")
        if tokens.min() < 0 or tokens.max() >= self.info.n_vocab:
            raise ModelError(
                f"{self.path}: the draft vocabulary has tokens outside 0 to "
                f"{self.info.n_vocab - 1}; train the heads again"
            )
        return tokens

    def weights(self, shapes: Mapping[str, Sequence[int]], target: Path) -> HeadsWeights:
        """The tensors with these shapes; ``target`` is the target's GGUF.

        Raises ModelError if one is missing or of another shape, and as ``target_output``.
        """
        for name, shape in shapes.items():
            self.check_tensor(name, *shape)
        tensors = {name: self.gguf.tensor(name) for name in shapes}
        tokens = self.tokens()
        output = target_output(target, self.info.n_vocab, self.info.n_embd, tokens)
        return HeadsWeights(tensors, output, tokens)


class HeadsKind(NamedTuple):
    """A kind of heads file.

    method    the method that drafts with the heads
    matches   whether a file is of this kind
    load      loads the heads for a model; raises ModelError if they do not fit it
    of_model  the heads that the model itself contains, or None
    """

    method: str
    matches: Callable[[GGUFFile], bool]
    load: Callable[[GGUFFile, Model], Head]
    of_model: Callable[[Model], Head | None] = lambda model: None


def own_format(method: str, load: Callable[[HeadsFile, Model], Head]) -> HeadsKind:
    """Heads in this project's file format."""

    def matches(gguf: GGUFFile) -> bool:
        found = map(gguf.metadata.get, ("general.architecture", "heads.method"))
        return tuple(found) == (ARCHITECTURE, method)

    def load_checked(gguf: GGUFFile, model: Model) -> Head:
        file = HeadsFile(gguf.path)
        file.check_target(model)
        return load(file, model)

    return HeadsKind(method, matches, load_checked)


def llama_format(
    method: str, architecture: str, load: Callable[[GGUFFile, Model], Head]
) -> HeadsKind:
    """Heads written by llama.cpp's converter, with an architecture of their own."""
    return HeadsKind(
        method, lambda gguf: gguf.metadata.get("general.architecture") == architecture, load
    )


def check_trained_on(heads: Path, target_name: object, trained_on: object, model: Model) -> None:
    """Raise ModelError if the fingerprint ``trained_on`` is not the model's."""
    if trained_on != fingerprint(model.path):
        raise ModelError(
            f"the heads {heads.name} were trained on {target_name!r} (fingerprint {trained_on}), "
            f"but the model is {model_name(model)!r} ({model.path.name}, fingerprint "
            f"{fingerprint(model.path)}); load that model, or train heads for this one"
        )


def target_output(
    path: Path, n_vocab: int, n_embd: int, tokens: npt.NDArray[np.int32] | None = None
) -> Floats:
    """The target's output matrix, or its rows for ``tokens``, as float32.

    Raises OutOfMemory, UnsupportedModel if the file has none, ModelError if it has another shape.
    """
    needed, free = 4 * n_vocab * n_embd, available_memory()
    if free is not None and needed > free:
        raise OutOfMemory(
            f"the output matrix of {path.name} takes {needed / 2**30:,.1f} GiB, but only "
            f"{free / 2**30:,.1f} GiB are free; choose a smaller model"
        )
    matrix = Weights(path).output_matrix()
    if matrix.shape != (n_vocab, n_embd):
        raise ModelError(
            f"the output matrix of {path.name} is {_sizes(matrix.shape)}, not {n_vocab} × "
            f"{n_embd}, so heads cannot use it; choose another model"
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
    """Write heads to one GGUF. The file appears only once it is complete.

    kind    type of the matrices, see ``new_tensor``
    tokens  the draft vocabulary, (n_drafted,); None = the whole vocabulary

    Raises SpeculationError if the disk is full.
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
    """Encode a tensor: matrices as ``kind`` (f32, f16 or q8_0), vectors as F32, integers as is.

    With q8_0, a matrix whose row length is not a multiple of the block size, 32, becomes F16.
    """
    if values.dtype.kind == "i":
        stored = TensorType.I64 if values.dtype == np.int64 else TensorType.I32
    elif values.ndim < 2 or kind == "f32":
        stored = TensorType.F32
    else:
        in_blocks = kind == "q8_0" and values.shape[-1] % 32 == 0
        stored = TensorType.Q8_0 if in_blocks else TensorType.F16
    return encoded_tensor(values, stored)


def copied_tokenizer(target: GGUFFile) -> dict[str, Value]:
    """The metadata of the tokenizer of ``target``, without its chat templates."""
    return {
        key: value
        for key, value in target.encoded_metadata().items()
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
    }


def model_name(model: Model) -> str:
    """The model's name from its GGUF, or else the file's stem."""
    return model.metadata("general.name") or model.path.stem


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
