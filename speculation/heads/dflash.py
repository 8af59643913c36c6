"""DFlash's head: a small model that fills in a block of masked tokens in one decode.

Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv
2602.06036. The inputs of some of the target's layers become keys and values of the head's layers, a
row per token of the text. The block follows them: the text's last token, then mask tokens. Its rows
attend to the whole block and the whole text.

    k, v of token t: from norm(F [l_t; m_t; …])        block: t_n, mask, mask, … -> -, x_1, x_2, …

Loads GGUFs of architecture ``dflash``, written by llama.cpp's converter, including two variants.
DFlash 2 (z-lab, github.com/z-lab/dflash) outputs some candidates per position, and a score for each
pair of adjacent candidates. In DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec), logits
depend on the likeliest token at the previous position, and the head may predict the probability
that a draft is accepted.
"""

from __future__ import annotations

import numpy as np

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.llama.private_api import check_layer_inputs, internal
from batching.target import Output
from batching.tree import Floats
from speculation.drafting.tree_growth import top_tokens
from speculation.heads import dflash_file
from speculation.heads.aux_states import AuxStatesHead
from speculation.heads.kind import llama_format

ARCHITECTURE = dflash_file.ARCHITECTURE


def load_dflash(gguf: GGUFFile, model: Model) -> DFlashHead:
    """Load the head for ``model``; ``start`` it before drafting.

    Raises HeadsError if the head does not fit the model or llama.cpp cannot run it,
    VocabularyMismatch, UnsupportedModel if llama.cpp does not expose the model's layer inputs.
    """
    block = dflash_file.check_dflash(gguf, model)
    check_layer_inputs(model, block.layers)
    if block.outputs_hidden:
        internal("llama_set_embeddings_nextn")
        internal("llama_get_embeddings_nextn")
    return DFlashHead(gguf, model, block)


KIND = llama_format("dflash", ARCHITECTURE, load_dflash)


class DFlashHead(AuxStatesHead):
    """DFlash's head or a variant, usually without causal attention.

    n_drafts   most tokens drafted per block
    is_dspark  whether logits depend on the previous position's likeliest token
    """

    drafts_blocks = True

    def __init__(self, gguf: GGUFFile, target: Model, block: dflash_file.Block) -> None:
        super().__init__(gguf.path, target, block.layers)
        self.causal = block.causal
        self.outputs_hidden = block.outputs_hidden
        self.n_drafts = block.size - block.first
        self.is_dspark = block.is_dspark
        self._block = block

    def block(self, last: int, n_drafts: int) -> list[int]:
        """The block's rows that draft ``n_drafts`` tokens after ``last``, the text's last token."""
        return [last, *[self._block.mask] * (n_drafts - 1 + self._block.first)]

    def candidates(self, output: Output, depth: int, previous: int, limit: int) -> Floats:
        """The likeliest tokens and their probabilities, see ``BlockHead.candidates``."""
        row, block = self._block.first + depth, self._block
        if block.n_candidates:
            return self._pair_candidates(output, row, depth, previous, limit)
        top = np.array(top_tokens(output.logits(row), limit), np.float32).T
        if block.has_confidence:  # replaces the first probability; the others share the rest
            first, confidence = top[1, 0], output.hidden(row)[0]  # the same in all components
            top[1, 1:] *= (1 - confidence) / (1 - first) if first < 1 else 0
            top[1, 0] = confidence
        return top

    def _pair_candidates(
        self, output: Output, row: int, depth: int, previous: int, limit: int
    ) -> Floats:
        """DFlash 2: the candidates by their scores after the previous position's candidate."""
        n = self._block.n_candidates
        tokens, scores = np.split(output.hidden(row)[: n + n * n], [n])
        index = 0  # at depth 0, all rows of scores are equal
        if depth:
            index = int(np.argmax(output.hidden(row - 1)[:n] == previous))
        best = top_tokens(scores[index * n : (index + 1) * n], limit)
        return np.array([(tokens[i], prob) for i, prob in best], np.float32).T
