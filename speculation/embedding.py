"""Vectors for texts, piece by piece, so that other texts need not wait for a long one.

An embedding model pools by itself (``batching.llama.embedding``). Of a model that writes text, the
states after the last layer are pooled here: their mean, unless the GGUF says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batching.errors import InvalidParameter, PromptTooLong, UnsupportedModel
from batching.llama.context import Context
from batching.llama.create import max_tokens
from batching.llama.embedding import MOST_TEXTS, EmbeddingContext
from batching.llama.model import Model
from batching.rows import text_rows
from batching.target import ALL, END
from batching.tree import Floats
from speculation.average import Average
from speculation.settings import tokens_of

LEAST_ROWS = 32  # of a decode; fewer take almost as long
LEAST_CELLS = 512  # of a context; longer texts get one of their own size
POOLING = {"1": "mean", "2": "first", "3": "last"}  # of the GGUF's pooling_type


@dataclass(frozen=True)
class Embeddings:
    """Vectors of length 1, (n_texts, n_embd), and the tokens of each text."""

    vectors: Floats
    n_tokens: tuple[int, ...]


class Embedder:
    """Gives texts vectors. Everything happens in the engine's thread.

    n_most  tokens that a text may have
    """

    def __init__(self, model: Model, n_most: int) -> None:
        self.model, self.n_most = model, n_most
        # Seconds of a row, of which each has output: it takes longer than a prompt's.
        self._pace = Average(0.02)

    def embed(
        self, texts: Sequence[Sequence[int]], vectors: Floats, seconds: Callable[[], float]
    ) -> Iterator[bool]:
        """Fill ``vectors``, (n_texts, n_embd). Yields after each decode, which takes about
        ``seconds()`` at most where a text can be read in pieces."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _n_rows(self, seconds: float, most: int) -> int:
        """How many rows fit a time."""
        wanted = int(seconds / self._pace.value) if self._pace.value else 0
        return min(max(LEAST_ROWS, wanted), most)

    def _cells(self, n_tokens: int) -> int:
        """The size of a context for a text: twice as many as before, until it fits."""
        n_cells = LEAST_CELLS
        while n_cells < n_tokens:
            n_cells *= 2
        return min(n_cells, self.n_most)


def split(model: Model, texts: Sequence[str | Sequence[int]], n_most: int) -> list[list[int]]:
    """The tokens of texts that are to get vectors, with the marks that the model expects.

    Raises InvalidParameter for a text without tokens, PromptTooLong for one of more than ``n_most``
    tokens.
    """
    found = []
    for number, text in enumerate(texts):
        tokens = list(tokens_of(model, text, f"text {number}"))
        end = model.special_token("eos") if model.add_eos and isinstance(text, str) else None
        if end is not None:
            tokens.append(end)
        if not tokens:
            raise InvalidParameter(f"text {number} has no tokens; give some text")
        if len(tokens) > n_most:
            raise PromptTooLong(
                f"text {number} has {len(tokens)} tokens, and the model reads {n_most} at most; "
                f"split it",
                requested=len(tokens),
                available=n_most,
            )
        found.append(tokens)
    return found


def normalised(vectors: Floats) -> Floats:
    """The vectors with length 1; a vector of zeros stays."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


class PooledStates(Embedder):
    """Pools the states of a model that writes text, in a small context of its own."""

    def __init__(self, context: Context) -> None:
        """``context`` is the model's usual one, whose texts are left alone."""
        super().__init__(context.model, min(context.n_ctx, max_tokens(context.model)))
        self._usual = context
        self._own: Context | None = None
        kind = self.model.metadata(f"{self.model.architecture}.pooling_type")
        self._pooling = POOLING.get(kind or "1", "mean")
        if kind == "4":
            raise UnsupportedModel(
                f"{self.model.path} ({self.model.description}) ranks texts, so it gives no vector "
                f"for a text; choose another model"
            )

    def embed(
        self, texts: Sequence[Sequence[int]], vectors: Floats, seconds: Callable[[], float]
    ) -> Iterator[bool]:
        context = self._context_for(max(map(len, texts)))
        for text, vector in zip(texts, vectors, strict=True):
            context.seq_rm(ALL, 0, END)
            vector[:] = 0
            first = 0
            while first < len(text):
                piece = text[first : first + self._n_rows(seconds(), context.n_batch)]
                with self._pace.timing(len(piece)):
                    output = context.decode(text_rows(piece, first, [True] * len(piece)))
                    _ = output.hidden(0)  # waits for a device
                if self._pooling == "mean":
                    for row in range(len(piece)):
                        vector += output.hidden(row)
                elif self._pooling == "last" or not first:
                    vector[:] = output.hidden(0 if self._pooling == "first" else len(piece) - 1)
                first += len(piece)
                yield True

    def _context_for(self, n_tokens: int) -> Context:
        """A context for texts of so many tokens."""
        if self._own is None or self._own.n_ctx < n_tokens or self._own.is_closed:
            self.close()
            usual = self._usual
            params = replace(
                usual.params,
                n_ctx=self._cells(n_tokens),
                n_seq_max=1,
                n_slots=1,
                n_rewind=0,
                flash_attn="on" if usual.flash_attn else "off",
            )
            self._own = Context(self.model, params)
            self._own.want_hidden(True)
        return self._own

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None


class PooledTexts(Embedder):
    """Vectors of an embedding model, which reads each text in one piece."""

    def __init__(self, model: Model, n_threads: int | None) -> None:
        super().__init__(model, max_tokens(model))
        self._n_threads = n_threads
        self._context = EmbeddingContext(model, self._cells(1), n_threads)

    def embed(
        self, texts: Sequence[Sequence[int]], vectors: Floats, seconds: Callable[[], float]
    ) -> Iterator[bool]:
        if self._context.n_tokens < (n_longest := max(map(len, texts))):
            larger = EmbeddingContext(self.model, self._cells(n_longest), self._n_threads)
            self._context.close()
            self._context = larger
        first = 0
        while first < len(texts):
            n_rows = self._n_rows(seconds(), self._context.n_tokens)
            end, n_left = first + 1, n_rows - len(texts[first])
            while end < min(len(texts), first + MOST_TEXTS) and len(texts[end]) <= n_left:
                n_left -= len(texts[end])
                end += 1
            with self._pace.timing(sum(map(len, texts[first:end]))):
                vectors[first:end] = self._context.embed(texts[first:end])
            first = end
            yield True

    def close(self) -> None:
        """Free the context and the model."""
        self._context.close()
        self.model.close()
