"""Checks whether llama.cpp can run a DFlash head (architecture ``dflash``) for a model."""

from __future__ import annotations

from typing import NamedTuple

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.converted import CONVERT_AGAIN, ConvertedHead

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
