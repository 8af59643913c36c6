"""EAGLE-3's head, in llama.cpp's own form: a GGUF of the architecture ``eagle3``.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Published heads that llama.cpp's converter has converted
load unchanged. What goes into three layers of the target is encoded to one state; a row takes a
token and the state before it, the target's or one that the head itself gave:

    g_t = F [l_t; m_t; h_t]        g^_t = layer([norm(e(token_t)); norm(g_(t-1))]) + g_(t-1)

Encoder, layer and output run in llama.cpp. The target's embeddings and output matrix, where the
file has none of its own, are reached through a small context of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batching.context import Context, ContextParams
from batching.errors import HeadsError
from batching.gguf_file import GGUFFile
from batching.internals import check_taps, internal
from batching.model import Model
from batching.target import Output
from batching.tree import Floats
from batching.vocabulary import check_same_vocabulary
from speculation.heads import eagle3_file
from speculation.heads.eagle import HeadInContext
from speculation.heads.file import model_name

ARCHITECTURE = eagle3_file.ARCHITECTURE
METHOD = "eagle-3"


def load_eagle3(gguf: GGUFFile, model: Model) -> Eagle3Head:
    """The head for ``model``; ``start`` it before drafting.

    Raises HeadsError for a head that cannot be the model's or that llama.cpp cannot run,
    VocabularyMismatch where its tokens are others, UnsupportedModel where llama.cpp does not give
    out what goes into the model's layers.
    """
    layers = eagle3_file.check_eagle3(gguf, model)
    check_taps(model, layers)
    internal("llama_set_embeddings_nextn")
    head = Eagle3Head(gguf.path, model, layers)
    try:
        check_same_vocabulary(model, head.model, special=False)
        if head.model.n_vocab != model.n_vocab:
            raise HeadsError(
                f"the head {gguf.path.name} knows {head.model.n_vocab} tokens, the model "
                f"{model_name(model)!r} {model.n_vocab}; take the head that was made for it"
            )
    except BaseException:
        head.close()
        raise
    return head


class Eagle3Head(HeadInContext):
    """Encoder, layer and output in llama.cpp, over three layers of the target."""

    needs_hidden = False
    tokens = None  # llama.cpp gives logits for the whole vocabulary

    def __init__(self, path: Path, target: Model, layers: tuple[int, ...]) -> None:
        super().__init__(Model(path, n_gpu_layers=target.n_gpu_layers))
        self.layers = layers
        self._target = target
        self._shared: Context | None = None

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        # The target's own context may be made anew while this one lives, so it gets another.
        if self._shared is None:
            small = replace(params, n_ctx=32, n_batch=1, n_seq_max=1)
            self._shared = Context(self._target, small)
        return Context(self.model, params, other=self._shared)

    def states_of(self, output: Output, row: int) -> Floats:
        return output.layer_inputs(row, self.layers)

    def encode(self, states: Floats) -> Floats:
        return self.context.encode(states)

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        return states

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
