"""A GGUF file's metadata and tensors, read where they lie. For what llama.cpp does not give out.

llama.cpp keeps the weights of a model to itself and refuses files that are no model. Heads are such
files, and they may need the target's output matrix. Only the header is read, the vocabulary in it
passed over; tensors are mapped, and turned into float32 by ggml itself, so every type that the
loaded library knows is known here.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batching.errors import ModelFileMissing, NotGGUF, TruncatedGGUF, UnsupportedModel
from batching.llama.library import exported
from batching.tree import Floats

_F32, _F16, _I32 = 0, 1, 26  # ggml_type
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MIB = 2**20


class Tensor(NamedTuple):
    """Where a tensor lies. ``shape`` is rows first, as NumPy has it; ``type`` is a ggml_type."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GGUFFile:
    """The header of a GGUF, and its tensors on demand.

    metadata  values by key: numbers, texts, and lists of numbers; lists of texts are left out
    tensors   by name

    Raises ModelFileMissing, NotGGUF or TruncatedGGUF.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
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
        except (struct.error, IndexError):
            raise self._truncated("inside its header") from None
        for name, tensor in self.tensors.items():
            if tensor.offset + _n_bytes(self.path, name, tensor) > len(self._bytes):
                raise self._truncated(f"before {name} does")

    def tensor(self, name: str) -> Floats:
        """A tensor as float32. Raises KeyError for a name that is not there."""
        return self._floats(name, self.raw(name)).reshape(self.tensors[name].shape)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as they lie in the file, (n_rows, bytes of a row); not a copy.

        Rows are those of the last axis. Raises KeyError for a name that is not there.
        """
        if name not in self._raw:
            tensor = self.tensors[name]
            n_bytes = _n_bytes(self.path, name, tensor)
            n_rows = math.prod(tensor.shape[:-1])
            found = np.frombuffer(self._bytes, np.uint8, n_bytes, tensor.offset)
            self._raw[name] = found.reshape(n_rows, -1)
        return self._raw[name]

    def rows(self, name: str, rows: Sequence[int]) -> Floats:
        """Some rows of a matrix as float32, (len(rows), width): the others are not looked at."""
        some = self.raw(name)[list(rows)]
        return self._floats(name, some).reshape(len(rows), self.tensors[name].shape[-1])

    def _floats(self, name: str, data: npt.NDArray[np.uint8]) -> Floats:
        """Whole rows of a tensor as numbers."""
        tensor = self.tensors[name]
        if tensor.type in (_F32, _F16):
            kind = np.float32 if tensor.type == _F32 else np.float16
            return data.view(kind).astype(np.float32)
        values: Floats = np.empty((len(data), tensor.shape[-1]), np.float32)
        to_float = _traits(tensor.type).to_float
        if not to_float:
            raise UnsupportedModel(
                f"{self.path}: {name} is of type {_type_name(tensor.type)}, which ggml cannot "
                f"turn into numbers; take another quantisation"
            )
        to_float(data.ctypes.data, values.ctypes.data, values.size)
        return values

    def integers(self, name: str) -> npt.NDArray[np.int32]:
        """A tensor of 32-bit integers. Raises KeyError where none has that name and type."""
        tensor = self.tensors[name]
        if tensor.type != _I32:
            raise KeyError(name)
        n = math.prod(tensor.shape)
        return np.frombuffer(self._bytes, np.int32, n, tensor.offset).reshape(tensor.shape).copy()

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
        at = 8
        (n_tensors, n_values), at = struct.unpack_from("<QQ", self._bytes, at), at + 16
        for _ in range(n_values):
            key, at = self._text(at)
            begin = at
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            value, at = self._value(kind, at + 4)
            self._values[key] = slice(begin, at)
            if value is not None:
                self.metadata[key] = value
        for _ in range(n_tensors):
            name, at = self._text(at)
            (n_axes,) = struct.unpack_from("<I", self._bytes, at)
            *axes, kind, offset = struct.unpack_from(f"<{n_axes}QIQ", self._bytes, at + 4)
            at += 4 + 8 * n_axes + 12
            self.tensors[name] = Tensor(tuple(reversed(axes)), kind, offset)
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-at // alignment) * alignment
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor._replace(offset=start + tensor.offset)

    def _text(self, at: int) -> tuple[str, int]:
        (n,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + n
        if end > len(self._bytes):
            raise IndexError
        return self._bytes[at + 8 : end].decode("utf-8", "replace"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._text(at)
        if kind != _ARRAY:
            number = _NUMBERS[kind] if kind in _NUMBERS else self._unknown(kind)
            return struct.unpack_from(f"<{number}", self._bytes, at)[0], at + struct.calcsize(
                f"<{number}"
            )
        inner, n = struct.unpack_from("<IQ", self._bytes, at)
        at += 12
        if inner in _NUMBERS:
            form = f"<{n}{_NUMBERS[inner]}"
            return list(struct.unpack_from(form, self._bytes, at)), at + struct.calcsize(form)
        if inner != _STRING:
            self._unknown(inner)
        length = struct.Struct("<Q").unpack_from
        for _ in range(n):  # vocabularies: hundreds of thousands, and nobody asks for them
            at += 8 + length(self._bytes, at)[0]
        return None, at

    def _unknown(self, kind: int) -> str:
        raise NotGGUF(f"{self.path} has a value of the unknown kind {kind}; it may be damaged")

    def _truncated(self, where: str) -> TruncatedGGUF:
        return TruncatedGGUF(
            f"{self.path} is incomplete: it ends after {len(self._bytes):,} bytes, {where}; "
            f"fetch or make it again"
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


class _Traits(ctypes.Structure):
    """ggml's ggml_type_traits, as far as the function that dequantises."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@cache
def _traits(kind: int) -> Any:
    get = exported("ggml_get_type_traits")
    get.restype, get.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]
    return get(kind).contents


def _type_name(kind: int) -> str:
    name = exported("ggml_type_name")
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    found = name(kind)
    return "NONE" if found is None else str(found.decode())


def _n_bytes(path: Path, name: str, tensor: Tensor) -> int:
    # ggml ends the process when asked about a type it does not know.
    if not 0 <= tensor.type < 1000 or _type_name(tensor.type) in ("NONE", "DEPRECATED"):
        raise UnsupportedModel(f"{path}: {name} is of the unknown type {tensor.type}")
    traits = _traits(tensor.type)
    return math.prod(tensor.shape) // int(traits.block) * int(traits.block_bytes)
