"""DFlash's head: a small model that fills in a block of masked tokens in one decode.

Chen, Liang and Liu 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv
2602.06036. The inputs of some of the target's layers become keys and values of the head's layers, a
row per token of the text. The block follows them: the text's last token, then mask tokens. Its rows
attend to the whole block and the whole text.

    k, v of token t: from norm(F [l_t; m_t; …])        block: t_n, mask, mask, … -> -, x_1, x_2, …

Loads GGUFs of architecture ``dflash``, written by llama.cpp's converter.
"""

from __future__ import annotations

from typing import Any

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.converted import CONVERT_AGAIN, AuxStatesHead, ConvertedHead
from speculation.heads.file import llama_format

ARCHITECTURE = "dflash"
DEFAULT_SIZE = 16  # llama.cpp's default if the file has no block size
# Tensors of variants whose drafts depend on each other.
VARIANTS = {"markov_w1.weight": "DSpark", "selector_hidden.weight": "DFlash 2"}


def load_dflash(gguf: GGUFFile, model: Model) -> DFlashHead:
    """Load the head for ``model``; ``start`` it before drafting.

    Raises ModelError if the head does not fit the model or llama.cpp cannot run it,
    UnsupportedModel if the vocabularies differ or llama.cpp does not expose the layer inputs.
    """
    head = ConvertedHead(gguf, model)
    for tensor, variant in VARIANTS.items():
        head.refuse(tensor in gguf.tensors, f"is one of {variant}", "use a head of DFlash")
    head.check_width("embedding_length")
    keys, values = head.value("attention.key_length"), head.value("attention.value_length")
    fault = f"has keys {keys} wide and values {values} wide, but llama.cpp needs equal widths"
    head.refuse(keys != values, fault, "use another")
    head.check_draft_vocabulary()
    layers = head.value("target_layers")
    fault = f"lists {layers!r} as the layers it reads"
    head.refuse(not isinstance(layers, list) or not layers, fault, CONVERT_AGAIN)
    head.check_last_layer(layers)
    mask: Any = gguf.metadata.get("tokenizer.ggml.mask_token_id")
    fault = f"has the mask token {mask!r}, which is not one of {model.n_vocab} tokens"
    head.refuse(not isinstance(mask, int) or not 0 <= mask < model.n_vocab, fault, CONVERT_AGAIN)
    size = head.value("block_size", DEFAULT_SIZE)
    fault = f"has blocks of {size!r} tokens"
    head.refuse(not isinstance(size, int) or size < 2, fault, CONVERT_AGAIN)
    model.check_layer_inputs(layers)
    causal = head.value("attention.causal", False)
    return DFlashHead(gguf, model, tuple(layers), mask, size - 1, causal=causal)


KIND = llama_format("dflash", ARCHITECTURE, load_dflash)


class DFlashHead(AuxStatesHead):
    """DFlash's head, usually without causal attention.

    mask      the token of a block's rows after the first
    n_drafts  most tokens drafted per block
    """

    outputs_hidden = False

    def __init__(
        self,
        gguf: GGUFFile,
        target: Model,
        layers: tuple[int, ...],
        mask: int,
        n_drafts: int,
        *,
        causal: bool,
    ) -> None:
        super().__init__(gguf.path, target, layers)
        self.causal, self.mask, self.n_drafts = causal, mask, n_drafts
