"""Exports a checkpoint to GGUF, in F32 (for exact comparison), F16 or Q8_0 (for release).

    python -m tools.recipe.export --checkpoint DIR/checkpoint.pt --tokenizer DIR/tokenizer.model \\
        --out model.gguf --type q8_0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batching.gguf.writer import (
    FILE_TYPES,
    QUANTIZATION_VERSION,
    TensorType,
    Value,
)
from batching.gguf.writer import write_gguf as write
from batching.llama.weights import Weights, encoded_tensor
from tools.recipe.model import Decoder, Shape
from tools.recipe.tokenizer import BOS, CHAT_TEMPLATE, END, UNKNOWN, Tokenizer

NAME = "Speculation 14M"
DESCRIPTION = "A small chat model for tests and demos, trained from scratch."
TYPES = ("f16", "f32", "q8_0")  # of the matrices; vectors (norms) are F32


def load_decoder(checkpoint: Path) -> Decoder:
    """Load a decoder from a training checkpoint, or from a GGUF exported here, to the CPU."""
    if checkpoint.suffix == ".gguf":
        return read_gguf(checkpoint)
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    decoder = Decoder(Shape(**state["shape"]))
    decoder.load_state_dict(state["model"])
    return decoder.eval()


def read_gguf(path: Path) -> Decoder:
    """Load the decoder from a GGUF that `write_gguf` wrote, with its quantised weights."""
    file = Weights(path)

    def number(name: str) -> Any:
        return file.metadata[f"llama.{name}"]

    found = {name: torch.from_numpy(file.tensor(name)) for name in file.tensors}
    heads = number("attention.head_count")
    shape = Shape(
        vocab=len(found["token_embd.weight"]), dim=number("embedding_length"),
        layers=number("block_count"), heads=heads,
        head=len(found["blk.0.attn_q.weight"]) // heads, hidden=number("feed_forward_length"),
        context=number("context_length"), rope_theta=number("rope.freq_base"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
    )  # fmt: skip
    decoder = Decoder(shape)
    decoder.load_state_dict(dict(_stacked(found, shape.layers)))
    return decoder.eval()


def _stacked(found: dict[str, torch.Tensor], layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The decoder's tensors from llama.cpp's; the inverse of `tensors`."""
    yield "embedding.weight", found["token_embd.weight"]
    yield "norm.weight", found["output_norm.weight"]
    for i in range(layers):
        ours, block = f"blocks.{i}", {
            name.removeprefix(f"blk.{i}.").removesuffix(".weight"): tensor
            for name, tensor in found.items()
            if name.startswith(f"blk.{i}.")
        }  # fmt: skip
        yield f"{ours}.attention_norm.weight", block["attn_norm"]
        qkv = [block[name] for name in ("attn_q", "attn_k", "attn_v")]
        yield f"{ours}.attention.qkv.weight", torch.cat(qkv)
        yield f"{ours}.attention.out.weight", block["attn_output"]
        yield f"{ours}.feed_forward_norm.weight", block["ffn_norm"]
        yield f"{ours}.feed_forward.gate_up.weight", torch.cat((block["ffn_gate"], block["ffn_up"]))
        yield f"{ours}.feed_forward.down.weight", block["ffn_down"]


def tensors(decoder: Decoder) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """llama.cpp's tensor names with float32 values; stacked matrices are split.

    Without an `output.weight`, llama.cpp uses the embedding, as the decoder does.
    """
    weights = {k: v.detach().float().numpy() for k, v in decoder.state_dict().items()}
    yield "token_embd.weight", weights["embedding.weight"]
    for i in range(decoder.shape.layers):
        ours, theirs = f"blocks.{i}", f"blk.{i}"
        q, k, v = np.split(weights[f"{ours}.attention.qkv.weight"], 3)
        gate, up = np.split(weights[f"{ours}.feed_forward.gate_up.weight"], 2)
        yield f"{theirs}.attn_norm.weight", weights[f"{ours}.attention_norm.weight"]
        yield f"{theirs}.attn_q.weight", q
        yield f"{theirs}.attn_k.weight", k
        yield f"{theirs}.attn_v.weight", v
        yield f"{theirs}.attn_output.weight", weights[f"{ours}.attention.out.weight"]
        yield f"{theirs}.ffn_norm.weight", weights[f"{ours}.feed_forward_norm.weight"]
        yield f"{theirs}.ffn_gate.weight", gate
        yield f"{theirs}.ffn_up.weight", up
        yield f"{theirs}.ffn_down.weight", weights[f"{ours}.feed_forward.down.weight"]
    yield "output_norm.weight", weights["norm.weight"]


def write_gguf(
    decoder: Decoder, tokenizer: Tokenizer, out: Path, kind: str,
    name: str = NAME, description: str = DESCRIPTION,
) -> None:  # fmt: skip
    """Write the model with matrices of the type `kind`; vectors (norms) are always F32."""
    shape = decoder.shape
    head = {"key_length": shape.head_dim, "value_length": shape.head_dim}
    sizes: dict[str, Value] = {
        "context_length": shape.context,
        "embedding_length": shape.dim,
        "block_count": shape.layers,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads,
        **({f"attention.{of}": n for of, n in head.items()} if shape.inner != shape.dim else {}),
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": float(shape.rope_theta),
        "vocab_size": shape.vocab,
    }
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": name,
        "general.description": description,
        "general.license": "cc-by-sa-4.0",
        "general.languages": ["en"],
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **{f"llama.{key}": value for key, value in sizes.items()},
        **_tokenizer_metadata(tokenizer),
    }
    matrices = TensorType[kind.upper()]
    stored = {
        tensor: encoded_tensor(values, TensorType.F32 if values.ndim == 1 else matrices)
        for tensor, values in tensors(decoder)
    }
    write(out, metadata, stored)


def _tokenizer_metadata(tokenizer: Tokenizer) -> dict[str, Value]:
    model = tokenizer.model
    ids = range(model.vocab_size())
    values: dict[str, Value] = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [_token_type(tokenizer, i) for i in ids],
        "bos_token_id": BOS,
        "eos_token_id": END,
        "eot_token_id": END,
        "unknown_token_id": UNKNOWN,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return {**named, "tokenizer.chat_template": CHAT_TEMPLATE}


def _token_type(tokenizer: Tokenizer, token: int) -> int:
    """llama.cpp's token type: normal 1, unknown 2, control 3, byte 6."""
    if tokenizer.model.is_unknown(token):
        return 2
    if tokenizer.model.is_control(token):
        return 3
    return 6 if tokenizer.model.is_byte(token) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF from a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=TYPES, default="q8_0")
    parser.add_argument("--name", default=NAME, help="the model's display name")
    parser.add_argument("--description", default=DESCRIPTION)
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder, tokenizer = load_decoder(args.checkpoint), Tokenizer(args.tokenizer)
    write_gguf(decoder, tokenizer, args.out, args.type, args.name, args.description)


if __name__ == "__main__":
    main()
