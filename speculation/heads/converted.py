"""Heads in llama.cpp's formats (EAGLE-3, DFlash), which take the target's auxiliary hidden states.

llama.cpp runs the whole head. It detects some mismatches only while decoding, and then aborts the
process. So target, width and draft vocabulary are checked here, before anything is loaded. If the
file has no embeddings or output matrix, llama.cpp takes the target's, through a small context of
the target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batching.errors import ModelError
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.vocabulary import check_same_vocabulary
from speculation.heads.base import HeadInContext, opened
from speculation.heads.file import check_trained_on, model_name

EMBEDDINGS, OUTPUT, DRAFT_TOKENS = "token_embd.weight", "output.weight", "d2t"
CONVERT_AGAIN = "convert it again with convert_hf_to_gguf.py of a recent llama.cpp"
USE_MATCHING = "use the head made for this model"
_I64 = 27  # ggml_type


class ConvertedHead:
    """A head's file, to be checked against the model it is loaded for.

    target  the model's name, for errors
    """

    def __init__(self, gguf: GGUFFile, model: Model) -> None:
        """Raises ModelError if the head is split into several files or names another target."""
        self.tensors = gguf.tensors
        self.target = repr(model_name(model))
        self._gguf, self._model = gguf, model
        n_files = gguf.metadata.get("split.count", 1)
        way_out = "join them with llama.cpp's llama-gguf-split --merge"
        self.refuse(n_files > 1, f"is one of {n_files} files", way_out)
        trained_on = gguf.metadata.get("heads.target.fingerprint")
        if trained_on is not None:
            check_trained_on(gguf.path, gguf.metadata.get("heads.target.name"), trained_on, model)

    def refuse(self, condition: bool, fault: str, way_out: str = USE_MATCHING) -> None:
        """Raise ModelError if ``condition``; ``fault`` continues "the head name.gguf"."""
        if condition:
            raise ModelError(f"the head {self._gguf.path.name} {fault}; {way_out}")

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata of the head's architecture."""
        architecture = self._gguf.metadata["general.architecture"]
        return self._gguf.metadata.get(f"{architecture}.{key}", default)

    def check_width(self, key: str) -> None:
        """Raise ModelError if the model's hidden states are not as wide as ``key`` says."""
        width, theirs = self.value(key), self._model.n_embd
        self.refuse(
            width != theirs,
            f"needs hidden states {width} wide, but those of {self.target} are {theirs} wide",
        )

    def check_last_layer(self, layers: list[int]) -> None:
        """Raise ModelError if the head reads the output of the model's last layer."""
        n = self._model.n_layer
        self.refuse(
            n in layers,
            f"reads the inputs of layers {layers}, but {self.target} has layers 0 to {n - 1}, and "
            f"the output of the last one is not available",
            "use a head that reads earlier layers",
        )

    def check_draft_vocabulary(self) -> None:
        """Raise ModelError unless the output matrix has rows for distinct tokens of the model.

        ``d2t`` has the token of each row; without it, the rows are the whole vocabulary.
        """
        n_vocab, own = self._model.n_vocab, OUTPUT in self.tensors
        n_rows = self.tensors[OUTPUT].shape[0] if own else n_vocab
        if DRAFT_TOKENS not in self.tensors:
            self.refuse(
                n_rows != n_vocab,
                f"has {n_rows} logits and no {DRAFT_TOKENS} to map them to the {n_vocab} tokens of "
                f"{self.target}",
            )
            return
        kind = self.tensors[DRAFT_TOKENS].type
        self.refuse(
            kind != _I64,
            f"has a {DRAFT_TOKENS} of type {kind}, but llama.cpp reads 64-bit integers ({_I64})",
            CONVERT_AGAIN,
        )
        tokens = self._gguf.raw(DRAFT_TOKENS).reshape(-1).view(np.int64)
        matrix = f"its {OUTPUT}" if own else f"the model's shared {OUTPUT}"
        self.refuse(
            len(tokens) != n_rows,
            f"has a {DRAFT_TOKENS} of {len(tokens)} tokens, but {matrix} has {n_rows} rows",
            "use a complete head",
        )
        self.refuse(
            tokens.min() < 0 or tokens.max() >= n_vocab,
            f"drafts tokens from {tokens.min()} to {tokens.max()}, but {self.target} has {n_vocab}",
        )
        self.refuse(
            len(np.unique(tokens)) < len(tokens),
            f"has duplicate tokens in {DRAFT_TOKENS}: it may store differences as checkpoints do, "
            f"but llama.cpp reads token ids",
            CONVERT_AGAIN,
        )


class AuxStatesHead(HeadInContext):
    """A head that takes the inputs of some of the target's layers.

    causal  whether a row attends only to those before it
    """

    causal = True

    def __init__(self, path: Path, target: Model, layers: tuple[int, ...]) -> None:
        """Raises UnsupportedModel or ModelError if the head's tokens differ from the target's."""
        with opened(path, target) as model:
            check_same_vocabulary(target, model, special=False)
            if model.n_vocab != target.n_vocab:
                raise ModelError(
                    f"the head {path.name} has {model.n_vocab} tokens, but {model_name(target)!r} "
                    f"has {target.n_vocab}; use the head made for this model"
                )
        super().__init__(model)
        self.layers = layers
        self._target = target
        self._shared: Context | None = None

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        # The target's main context may be recreated while this one exists, so use another.
        if self._shared is None:
            small = replace(params, n_ctx=32, n_batch=1, n_seq_max=1)
            self._shared = Context(self._target, small)
        return Context(self.model, params, other=self._shared, causal=self.causal)

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
