"""Whether a GGUF of the architecture ``dflash`` is a head that llama.cpp can run for a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from batching.errors import HeadsError
from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from speculation.heads.converted import (
    ANEW,
    check_drafted,
    check_last_layer,
    check_made_for,
    check_width,
)

ARCHITECTURE = "dflash"
DEFAULT_SIZE = 16  # where a file does not say it, as in llama.cpp
MARKOV, CONFIDENCE, SELECTOR = "markov_w1.weight", "conf_proj.weight", "selector_hidden.weight"


class Block(NamedTuple):
    """What a head fills in, and from what.

    layers        of the target, whose inputs it reads
    size          rows of a block, the text's last token included
    mask          the token of the others
    first         row that holds the first draft: 1, or 0 where the last token's own row has it
    causal        whether a row sees only those before it
    n_candidates  of DFlash 2: for each place; otherwise 0
    is_dspark     whether a place leans on the token before it
    has_confidence  of DSpark: whether it says how likely each draft is to hold
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
    def says_more(self) -> bool:
        """Whether its rows give more than logits."""
        return bool(self.n_candidates) or self.has_confidence


def check_dflash(gguf: GGUFFile, model: Model) -> Block:
    """What the head fills in. Raises HeadsError where head and model do not fit each other, or
    llama.cpp cannot run the head."""
    name = gguf.path.name

    def value(key: str, default: Any = None) -> Any:
        return gguf.metadata.get(f"{ARCHITECTURE}.{key}", default)

    check_made_for(gguf, model)
    check_width(gguf, model, value("embedding_length"))
    if value("attention.key_length") != value("attention.value_length"):
        raise HeadsError(
            f"the head {name} has keys {value('attention.key_length')} wide and values "
            f"{value('attention.value_length')}, and llama.cpp runs heads in which they are as "
            f"wide as each other; take another"
        )
    check_drafted(gguf, model)
    layers = value("target_layers")
    if not isinstance(layers, list) or not layers:
        raise HeadsError(f"the head {name} names {layers!r} as the layers it reads; {ANEW}")
    check_last_layer(gguf, model, layers)
    mask = gguf.metadata.get("tokenizer.ggml.mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < model.n_vocab:
        raise HeadsError(
            f"the head {name} has {mask!r} as the token that stands for what is to be filled in, "
            f"and {model.n_vocab} tokens; {ANEW}"
        )
    is_dspark = MARKOV in gguf.tensors
    first = 0 if is_dspark and value("sample_from_anchor", True) else 1
    size = value("block_size", None if is_dspark else DEFAULT_SIZE)
    if not isinstance(size, int) or size <= first:
        raise HeadsError(f"the head {name} has blocks of {size!r} tokens; {ANEW}")
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
