"""Multi-token prediction: a model's own layer for the token after the next, as a drafting head.

Models trained with such layers carry them in their GGUF (DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", arXiv 2412.19437, section 2.2; Gloeckle et al. 2024, arXiv 2404.19737, had the idea). A row
takes a token and the model's state before it, as with EAGLE:

    x_t = F [norm(e(token_t)); norm(h_(t-1))]     g_t = layer(x_0 … x_t)     logits_t = O norm(g_t)

All of it runs in llama.cpp, in a context over the model that is loaded already, so that only the
layer and its KV cache are added. Trained for one token, it goes on from its own states g for more.
"""

from __future__ import annotations

from collections.abc import Sequence

from batching.errors import HeadsError, UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.private_api import internal
from batching.llama.vocabulary import check_same_vocabulary
from batching.target import Output
from batching.tree import Floats
from speculation.heads.base import HeadInContext
from speculation.heads.file import model_name

METHOD = "mtp"


def load_mtp(gguf: GGUFFile, target: Model) -> MtpHead:
    """The head for ``target`` from a file of its own.

    Raises HeadsError for that of another model, VocabularyMismatch where its tokens are others,
    UnsupportedModel for what llama.cpp cannot run, and what ``Model`` raises.
    """
    model = Model(gguf.path, n_gpu_layers=target.n_gpu_layers, mtp=True)
    try:
        if not model.n_mtp:
            raise UnsupportedModel(
                f"{gguf.path} holds layers for multi-token prediction that llama.cpp cannot run: "
                f"for {model.metadata('general.architecture')} it has no graph, or one for other "
                f"layers; leave the file out"
            )
        ours, theirs = (
            (m.metadata("general.architecture"), m.n_layer, m.n_embd_out, m.n_vocab)
            for m in (target, model)
        )
        if ours != theirs:
            raise HeadsError(
                f"{gguf.path.name} holds layers for multi-token prediction of a model "
                f"{_sizes(*theirs)}; {model_name(target)!r} is {_sizes(*ours)}: take the file that "
                f"belongs to it"
            )
        check_same_vocabulary(target, model, special=False)
        return MtpHead(target, model)
    except BaseException:
        model.close()
        raise


def _sizes(architecture: str | None, n_layer: int, n_embd: int, n_vocab: int) -> str:
    return f"{architecture} of {n_layer} layers, {n_embd} wide, {n_vocab} tokens"


class MtpHead(HeadInContext):
    """The first of a model's prediction layers, fed with the state that the model hands to it."""

    needs_hidden = False
    tokens = None  # the logits are over the whole vocabulary

    def __init__(self, target: Model, model: Model) -> None:
        """``model`` has the layer: ``target`` itself, or what a file of its own was loaded as.

        Raises UnsupportedModel where this build of llama.cpp does not give out the states.
        """
        internal("llama_set_embeddings_nextn")
        internal("llama_get_embeddings_nextn")
        super().__init__(model)
        self.layers = (target.n_layer,)
        self._is_own = model is not target

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        return Context(self.model, params, mtp=True)

    def states_of(self, output: Output, row: int) -> Floats:
        return output.aux_hidden_states(row, self.layers)

    def encode(self, states: Floats) -> Floats:
        return states

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        return states

    def close(self) -> None:
        self.stop()
        if self._is_own:
            super().close()
