"""EAGLE-3's head, from a GGUF of llama.cpp's architecture ``eagle3``.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Published heads load as converted by llama.cpp. An encoder
reduces the inputs l, m and h of three of the target's layers to one state g. Each row combines a
token with the state before it, from the encoder or predicted by the head:

    g_t = F [l_t; m_t; h_t]        g^_t = layer([norm(e(token_t)); norm(g_(t-1))]) + g_(t-1)

llama.cpp runs the encoder, the layer and the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.llama.private_api import check_layer_inputs, internal
from batching.slots import encoding
from batching.together import Coroutine
from batching.tree import Floats
from speculation.heads import eagle3_file
from speculation.heads.aux_states import AuxStatesHead
from speculation.heads.kind import llama_format

ARCHITECTURE = eagle3_file.ARCHITECTURE


def load_eagle3(gguf: GGUFFile, model: Model) -> Eagle3Head:
    """Load the head for ``model``; ``start`` it before drafting.

    Raises HeadsError if the head does not fit the model or llama.cpp cannot run it,
    VocabularyMismatch, UnsupportedModel if llama.cpp does not expose the model's layer inputs.
    """
    layers = eagle3_file.check_eagle3(gguf, model)
    check_layer_inputs(model, layers)
    internal("llama_set_embeddings_nextn")
    return Eagle3Head(gguf.path, model, layers)


KIND = llama_format("eagle-3", ARCHITECTURE, load_eagle3)


class Eagle3Head(AuxStatesHead):
    """EAGLE-3's head over the inputs of three of the target's layers."""

    def encode(self, states: Floats) -> Coroutine[Floats]:
        return encoding(self.context, states)

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        return states
