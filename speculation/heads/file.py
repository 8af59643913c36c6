"""Files of heads: one GGUF for each set, with the model it was trained on written in it.

docs/heads.md lists metadata and tensors. What is common to every kind of heads stands here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batching.errors import HeadsError
from batching.gguf.reader import fingerprint
from batching.llama.model import Model
from batching.llama.weights import Weights
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


def write_heads(
    path: Path,
    info: HeadsInfo,
    metadata: Mapping[str, bool | int | float | str | list[float]],
    tensors: Mapping[str, npt.NDArray[Any]],
    kind: str = "f16",
) -> None:
    """Write heads to one GGUF: matrices as ``kind`` (f32, f16 or q8_0), vectors as they are.

    Where rows do not divide into Q8_0's blocks of 32, they are written as F16. Needs the package
    gguf (the extra ``train``). The file appears when it is whole.
    """
    with gguf_writer(path, ARCHITECTURE) as writer:
        writer.add_name(f"{info.method} heads for {info.target_name}")
        writer.add_string("heads.method", info.method)
        writer.add_string("heads.target.name", info.target_name)
        writer.add_string("heads.target.fingerprint", info.fingerprint)
        writer.add_uint32("heads.embedding_length", info.n_embd)
        writer.add_uint32("heads.vocab_size", info.n_vocab)
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, values in tensors.items():
            _add_tensor(writer, name, values, kind)


def _add_tensor(writer: Any, name: str, values: npt.NDArray[Any], kind: str) -> None:
    import gguf

    if values.ndim < 2:
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif kind == "q8_0" and values.shape[-1] % 32 == 0:
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        quantized = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), q8_0)
        writer.add_tensor(name, quantized, raw_dtype=q8_0)
    else:
        writer.add_tensor(name, values.astype(np.float32 if kind == "f32" else np.float16))


@contextmanager
def gguf_writer(path: Path, architecture: str) -> Iterator[Any]:
    """A gguf.GGUFWriter to fill; its file appears when it is whole, and nothing is left else.

    Raises HeadsError where the disk is full.
    """
    import gguf

    partial = path.with_name(f"{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            writer.close()
        partial.unlink(missing_ok=True)
        # NumPy, which writes the tensors, says how much it wrote and not why it was not all.
        if isinstance(error, OSError) and error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            raise HeadsError(
                f"cannot write {path}: the disk is full, or its quota used up ({error}); make "
                f"room, or give a file on another disk"
            ) from error
        raise


def model_name(model: Model) -> str:
    """The name in the GGUF, or that of the file."""
    return model.metadata("general.name") or model.path.stem


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
