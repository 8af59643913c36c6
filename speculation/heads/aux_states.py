"""AuxStatesHead: base of EAGLE-3 and DFlash heads, which take the target's auxiliary hidden states.

llama.cpp runs the whole head, from a file in its own format. If the file has no embeddings or
output matrix, llama.cpp takes the target's, through a small context of the target.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batching.errors import HeadsError
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.vocabulary import check_same_vocabulary
from speculation.heads.base import HeadInContext, opened
from speculation.heads.file import model_name


class AuxStatesHead(HeadInContext):
    """A head that takes the inputs of some of the target's layers.

    causal  whether a row attends only to those before it
    """

    causal = True

    def __init__(self, path: Path, target: Model, layers: tuple[int, ...]) -> None:
        """Raises VocabularyMismatch or HeadsError if the head's tokens differ from the target's."""
        with opened(path, target) as model:
            check_same_vocabulary(target, model, special=False)
            if model.n_vocab != target.n_vocab:
                raise HeadsError(
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
