"""What a model is, read from its GGUF's header without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names
from batching.llama.devices import kv_values, layer_bytes, per_layer
from batching.llama.quantize import file_type_name
from speculation.system.files import in_words

_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class Shape:
    """A model's size and form; 0 and empty for what is not known.

    n_bytes   of all its files
    kv_values  of the keys and values of a token, in all layers
    file_type  its quantisation, such as Q4_K_M
    expert_bytes  those of ``n_bytes`` that are its layers' experts
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
    expert_bytes: int = 0

    def __str__(self) -> str:
        """``1.1 GB · 1.5B · Q4_K_M · 32,768 tokens``."""
        size = in_words(self.n_bytes) if self.n_bytes else ""
        context = f"{self.n_ctx_train:,} tokens" if self.n_ctx_train else ""
        return " · ".join(filter(None, [size, self.size_label, self.file_type, context]))


def describe(path: Path) -> Shape:
    """The shape of a model; of one in several files, ``path`` is the first.

    Raises as ``GGUFFile``, and OSError if a file is missing.
    """
    files = tuple(path.with_name(name) for name in part_names(path.name))
    stats = [file.stat() for file in files]
    return _read(files, sum(one.st_size for one in stats), max(one.st_mtime_ns for one in stats))


@lru_cache(512)
def _read(files: tuple[Path, ...], n_bytes: int, _modified: int) -> Shape:
    parts = [GGUFFile(file) for file in files]
    gguf = parts[0]
    architecture = str(gguf.metadata.get("general.architecture", ""))

    def value(key: str) -> int:
        return gguf.number(f"{architecture}.{key}")

    heads = per_layer(gguf, "attention.head_count")
    embeddings = gguf.tensors.get("token_embd.weight")
    return Shape(
        n_bytes,
        architecture,
        file_type_name(gguf.number("general.file_type", -1)),
        str(gguf.metadata.get("general.size_label", "")),
        value("context_length"),
        value("block_count"),
        max(per_layer(gguf, "attention.head_count_kv", heads), default=0),
        value("embedding_length"),
        max(per_layer(gguf, "feed_forward_length"), default=0),
        embeddings.shape[0] if embeddings is not None else 0,
        sum(kv_values(gguf)),
        bool(gguf.metadata.get(_TEMPLATE)),
        int(layer_bytes(parts)[1].sum()),
    )
