"""Which models have the same vocabulary, so that one can draft for the other, by their headers.

Without loading them, so a little less strictly than ``check_same_vocabulary``.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.llama.vocabulary import FIRST_CHECKED, MAX_SIZE_DIFFERENCE

_TOKENS = "tokenizer.ggml.tokens"


class Vocabulary(NamedTuple):
    """A model's vocabulary; its ``n`` is 0 if the file is no model that writes text.

    kind     the tokenizer's, and which tokens it adds to a text
    digests  of its first n, n - 1, … tokens, as many as vocabularies may differ by
    """

    kind: tuple[object, ...]
    n: int
    digests: tuple[bytes, ...]

    def is_same(self, other: Vocabulary) -> bool:
        n = min(self.n, other.n)
        if not n or self.kind != other.kind or abs(self.n - other.n) > MAX_SIZE_DIFFERENCE:
            return False
        first, second = (one.digests[one.n - n :] for one in (self, other))
        return first[:1] == second[:1]


def vocabulary_of(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF; of several files, ``path`` is the first. Raises as ``GGUFFile``."""
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(512)
def _read(path: Path, _size: int, _modified: int) -> Vocabulary:
    gguf = GGUFFile(path)
    architecture = gguf.metadata.get("general.architecture", "")
    is_model = gguf.number(f"{architecture}.block_count") and "token_embd.weight" in gguf.tensors
    texts = gguf.texts(_TOKENS) if is_model else []
    digest, digests = hashlib.blake2b(digest_size=8), []
    for n, text in enumerate(texts, 1):
        if n > FIRST_CHECKED:
            digest.update(b"%d %b" % (len(text), text))
        if n >= len(texts) - MAX_SIZE_DIFFERENCE:
            digests.append(digest.digest())
    kind = gguf.metadata.get("tokenizer.ggml.model")
    added = [_added(gguf, name, by_default=kind != "gpt2") for name in ("bos", "eos")]
    return Vocabulary((kind, *added), len(texts), tuple(reversed(digests)))


def _added(gguf: GGUFFile, name: str, *, by_default: bool) -> int | None:
    """The token that begins or ends each text, if one is added; else its id may be arbitrary."""
    adds = gguf.metadata.get(f"tokenizer.ggml.add_{name}_token", by_default)
    return gguf.number(f"tokenizer.ggml.{name}_token_id", -1) if adds else None
