"""Gemma 4's assistant: a small model for multi-token prediction that reads its target's KV cache.

A GGUF of the architecture ``gemma4-assistant``, as Google publishes one for each size of Gemma 4. A
row takes a token, by the target's embedding, and the state before it:

    x = P [e(token); g]        g' = Q layers(x)        logits = O norm(layers(x))

g is the target's state after its last norm, then what the row above gave. Its layers have queries
alone and attend to the keys and values of the target's last layers, so it keeps nothing of a text.
All rows of a step have the position of the text's last token, as the model was trained.
"""

from __future__ import annotations

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.vocabulary import check_same_vocabulary
from speculation.heads.file import model_name
from speculation.heads.mtp import MtpHead

ARCHITECTURE = "gemma4-assistant"
TARGET = "gemma4"


def load_assistant(gguf: GGUFFile, target: Model) -> AssistantHead:
    """The head for ``target``.

    Raises HeadsError for the assistant of another model, VocabularyMismatch where its tokens are
    others, and what ``Model`` raises.
    """
    model = Model(gguf.path, n_gpu_layers=target.n_gpu_layers)
    try:
        architecture = target.metadata("general.architecture")
        if (architecture, target.n_embd) != (TARGET, model.n_embd_out):
            raise HeadsError(
                f"{gguf.path.name} is the assistant of a {TARGET} model {model.n_embd_out} wide, "
                f"and {model_name(target)!r} is {architecture}, {target.n_embd} wide; take the "
                f"assistant that belongs to it"
            )
        check_same_vocabulary(target, model, special=False)
        return AssistantHead(target, model)
    except BaseException:
        model.close()
        raise


class AssistantHead(MtpHead):
    """The assistant in a context that has the KV cache of the target's."""

    attends_to_target = True

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        return Context(self.model, params, other=target)
