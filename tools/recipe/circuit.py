"""Initialises the first two layers with an induction circuit, so that the model can copy.

Transformers copy from the context with a pair of heads (Olsson et al. 2022, "In-context learning
and induction heads"): one writes each token to the next position, and one finds the position to
which the current token was written and outputs the token there. Training finds the pair only after
a long plateau: from a random initialisation there was no sign of it after 2.4 million tokens. So an
approximate circuit is set by hand, and training does the rest.

    layer 0, heads 0, 1   attend to the previous position; read its token through P, write it to U
    layer 1, all heads    query: the current token through P; key: the token in U;
                          value: the token at that position, output unchanged

P and U are orthogonal subspaces of the residual stream, with one pair for each head of layer 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tools.recipe.model import Attention, Block, Decoder

EMBEDDING_STD = 0.1
CONSTANT = 8.0  # dimension 0 of every embedding, in units of EMBEDDING_STD
CARRY = 0.2  # scale of the previous token's output
GIVE = 0.5  # scale of the found token's output
SHARPNESS = 6.0  # approximate logit margin of the attention to the previous position
MATCH = 2.1  # scale of the queries and keys that match tokens


@torch.no_grad()
def plant(decoder: Decoder) -> None:
    """Overwrite the initial embedding, final norm and first two attention layers.

    Raises ValueError if the model is too small for the circuit.
    """
    shape = decoder.shape
    if shape.layers < 2 or shape.heads < 2:
        raise ValueError(
            f"the circuit takes 2 layers of 2 heads, not {shape.layers} of {shape.heads}"
        )
    nn.init.normal_(decoder.embedding.weight, std=EMBEDDING_STD)
    # A constant in every token, which attention by position alone can use. It adds the same to all
    # logits and so changes no probability.
    decoder.embedding.weight[:, 0] = CONSTANT * EMBEDDING_STD
    decoder.norm.weight.fill_(0.03 / EMBEDDING_STD)
    # The slow rotary pairs, which vary little with distance; fewer if four subspaces do not fit.
    width = min(shape.head_dim * 9 // 16, (shape.dim - 1) // 4)
    basis = torch.zeros(shape.dim, shape.dim)
    nn.init.orthogonal_(basis[1:, 1:])
    parts = torch.split(basis[1 : 1 + 4 * width], width)  # each (width, dim)
    reads, writes = parts[:2], parts[2:4]
    before, find, *_ = (b.attention for b in decoder.blocks if isinstance(b, Block))
    for head in (0, 1):
        _attend_to_position_before(before, head)
        rows = slice(head * shape.head_dim, head * shape.head_dim + width)
        _value(before)[rows] = reads[head]
        before.out.weight[:, rows] = CARRY * writes[head].mT
    for head in range(shape.heads):
        rows = slice((head + 1) * shape.head_dim - width, (head + 1) * shape.head_dim)
        _query(find)[rows] = MATCH * reads[head % 2]
        _key(find)[rows] = MATCH * writes[head % 2]
    nn.init.orthogonal_(_value(find))
    find.out.weight.copy_(GIVE * _value(find).mT)


def _attend_to_position_before(attention: Attention, head: int) -> None:
    """Queries and keys from dimension 0 alone, rotated so that they match at a distance of one."""
    shape = attention.shape
    start = head * shape.head_dim
    rms = EMBEDDING_STD * math.sqrt((shape.dim - 1 + CONSTANT**2) / shape.dim)
    constant = CONSTANT * EMBEDDING_STD / rms  # dimension 0 after the norm
    size = math.sqrt(SHARPNESS * math.sqrt(shape.head_dim)) / constant
    for pair in range(shape.head_dim // 4):  # the faster half of the pairs
        angle = shape.rope_theta ** (-2 * pair / shape.head_dim)
        row = start + 2 * pair
        _query(attention)[row, 0] = size
        _key(attention)[row, 0] = size * math.cos(angle)
        _key(attention)[row + 1, 0] = size * math.sin(angle)


def _query(attention: Attention) -> Tensor:
    return attention.qkv.weight.chunk(3)[0]


def _key(attention: Attention) -> Tensor:
    return attention.qkv.weight.chunk(3)[1]


def _value(attention: Attention) -> Tensor:
    return attention.qkv.weight.chunk(3)[2]
