"""Bigram tables: a model's most likely next tokens after each token, averaged over public text.

Token recycling starts from one. ``table`` has the data structure, ``__main__`` builds a table.
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
    """The table of ``model``: the user's own in the cache, else the one next to the model's file,
    else an empty one.

    An unusable file is skipped with a warning; methods can draft without a table.
    """
    for path in (cached_file(model), model.path.with_suffix(SUFFIX)):
        if path.is_file():
            try:
                return BigramTable.load(path, model.n_vocab)
            except InvalidParameter as error:
                log.warning("%s; ignoring the file", error)
    return BigramTable()


def cached_file(model: Model) -> Path:
    """The path of the table that the user built for a model."""
    return cache_folder() / "bigrams" / f"{model.path.stem}-{fingerprint(model.path)}{SUFFIX}"
