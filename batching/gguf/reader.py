"""Reads GGUF metadata and tensors that llama.cpp does not expose.

llama.cpp gives no access to weights and rejects files that are not models, such as drafting heads,
which may also need the target's output matrix. Parses the header, skipping the vocabulary, and
memory-maps the tensors. Needs no llama.cpp; ``batching.llama.weights`` dequantises.
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

from batching.errors import ModelError, UnsupportedModel
from batching.gguf.types import BF16, F16, F32, I32, REMOVED, TYPES, n_bytes, type_name
from batching.tree import Floats

VERSIONS = (2, 3)  # of the format; their differences do not matter here
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_VALUES = 2**60  # per tensor; NumPy counts bytes in 63 bits
_MIB = 2**20


class Tensor(NamedTuple):
    """Location of a tensor. ``shape`` is in NumPy order, rows first; ``type`` is a ggml_type."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """The header of a GGUF, and its tensors on demand.

    metadata  values by key: numbers, strings, lists of numbers; ``texts`` reads lists of strings
    tensors   by name; their types may be unknown (``check_type``)

    Raises ModelError if there is no such file, or it is damaged or incomplete; UnsupportedModel for
    another format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._lists: dict[str, tuple[int, int]] = {}  # lists of strings: offset, count
        self.tensors: dict[str, Tensor] = {}
        self._raw: dict[str, npt.NDArray[np.uint8]] = {}  # views, created on demand
        self._values: dict[str, slice] = {}  # encoded type and value of each metadata key
        check_file(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError):
            raise self._truncated("inside its header") from None
        for name, tensor in self.tensors.items():
            if tensor.type not in TYPES:
                continue
            if tensor.offset + self.n_bytes(name) > len(self._bytes):
                raise self._truncated(f"before the end of {name}")

    def number(self, key: str, default: int = 0) -> int:
        """An integer metadata value; ``default`` if the key is absent or not an integer."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) else default

    def texts(self, key: str) -> list[bytes]:
        """A metadata list of strings; empty if the key is absent."""
        pos, n = self._lists.get(key, (0, 0))
        texts = []
        length = struct.Struct("<Q").unpack_from
        for _ in range(n):
            end = pos + 8 + length(self._bytes, pos)[0]
            texts.append(self._bytes[pos + 8 : end])
            pos = end
        return texts

    def check_type(self, name: str) -> None:
        """Raise UnsupportedModel if the tensor's type is unknown."""
        kind = self.tensors[name].type
        if kind in TYPES:
            return
        if kind in REMOVED:
            reason = "which llama.cpp no longer supports"
            way_out = "choose another quantisation of the model, such as Q4_0 or Q4_K_M"
        else:
            reason = "which this build of llama.cpp does not support"
            way_out = "install a newer llama-cpp-python, or choose another quantisation"
        raise UnsupportedModel(f"{self.path}: tensor {name} has type {kind}, {reason}; {way_out}")

    def tensor(self, name: str) -> Floats:
        """A tensor as float32. Raises KeyError for an unknown name."""
        return self._floats(name, self.raw(name)).reshape(self.tensors[name].shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A view of a tensor's encoded bytes, (n_rows, bytes per row).

        A row is the last axis. Raises KeyError for an unknown name, UnsupportedModel for an
        unknown type.
        """
        if name not in self._raw:
            tensor = self.tensors[name]
            self.check_type(name)
            size, n_rows = self.n_bytes(name), math.prod(tensor.shape[:-1])
            view = np.frombuffer(self._bytes, np.uint8, size, tensor.offset)
            self._raw[name] = view.reshape(n_rows, size // max(1, n_rows))
        return self._raw[name]

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        """The given rows of a matrix as float32, (len(rows), width). Reads no others."""
        encoded = self.raw(name)[list(rows)]
        return self._floats(name, encoded).reshape(len(rows), self.tensors[name].shape[-1])

    def _floats(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        """Decode whole rows of a tensor to float32."""
        kind = self.tensors[name].type
        if kind in (F32, F16):
            return data.view(np.float32 if kind == F32 else np.float16).astype(np.float32)
        if kind == BF16:  # the upper half of a float32
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self._dequantized(name, data)

    def _dequantized(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        """Overridden in ``batching.llama.weights``, which uses ggml."""
        raise UnsupportedModel(
            f"{self.path}: {name} has type {type_name(self.tensors[name].type)} but must be "
            f"F32, F16 or BF16; create the file again without quantising it"
        )

    def integers(self, name: str) -> npt.NDArray[np.int32]:
        """A tensor of 32-bit integers. Raises KeyError if none has that name and type."""
        tensor = self.tensors[name]
        if tensor.type != I32:
            raise KeyError(name)
        return self.raw(name).view(np.int32).reshape(tensor.shape).copy()

    def output_matrix(self) -> Floats:
        """The matrix from hidden states to logits, ``(n_vocab, n_embd)``.

        Raises UnsupportedModel if the file has none, as one part of a split model may.
        """
        return self.tensor(self.output_name)

    @property
    def output_name(self) -> str:
        """Name of the output matrix. Raises UnsupportedModel if there is none."""
        for name in ("output.weight", "token_embd.weight"):  # the latter if the two are tied
            if name in self.tensors:
                return name
        raise UnsupportedModel(
            f"{self.path} has no output matrix; if the model is split into several files, join "
            f"them with llama.cpp's llama-gguf-split --merge"
        )

    def encoded_metadata(self) -> dict[str, bytes]:
        """All metadata values as encoded in the file, for copying to another file."""
        return {key: self._bytes[where] for key, where in self._values.items()}

    def _read_header(self) -> None:
        (version,) = struct.unpack_from("<I", self._bytes, 4)
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self.path} has GGUF version {version}; versions 2 and 3 are supported. Choose a "
                f"newer conversion of the model, in this machine's byte order"
            )
        pos = 8
        (n_tensors, n_values), pos = struct.unpack_from("<QQ", self._bytes, pos), pos + 16
        for _ in range(n_values):
            key, pos = self._text(pos)
            begin = pos
            (kind,) = struct.unpack_from("<I", self._bytes, pos)
            value, pos = self._value(key, kind, pos + 4)
            self._values[key] = slice(begin, pos)
            if value is not None:
                self.metadata[key] = value
        for _ in range(n_tensors):
            name, pos = self._text(pos)
            (n_axes,) = struct.unpack_from("<I", self._bytes, pos)
            if n_axes > _MAX_AXES:
                raise self._damaged(f"tensor {name!r} has {n_axes} axes; the limit is {_MAX_AXES}")
            *axes, kind, offset = struct.unpack_from(f"<{n_axes}QIQ", self._bytes, pos + 4)
            pos += 4 + 8 * n_axes + 12
            if math.prod(axis for axis in axes if axis) >= _MAX_VALUES:
                raise self._damaged(f"tensor {name!r} has the size {axes}")
            self.tensors[name] = Tensor(tuple(reversed(axes)), kind, offset)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-pos // alignment) * alignment
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor._replace(offset=start + tensor.offset)

    def _text(self, pos: int) -> tuple[str, int]:
        (n,) = struct.unpack_from("<Q", self._bytes, pos)
        end = pos + 8 + n
        if end > len(self._bytes):
            raise IndexError
        return self._bytes[pos + 8 : end].decode("utf-8", "replace"), end

    def _value(self, key: str, kind: int, pos: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._text(pos)
        if kind != _ARRAY:
            form = f"<{self._number_format(key, kind)}"
            return struct.unpack_from(form, self._bytes, pos)[0], pos + struct.calcsize(form)
        inner, n = struct.unpack_from("<IQ", self._bytes, pos)
        pos += 12
        if inner != _STRING:
            form = f"<{n}{self._number_format(key, inner)}"
            return list(struct.unpack_from(form, self._bytes, pos)), pos + struct.calcsize(form)
        self._lists[key] = pos, n
        length = struct.Struct("<Q").unpack_from
        for _ in range(n):  # vocabularies: hundreds of thousands of entries, rarely needed
            pos += 8 + length(self._bytes, pos)[0]
        return None, pos

    def _number_format(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"{key!r} has a value of unknown type {kind}")
        return _NUMBERS[kind]

    def n_bytes(self, name: str) -> int:
        """Encoded size of a tensor whose type is known."""
        try:
            return n_bytes(self.tensors[name].shape, self.tensors[name].type)
        except ValueError as error:
            raise self._damaged(f"tensor {name!r} has {error}") from None

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {what}; download it again or recreate it")

    def _truncated(self, where: str) -> ModelError:
        return ModelError(
            f"{self.path} is incomplete: it ends after {len(self._bytes):,} bytes, {where}; "
            f"download it again or recreate it"
        )


def check_file(path: Path) -> None:
    """Check that ``path`` is a GGUF. Raises ModelError."""
    if not path.is_file():
        raise ModelError(f"file not found: {path}; check the path, or give a name from models.txt")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is not a model in the GGUF format, whose files begin with the letters GGUF; "
            f"convert it with llama.cpp's convert_hf_to_gguf.py or choose a .gguf file"
        )


def fingerprint(path: Path) -> str:
    """Identify a model file without reading gigabytes: 16 hex digits.

    SHA-256 of its size, its first MiB (metadata, vocabulary) and its last MiB (weights).
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]
