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

from typing import NamedTuple

import numpy as np

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.target import Output
from batching.tree import Floats
from speculation.drafting.tree_growth import top_tokens
from speculation.heads.aux_states import AuxStatesHead
from speculation.heads.converted import CONVERT_AGAIN, ConvertedHead
from speculation.heads.file import llama_format

ARCHITECTURE = "dflash"
DEFAULT_SIZE = 16  # llama.cpp's default if the file has no block size
MARKOV, CONFIDENCE, SELECTOR = "markov_w1.weight", "conf_proj.weight", "selector_hidden.weight"


class Block(NamedTuple):
    """The layout of a head's blocks, and its inputs.

    layers        layers of the target whose inputs it reads
    size          rows of a block, including the text's last token
    mask          the token of all other rows
    first         row of the first draft: 1, or 0 if the last token's own row predicts it
    causal        whether a row attends only to those before it
    n_candidates  DFlash 2: candidates per position; otherwise 0
    is_dspark     whether logits depend on the previous position's likeliest token
    has_confidence  DSpark: whether it predicts the probability that a draft is accepted
    """

    layers: tuple[int, ...]
    size: int
    mask: int
    first: int
    causal: bool
    n_candidates: int
    is_dspark: bool
    has_confidence: bool

    @property
    def outputs_hidden(self) -> bool:
        """Whether its rows have ``Output.hidden`` besides logits."""
        return bool(self.n_candidates) or self.has_confidence


def check_dflash(gguf: GGUFFile, model: Model) -> Block:
    """Check a head; return the layout of its blocks.

    Raises HeadsError if the head does not fit the model or llama.cpp cannot run it.
    """
    head = ConvertedHead(gguf, model)
    value = head.value
    head.check_width("embedding_length")
    keys, values = value("attention.key_length"), value("attention.value_length")
    if keys != values:
        fault = f"has keys {keys} wide and values {values} wide, but llama.cpp needs equal widths"
        raise head.error(fault, "use another")
    head.check_draft_vocabulary()
    layers = value("target_layers")
    if not isinstance(layers, list) or not layers:
        raise head.error(f"lists {layers!r} as the layers it reads", CONVERT_AGAIN)
    head.check_last_layer(layers)
    mask = gguf.metadata.get("tokenizer.ggml.mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < model.n_vocab:
        fault = f"has the mask token {mask!r}, which is not one of {model.n_vocab} tokens"
        raise head.error(fault, CONVERT_AGAIN)
    is_dspark = MARKOV in gguf.tensors
    first = 0 if is_dspark and value("sample_from_anchor", True) else 1
    size = value("block_size", None if is_dspark else DEFAULT_SIZE)
    if not isinstance(size, int) or size <= first:
        raise head.error(f"has blocks of {size!r} tokens", CONVERT_AGAIN)
    return Block(
        layers=tuple(layers),
        size=size,
        mask=mask,
        first=first,
        causal=value("attention.causal", False),
        n_candidates=value("selector_top_k", 0) if SELECTOR in gguf.tensors else 0,
        is_dspark=is_dspark,
        has_confidence=is_dspark and CONFIDENCE in gguf.tensors,
    )


def load_dflash(gguf: GGUFFile, model: Model) -> DFlashHead:
    """Load the head for ``model``; ``start`` it before drafting.

    Raises HeadsError if the head does not fit the model or llama.cpp cannot run it,
    VocabularyMismatch, UnsupportedModel if llama.cpp does not expose the model's layer inputs.
    """
    block = check_dflash(gguf, model)
    model.check_layer_inputs(block.layers)
    return DFlashHead(gguf, model, block)


KIND = llama_format("dflash", ARCHITECTURE, load_dflash)


class DFlashHead(AuxStatesHead):
    """DFlash's head or a variant, usually without causal attention.

    n_drafts   most tokens drafted per block
    is_dspark  whether logits depend on the previous position's likeliest token
    """

    drafts_blocks = True

    def __init__(self, gguf: GGUFFile, target: Model, block: Block) -> None:
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
