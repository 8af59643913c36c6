"""Bigram tables: what a model thinks likely after each token, made once from public text.

Token recycling starts with one. ``table`` is the table, ``__main__`` makes one for a model.
"""

from __future__ import annotations

import logging
from pathlib import Path

from batching.errors import InvalidParameter
from batching.gguf.reader import fingerprint
from batching.llama.model import Model
from speculation.bigrams.table import N_NEXT, BigramTable
from speculation.system.cache_folder import cache_folder

SUFFIX = ".bigrams.npz"
__all__ = ["N_NEXT", "SUFFIX", "BigramTable", "cached_file", "load_bigrams"]
log = logging.getLogger(__name__)


def load_bigrams(model: Model) -> BigramTable:
    """The table of ``model``: the user's own, in the cache, else that beside its file, else an
    empty one.

    A file that cannot be used counts as none, with a warning: methods draft without it.
    """
    for path in (cached_file(model), model.path.with_suffix(SUFFIX)):
        if path.is_file():
            try:
                return BigramTable.load(path, model.n_vocab)
            except InvalidParameter as error:
                log.warning("%s; going on without it", error)
    return BigramTable()


def cached_file(model: Model) -> Path:
    """Where the table is kept that a user made of a model."""
    return cache_folder() / "bigrams" / f"{model.path.stem}-{fingerprint(model.path)}{SUFFIX}"
