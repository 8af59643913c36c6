"""A GGUF file's metadata and tensors, read where they lie. Reads what llama.cpp does not expose.

llama.cpp keeps the weights of a model to itself and refuses files that are no model. Heads are such
files, and they may need the target's output matrix. Only the header is read, the vocabulary in it
skipped; tensors are mapped. Quantised tensors are turned into numbers by
``batching.llama.weights``; this module does without the library.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import ModelFileMissing, NotGGUF, TruncatedGGUF, UnsupportedModel
from batching.gguf.types import BF16, F16, F32, I32, REMOVED, TYPES, type_name
from batching.tree import Floats

VERSIONS = (2, 3)  # of the format; they differ in nothing that is read here
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_VALUES = 2**60  # of a tensor; NumPy counts bytes in 63 bits
_MIB = 2**20


class Tensor(NamedTuple):
    """Where a tensor lies. ``shape`` is rows first, as NumPy has it; ``type`` is a ggml_type."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """The header of a GGUF, and its tensors on demand.

    metadata  values by key: numbers, texts, and lists of numbers; for lists of texts see ``texts``
    tensors   by name; their types may be unknown (``check_type``)

    Raises ModelFileMissing, NotGGUF, TruncatedGGUF or, where the format's version is another,
    UnsupportedModel.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._lists: dict[str, tuple[int, int]] = {}  # of texts: where the first is, how many
        self.tensors: dict[str, Tensor] = {}
        self._raw: dict[str, npt.NDArray[np.uint8]] = {}  # views, made when they are asked for
        self._values: dict[str, slice] = {}  # where metadata lie, type and value
        if not path.is_file():
            raise ModelFileMissing(f"there is no file {path}; check the path")
        with path.open("rb") as file:
            magic = file.read(8)
            if magic[:4] != b"GGUF":
                raise NotGGUF(f"{path} is no GGUF: it starts with {magic[:4]!r}, not b'GGUF'")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError):
            raise self._truncated("inside its header") from None
        for name, tensor in self.tensors.items():
            if tensor.type not in TYPES:
                continue
            if tensor.offset + self._n_bytes(name) > len(self._bytes):
                raise self._truncated(f"before {name} does")

    def number(self, key: str, default: int = 0) -> int:
        """A whole number of the metadata; ``default`` where there is none under the key."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) else default

    def texts(self, key: str) -> list[bytes]:
        """A list of texts of the metadata; empty where there is none under the key."""
        at, n = self._lists.get(key, (0, 0))
        found = []
        length = struct.Struct("<Q").unpack_from
        for _ in range(n):
            end = at + 8 + length(self._bytes, at)[0]
            found.append(self._bytes[at + 8 : end])
            at = end
        return found

    def check_type(self, name: str) -> None:
        """Raise UnsupportedModel where the tensor's type is not known here."""
        kind = self.tensors[name].type
        if kind in TYPES:
            return
        if kind in REMOVED:
            reason = "which llama.cpp no longer reads"
            way_out = "choose another quantisation of the model, such as Q4_0 or Q4_K_M"
        else:
            reason = "which this build of llama.cpp does not know"
            way_out = "install a newer llama-cpp-python, or choose another quantisation"
        raise UnsupportedModel(f"{self.path}: tensor {name} is of type {kind}, {reason}; {way_out}")

    def tensor(self, name: str) -> Floats:
        """A tensor as float32. Raises KeyError for a name that is not there."""
        return self._floats(name, self.raw(name)).reshape(self.tensors[name].shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as they lie in the file, (n_rows, bytes of a row); not a copy.

        Rows are those of the last axis. Raises KeyError for a name that is not there,
        UnsupportedModel for a type that is not known.
        """
        if name not in self._raw:
            tensor = self.tensors[name]
            self.check_type(name)
            n_bytes = self._n_bytes(name)
            n_rows = math.prod(tensor.shape[:-1])
            found = np.frombuffer(self._bytes, np.uint8, n_bytes, tensor.offset)
            self._raw[name] = found.reshape(n_rows, n_bytes // max(1, n_rows))
        return self._raw[name]

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        """Some rows of a matrix as float32, (len(rows), width): the others are not looked at."""
        some = self.raw(name)[list(rows)]
        return self._floats(name, some).reshape(len(rows), self.tensors[name].shape[-1])

    def _floats(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        """Whole rows of a tensor as numbers."""
        kind = self.tensors[name].type
        if kind in (F32, F16):
            return data.view(np.float32 if kind == F32 else np.float16).astype(np.float32)
        if kind == BF16:  # the upper half of a float32
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self._dequantized(name, data)

    def _dequantized(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        """For ``batching.llama.weights``, which has ggml do it."""
        raise UnsupportedModel(
            f"{self.path}: {name} is of type {type_name(self.tensors[name].type)} and is to be "
            f"F32, F16 or BF16; make the file again without quantising it"
        )

    def integers(self, name: str) -> npt.NDArray[np.int32]:
        """A tensor of 32-bit integers. Raises KeyError where none has that name and type."""
        tensor = self.tensors[name]
        if tensor.type != I32:
            raise KeyError(name)
        return self.raw(name).view(np.int32).reshape(tensor.shape).copy()

    def output_matrix(self) -> Floats:
        """What turns a model's hidden states into logits, ``(n_vocab, n_embd)``.

        Raises UnsupportedModel where the file has none: the first part of several, perhaps.
        """
        return self.tensor(self.output_name)

    @property
    def output_name(self) -> str:
        """The tensor that ``output_matrix`` reads, and raises over."""
        for name in ("output.weight", "token_embd.weight"):  # the second where they are tied
            if name in self.tensors:
                return name
        raise UnsupportedModel(
            f"{self.path} holds no output matrix; if the model comes in several files, join them "
            f"with llama.cpp's llama-gguf-split --merge"
        )

    def encoded_metadata(self) -> dict[str, bytes]:
        """All metadata as they lie in the file, to write them into another one."""
        return {key: self._bytes[where] for key, where in self._values.items()}

    def _read_header(self) -> None:
        (version,) = struct.unpack_from("<I", self._bytes, 4)
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self.path} is of version {version} of the GGUF format, and 2 and 3 can be read; "
                f"choose a newer file of the model, of the byte order of this machine"
            )
        at = 8
        (n_tensors, n_values), at = struct.unpack_from("<QQ", self._bytes, at), at + 16
        for _ in range(n_values):
            key, at = self._text(at)
            begin = at
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            value, at = self._value(key, kind, at + 4)
            self._values[key] = slice(begin, at)
            if value is not None:
                self.metadata[key] = value
        for _ in range(n_tensors):
            name, at = self._text(at)
            (n_axes,) = struct.unpack_from("<I", self._bytes, at)
            if n_axes > _MAX_AXES:
                raise self._damaged(f"tensor {name!r} has {n_axes} axes, and {_MAX_AXES} at most")
            *axes, kind, offset = struct.unpack_from(f"<{n_axes}QIQ", self._bytes, at + 4)
            at += 4 + 8 * n_axes + 12
            if math.prod(axis for axis in axes if axis) >= _MAX_VALUES:
                raise self._damaged(f"tensor {name!r} has the size {axes}")
            self.tensors[name] = Tensor(tuple(reversed(axes)), kind, offset)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, and a power of two is right")
        start = -(-at // alignment) * alignment
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor._replace(offset=start + tensor.offset)

    def _text(self, at: int) -> tuple[str, int]:
        (n,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + n
        if end > len(self._bytes):
            raise IndexError
        return self._bytes[at + 8 : end].decode("utf-8", "replace"), end

    def _value(self, key: str, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._text(at)
        if kind != _ARRAY:
            form = f"<{self._number_format(key, kind)}"
            return struct.unpack_from(form, self._bytes, at)[0], at + struct.calcsize(form)
        inner, n = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        if inner != _STRING:
            form = f"<{n}{self._number_format(key, inner)}"
            return list(struct.unpack_from(form, self._bytes, at)), at + struct.calcsize(form)
        self._lists[key] = at, n
        length = struct.Struct("<Q").unpack_from
        for _ in range(n):  # vocabularies: hundreds of thousands, and nobody asks for them
            at += 8 + length(self._bytes, at)[0]
        return None, at

    def _number_format(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"{key!r} has a value of the unknown kind {kind}")
        return _NUMBERS[kind]

    def _n_bytes(self, name: str) -> int:
        """Of a tensor whose type is known."""
        tensor = self.tensors[name]
        kind, width = TYPES[tensor.type], tensor.shape[-1] if tensor.shape else 1
        if width % kind.n_values:
            raise self._damaged(
                f"tensor {name!r} has rows of {width} values, and {kind.name} blocks have "
                f"{kind.n_values}"
            )
        return math.prod(tensor.shape) // kind.n_values * kind.n_bytes

    def _damaged(self, what: str) -> NotGGUF:
        return NotGGUF(f"{self.path} is damaged: {what}; download it again or make it anew")

    def _truncated(self, where: str) -> TruncatedGGUF:
        return TruncatedGGUF(
            f"{self.path} is incomplete: it ends after {len(self._bytes):,} bytes, {where}; "
            f"download it again or make it anew"
        )


def fingerprint(path: Path) -> str:
    """Tells a model file from another of the same name and size without reading gigabytes.

    SHA-256 of its length, its first MiB (metadata, vocabulary) and its last (weights), 16 digits.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]
