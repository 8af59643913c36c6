"""Multi-token prediction (MTP): a model's own layer for the token after the next, used as a head.

The GGUFs of models trained with such layers include them (DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", arXiv 2412.19437, section 2.2, after Gloeckle et al. 2024, arXiv 2404.19737). As in EAGLE,
each row combines a token with the model's state before it:

    x_t = F [norm(e(token_t)); norm(h_(t-1))]     g_t = layer(x_0 … x_t)     logits_t = O norm(g_t)

llama.cpp runs all of it, in another context of the loaded model, which adds only the layer and its
KV cache. The layer was trained for one token; for more, it continues from its own states g.
"""

from __future__ import annotations

from dataclasses import replace

from batching.errors import ModelError, UnsupportedModel
from batching.gguf.mtp import find_mtp_layers
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.private_api import check_functions
from batching.llama.vocabulary import check_same_vocabulary
from speculation.heads.base import HeadInContext, opened
from speculation.heads.file import HeadsKind, llama_format, model_name

ARCHITECTURE = "gemma4-assistant"
TARGET = "gemma4"


def load_mtp(gguf: GGUFFile, target: Model) -> MtpHead:
    """Load the head for ``target`` from a separate file.

    Raises ModelError for the layers of another model, UnsupportedModel if
    llama.cpp cannot run them, and the errors of ``Model``.
    """
    with opened(gguf.path, target, mtp=True) as model:
        if not model.n_mtp:
            raise UnsupportedModel(
                f"{gguf.path} contains multi-token-prediction layers that llama.cpp cannot run: "
                f"its graph for {model.metadata('general.architecture')} is missing or expects "
                f"other layers; load the model without this file"
            )
        ours, theirs = (
            (m.metadata("general.architecture"), m.n_layer, m.n_embd_out, m.n_vocab)
            for m in (target, model)
        )
        if ours != theirs:
            raise ModelError(
                f"{gguf.path.name} contains multi-token-prediction layers for a model with "
                f"{_sizes(*theirs)}, but {model_name(target)!r} has {_sizes(*ours)}; use the "
                f"file made for this model"
            )
        check_same_vocabulary(target, model, special=False)
        return MtpHead(target, model)


KIND = HeadsKind(
    "mtp",
    matches=lambda gguf: find_mtp_layers(gguf.path).mtp_only,
    load=load_mtp,
    of_model=lambda model: MtpHead(model, model) if model.n_mtp else None,
)


def _sizes(architecture: str | None, n_layer: int, n_embd: int, n_vocab: int) -> str:
    return f"architecture {architecture}, {n_layer} layers, width {n_embd} and {n_vocab} tokens"


class MtpHead(HeadInContext):
    """The first of a model's MTP layers, which takes the state the model passes to it."""

    def __init__(self, target: Model, model: Model) -> None:
        """``model`` has the layer: ``target`` itself, or a separate file of MTP layers.

        Raises UnsupportedModel if this build of llama.cpp does not expose the states.
        """
        check_functions()
        super().__init__(model)
        self.layers = (target.n_layer,)
        self._is_separate = model is not target

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        return Context(self.model, params, mtp=True)

    def close(self) -> None:
        self.stop()
        if self._is_separate:
            super().close()


class AssistantHead(MtpHead):
    """Gemma 4's assistant, a small model that attends to its target's KV cache.

    Google publishes one for each size of Gemma 4, as a GGUF of architecture ``gemma4-assistant``:

        x = P [e(token); g]        g' = Q layers(x)        logits = O norm(layers(x))

    g is the target's state after the final norm, or g' of the parent row. The layers have only
    queries and attend to the keys and values of the target's last layers, so the assistant has no
    KV cache. As in its training, all rows of a step have the position of the text's last token.
    """

    attends_to_target = True

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        # Several texts have the sequences that they have in the target.
        n_seq_max = max(params.n_seq_max, target.n_seq_max)
        return Context(self.model, replace(params, n_seq_max=n_seq_max), other=target)


def load_assistant(gguf: GGUFFile, target: Model) -> AssistantHead:
    """Load the head for ``target``.

    Raises ModelError for another model's assistant, UnsupportedModel, and the errors of
    ``Model``.
    """
    with opened(gguf.path, target) as model:
        architecture = target.metadata("general.architecture")
        if (architecture, target.n_embd) != (TARGET, model.n_embd_out):
            raise ModelError(
                f"{gguf.path.name} is the assistant of a {TARGET} model of width "
                f"{model.n_embd_out}, but {model_name(target)!r} has architecture {architecture} "
                f"and width {target.n_embd}; use the assistant made for this model"
            )
        check_same_vocabulary(target, model, special=False)
        return AssistantHead(target, model)


ASSISTANT = llama_format(KIND.method, ARCHITECTURE, load_assistant)
