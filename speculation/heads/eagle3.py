"""EAGLE-3's head, in llama.cpp's own form: a GGUF of the architecture ``eagle3``.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840. Published heads that llama.cpp's converter has converted
load unchanged. What goes into three layers of the target is encoded to one state; a row takes a
token and the state before it, the target's or one that the head itself gave:

    g_t = F [l_t; m_t; h_t]        g^_t = layer([norm(e(token_t)); norm(g_(t-1))]) + g_(t-1)

Encoder, layer and output run in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.llama.private_api import check_layer_inputs, internal
from batching.tree import Floats
from speculation.heads import eagle3_file
from speculation.heads.aux_states import AuxStatesHead

ARCHITECTURE = eagle3_file.ARCHITECTURE
METHOD = "eagle-3"


def load_eagle3(gguf: GGUFFile, model: Model) -> Eagle3Head:
    """The head for ``model``; ``start`` it before drafting.

    Raises HeadsError for a head that cannot be the model's or that llama.cpp cannot run,
    VocabularyMismatch where its tokens are others, UnsupportedModel where llama.cpp does not give
    out what goes into the model's layers.
    """
    layers = eagle3_file.check_eagle3(gguf, model)
    check_layer_inputs(model, layers)
    internal("llama_set_embeddings_nextn")
    return Eagle3Head(gguf.path, model, layers)


class Eagle3Head(AuxStatesHead):
    """Encoder, layer and output in llama.cpp, over three layers of the target."""

    def encode(self, states: Floats) -> Floats:
        return self.context.encode(states)

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        return states
