"""Gemma 4's assistant: a small multi-token-prediction model that attends to its target's KV cache.

Google publishes one for each size of Gemma 4, as a GGUF of architecture ``gemma4-assistant``. Each
row combines the target's embedding of a token with the state before it:

    x = P [e(token); g]        g' = Q layers(x)        logits = O norm(layers(x))

g is the target's state after the final norm, or g' of the parent row. The layers have only queries
and attend to the keys and values of the target's last layers, so the assistant has no KV cache. As
in its training, all rows of a step have the position of the text's last token.
"""

from __future__ import annotations

from dataclasses import replace

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.llama.context import Context, ContextParams
from batching.llama.model import Model
from batching.llama.vocabulary import check_same_vocabulary
from speculation.heads.base import opened
from speculation.heads.file import llama_format, model_name
from speculation.heads.mtp import KIND as MTP
from speculation.heads.mtp import MtpHead

ARCHITECTURE = "gemma4-assistant"
TARGET = "gemma4"


def load_assistant(gguf: GGUFFile, target: Model) -> AssistantHead:
    """Load the head for ``target``.

    Raises HeadsError for another model's assistant, VocabularyMismatch, and the errors of
    ``Model``.
    """
    with opened(gguf.path, target) as model:
        architecture = target.metadata("general.architecture")
        if (architecture, target.n_embd) != (TARGET, model.n_embd_out):
            raise HeadsError(
                f"{gguf.path.name} is the assistant of a {TARGET} model of width "
                f"{model.n_embd_out}, but {model_name(target)!r} has architecture {architecture} "
                f"and width {target.n_embd}; use the assistant made for this model"
            )
        check_same_vocabulary(target, model, special=False)
        return AssistantHead(target, model)


KIND = llama_format(MTP.method, ARCHITECTURE, load_assistant)


class AssistantHead(MtpHead):
    """The assistant, in a context that shares the target's KV cache."""

    attends_to_target = True

    def _make_context(self, params: ContextParams, target: Context) -> Context:
        # Several texts have the sequences that they have in the target.
        n_seq_max = max(params.n_seq_max, target.n_seq_max)
        return Context(self.model, replace(params, n_seq_max=n_seq_max), other=target)
