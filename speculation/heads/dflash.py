"""DFlash's head: a small model that fills in a whole block of masked tokens at once.

Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv
2602.06036. What goes into some layers of the target becomes keys and values of the head's layers, a
row for each token of the text. The block stands behind them: the text's last token and masks,
each of which sees all of them and all of the text.

    k, v of token t: from norm(F [l_t; m_t; …])        block: t_n, mask, mask, … -> -, x_1, x_2, …

A GGUF of the architecture ``dflash``, as llama.cpp's converter writes it, and its two variants. In
DFlash 2 (z-lab, github.com/z-lab/dflash) the head names some candidates for each place and scores
each pair of neighbours. In DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec) the logits of
a place lean on the likeliest token before it, and the head says how likely each draft is to hold.
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

ARCHITECTURE = dflash_file.ARCHITECTURE
METHOD = "dflash"


def load_dflash(gguf: GGUFFile, model: Model) -> DFlashHead:
    """The head for ``model``; ``start`` it before drafting.

    Raises HeadsError for a head that cannot be the model's or that llama.cpp cannot run,
    VocabularyMismatch where its tokens are others, UnsupportedModel where llama.cpp does not give
    out what goes into the model's layers.
    """
    block = dflash_file.check_dflash(gguf, model)
    check_layer_inputs(model, block.layers)
    if block.says_more:
        internal("llama_set_embeddings_nextn")
        internal("llama_get_embeddings_nextn")
    return DFlashHead(gguf, model, block)


class DFlashHead(AuxStatesHead):
    """The head in a context without causal attention, and what its blocks say.

    n_drafts   tokens that a block drafts at most
    is_dspark  whether a place leans on the token before it
    """

    drafts_blocks = True

    def __init__(self, gguf: GGUFFile, target: Model, block: dflash_file.Block) -> None:
        super().__init__(gguf.path, target, block.layers)
        self.causal = block.causal
        self.gives_states = block.says_more
        self.n_drafts = block.size - block.first
        self.is_dspark = block.is_dspark
        self._block = block

    def block(self, last: int, n_drafts: int) -> list[int]:
        """The rows that draft ``n_drafts`` tokens after the text's last one."""
        return [last, *[self._block.mask] * (n_drafts - 1 + self._block.first)]

    def candidates(self, output: Output, depth: int, above: int, most: int) -> Floats:
        """The likeliest tokens, best first, and their probabilities, (2, n) with n <= ``most``.

        For the draft at ``depth`` below the text's last token (0 = the next), where the one before
        it is ``above``; ``output`` is that of the block.
        """
        row, block = self._block.first + depth, self._block
        if block.n_candidates:
            return self._of_lattice(output, row, depth, above, most)
        found = np.array(top_tokens(output.logits(row), most), np.float32).T
        if block.has_confidence:
            first, held = found[1, 0], output.hidden(row)[0]  # the same in all components
            found[1, 1:] *= (1 - held) / (1 - first) if first < 1 else 0
            found[1, 0] = held
        return found

    def _of_lattice(self, output: Output, row: int, depth: int, above: int, most: int) -> Floats:
        """By the scores of each candidate after each one of the place before."""
        n = self._block.n_candidates
        tokens, scores = np.split(output.hidden(row)[: n + n * n], [n])
        before = 0  # of the first draft, whose predecessor is the text's last token, all are equal
        if depth:
            before = int(np.argmax(output.hidden(row - 1)[:n] == above))
        best = top_tokens(scores[before * n : (before + 1) * n], most)
        return np.array([(tokens[i], prob) for i, prob in best], np.float32).T
