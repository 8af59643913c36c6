"""A checkpoint to GGUF, in F32 (to compare exactly), F16 or Q8_0 (to ship).

    python -m tools.recipe.export --checkpoint DIR/checkpoint.pt --tokenizer DIR/tokenizer.model \\
        --out model.gguf --type q8_0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tools.recipe.model import Decoder, Shape
from tools.recipe.tokenizer import BOS, CHAT_TEMPLATE, END, UNKNOWN, Tokenizer

NAME = "Speculation 14M"
DESCRIPTION = "A small chat model for tests and demos, trained from scratch."
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def load_decoder(checkpoint: Path) -> Decoder:
    """The decoder of a training checkpoint, or of a GGUF written here, on the CPU."""
    if checkpoint.suffix == ".gguf":
        return read_gguf(checkpoint)
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    decoder = Decoder(Shape(**state["shape"]))
    decoder.load_state_dict(state["model"])
    return decoder.eval()


def read_gguf(path: Path) -> Decoder:
    """The decoder in a GGUF that `write_gguf` wrote, its weights rounded as they are there."""
    reader = gguf.GGUFReader(path)
    fields = {name.removeprefix("llama."): field for name, field in reader.fields.items()}

    def number(name: str) -> Any:
        return fields[name].contents()

    found = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
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
    """The decoder's names, from llama.cpp's: the way back from `tensors`."""
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
    """llama.cpp's tensor names with their float32 values; stacked matrices are taken apart.

    There is no `output.weight`: llama.cpp then uses the embedding, as the decoder does.
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
    """Write the model; vectors (norms) stay in F32 whatever the kind."""
    quantization, file_type = TYPES[kind]
    shape = decoder.shape
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license("cc-by-sa-4.0")
    writer.add_languages(["en"])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    if shape.inner != shape.dim:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, tokenizer)
    for tensor, values in tensors(decoder):
        if values.ndim == 1:
            writer.add_tensor(tensor, np.ascontiguousarray(values))
        else:
            quantized = gguf.quants.quantize(np.ascontiguousarray(values), quantization)
            writer.add_tensor(tensor, quantized, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = tokenizer.model
    ids = range(model.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i).encode() for i in ids])
    writer.add_token_scores([model.get_score(i) for i in ids])
    writer.add_token_types([_token_type(tokenizer, i) for i in ids])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(END)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _token_type(tokenizer: Tokenizer, token: int) -> gguf.TokenType:
    if tokenizer.model.is_unknown(token):
        return gguf.TokenType.UNKNOWN
    if tokenizer.model.is_control(token):
        return gguf.TokenType.CONTROL
    if tokenizer.model.is_byte(token):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF from a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=sorted(TYPES), default="q8_0")
    parser.add_argument("--name", default=NAME, help="what programs show")
    parser.add_argument("--description", default=DESCRIPTION)
    args = parser.parse_args()
    torch.set_num_threads(1)
    decoder, tokenizer = load_decoder(args.checkpoint), Tokenizer(args.tokenizer)
    write_gguf(decoder, tokenizer, args.out, args.type, args.name, args.description)


if __name__ == "__main__":
    main()
