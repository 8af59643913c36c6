"""A start from which the model can copy: the first two layers hold an induction circuit.

What copies out of the context in a transformer is a pair of heads (Olsson et al. 2022, "In-context
learning and induction heads"): one that carries each token on to the next position, and one that
looks for the position to which the current token was carried, and gives out what stands there.
Training finds the pair by itself only after a long plateau: from a random start nothing had begun
after 2.4 million tokens here. So it is put in by hand, roughly, and training does the rest.

    layer 0, heads 0, 1   attend to the position before; read the token through P, write it along U
    layer 1, all heads    query: the current token through P; key: what stands along U;
                          value: the token there, given out as it is

P and U are orthogonal subspaces of the residual stream, one pair of them a head of layer 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tools.recipe.model import Attention, Block, Decoder

EMBEDDING_STD = 0.1
CONSTANT = 8.0  # what dimension 0 of every embedding holds, in units of EMBEDDING_STD
CARRY = 0.2  # how strongly the token before is written
GIVE = 0.5  # how strongly the token found is written
SHARPNESS = 6.0  # of the attention to the position before: its logit's lead, roughly
MATCH = 2.1  # scale of the queries and keys that look for a token


@torch.no_grad()
def plant(decoder: Decoder) -> None:
    """Overwrite the start of the embedding, of the last norm and of the first two attentions.

    Raises ValueError where the circuit has no room.
    """
    shape = decoder.shape
    if shape.layers < 2 or shape.heads < 2:
        raise ValueError(
            f"the circuit takes 2 layers of 2 heads, not {shape.layers} of {shape.heads}"
        )
    nn.init.normal_(decoder.embedding.weight, std=EMBEDDING_STD)
    # The same number in every token: something for attention by position alone to hold on to. It
    # adds the same to all logits, which changes no probability.
    decoder.embedding.weight[:, 0] = CONSTANT * EMBEDDING_STD
    decoder.norm.weight.fill_(0.03 / EMBEDDING_STD)
    # The slower pairs, which distance turns little; fewer where four subspaces have no room.
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
    """Queries and keys from dimension 0 alone, turned so that they agree at a distance of one."""
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
