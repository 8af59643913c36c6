"""What a model is, read from its GGUF's header without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names
from batching.llama.quantize import file_type_name

_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class Shape:
    """A model's size and form; 0 and empty for what is not known.

    n_bytes   of all its files
    kv_values  of the keys and values of a token, in all layers
    file_type  its quantisation, such as Q4_K_M
    """

    n_bytes: int
    architecture: str = ""
    file_type: str = ""
    size_label: str = ""
    n_ctx_train: int = 0
    n_layer: int = 0
    n_head_kv: int = 0
    n_embd: int = 0
    n_ff: int = 0
    n_vocab: int = 0
    kv_values: int = 0
    has_template: bool = False


def describe(path: Path) -> Shape:
    """The shape of a model; of one in several files, ``path`` is the first.

    Raises as ``GGUFFile``, and OSError if a file is missing.
    """
    files = [path.with_name(name) for name in part_names(path.name)]
    stats = [file.stat() for file in files]
    return _read(path, sum(one.st_size for one in stats), max(one.st_mtime_ns for one in stats))


@lru_cache(256)
def _read(path: Path, n_bytes: int, _modified: int) -> Shape:
    gguf = GGUFFile(path)
    architecture = str(gguf.metadata.get("general.architecture", ""))

    def value(key: str, default: Any = 0) -> Any:
        return gguf.metadata.get(f"{architecture}.{key}", default)

    n_layer, n_embd = int(value("block_count")), int(value("embedding_length"))
    heads = _per_layer(value("attention.head_count", 1), n_layer)
    kv_heads = _per_layer(value("attention.head_count_kv", heads), n_layer)
    usual = n_embd // max(1, *heads) if heads else 0
    width = sum(int(value(f"attention.{kind}_length", usual)) for kind in ("key", "value"))
    embeddings = gguf.tensors.get("token_embd.weight")
    return Shape(
        n_bytes,
        architecture,
        file_type_name(gguf.number("general.file_type", -1)),
        str(gguf.metadata.get("general.size_label", "")),
        int(value("context_length")),
        n_layer,
        max(kv_heads, default=0),
        n_embd,
        max(_per_layer(value("feed_forward_length"), n_layer), default=0),
        embeddings.shape[0] if embeddings is not None else 0,
        width * sum(kv_heads),
        bool(gguf.metadata.get(_TEMPLATE)),
    )


def _per_layer(value: Any, n_layer: int) -> list[int]:
    """A value that a header gives once or for each layer."""
    return [int(one) for one in value] if isinstance(value, list) else [int(value)] * n_layer
