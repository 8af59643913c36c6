"""A context of an embedding model: whole texts in, one vector each out. Part of the ctypes edge.

llama.cpp pools the states of a text's tokens as the GGUF says, and applies the layers that some
models have after that. Such models attend to later tokens, so a text is read in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp.llama_cpp as C
import numpy as np

from batching.errors import ContextError, UnsupportedModel
from batching.llama.batch import BatchMemory
from batching.llama.create import initialised, out_of_memory
from batching.llama.hardware import physical_cores
from batching.llama.log import reason, recent_log
from batching.llama.model import Model
from batching.llama.native import NativeContext
from batching.llama.output import closed
from batching.rows import Rows
from batching.tree import Floats

MOST_TEXTS = 16  # in one batch


class EmbeddingContext:
    """A ``llama_context`` that pools.

    Raises UnsupportedModel if the GGUF names no pooling that gives vectors, OutOfMemory.
    """

    def __init__(self, model: Model, n_tokens: int, n_threads: int | None = None) -> None:
        """``n_tokens`` is the length of the longest text, and of a batch. Memory may grow with
        its square, so begin with few."""
        self.model, self.n_tokens = model, n_tokens
        params = C.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_tokens
        params.n_seq_max = min(MOST_TEXTS, n_tokens)  # llama.cpp aborts on more
        params.kv_unified = True
        params.embeddings = True
        params.no_perf = True
        params.n_threads = params.n_threads_batch = n_threads or physical_cores()
        created = initialised(model, params, None)
        if created is None:
            raise out_of_memory(
                f"llama.cpp could not create a context of {n_tokens:,} tokens for {model.path}: "
                f"{reason()}",
                model,
            )
        kind = C.llama_pooling_type(created.handle)
        if kind not in (
            C.LLAMA_POOLING_TYPE_MEAN,
            C.LLAMA_POOLING_TYPE_CLS,
            C.LLAMA_POOLING_TYPE_LAST,
        ):
            what = "ranks texts" if kind == C.LLAMA_POOLING_TYPE_RANK else "names no pooling"
            raise UnsupportedModel(
                f"{model.path} ({model.description}) {what}, so it gives no vector for a text; "
                f"choose an embedding model"
            )
        self._native: NativeContext | None = created
        self._batch = BatchMemory(n_tokens, MOST_TEXTS)
        model.users.add(self)

    def embed(self, texts: Sequence[Sequence[int]]) -> Floats:
        """The pooled states of the texts, (n_texts, n_embd). At most ``MOST_TEXTS`` texts of
        ``n_tokens`` together. Raises ContextError if llama.cpp does."""
        native = self._native
        if native is None:
            raise closed(self.model)
        tokens = [token for text in texts for token in text]
        positions = [position for text in texts for position in range(len(text))]
        seq_ids = [range(i, i + 1) for i, text in enumerate(texts) for _ in text]
        self._batch.fill(Rows(tokens, positions, seq_ids, [True] * len(tokens)))
        if native.memory:
            C.llama_memory_clear(native.memory, False)
        code = C.llama_decode(native.handle, self._batch.struct)
        if code:
            raise ContextError(
                f"llama_decode returned {code} for {len(tokens)} rows: {recent_log()[-400:]}"
            )
        found = np.empty((len(texts), self.model.n_embd_out), np.float32)
        for i in range(len(texts)):
            pooled = C.llama_get_embeddings_seq(native.handle, i)
            if not pooled:
                raise ContextError(f"llama.cpp gave no vector for text {i} of {len(texts)}")
            found[i] = np.ctypeslib.as_array(pooled, (self.model.n_embd_out,))
        return found

    def close(self) -> None:
        """Free the context. Idempotent."""
        self._native = None

    def forget(self) -> None:
        """Close it in a fork of its process."""
        self._native = None
