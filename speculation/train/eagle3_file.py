"""Writes EAGLE-3's head as llama.cpp's converter would: it runs in llama.cpp's own programs too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batching.tree import Floats
from speculation.heads.eagle import EagleShape
from speculation.heads.eagle3 import ARCHITECTURE
from speculation.heads.file import HeadsInfo, gguf_writer


def write_eagle3(
    path: Path,
    info: HeadsInfo,
    shape: EagleShape,
    tensors: Mapping[str, Floats],
    layers: Sequence[int],
    target: Path,
    tokens: npt.NDArray[np.int32] | None = None,
    output: Floats | None = None,
    kind: str = "q8_0",
) -> None:
    """Write a head over the inputs of ``layers``, with the tokenizer of the GGUF ``target``.

    Where it drafts ``tokens`` alone, ``output`` is the target's output matrix for these; else the
    target's own is used, and its embeddings always. Needs the package gguf. The file appears when
    it is whole.
    """
    import gguf

    with gguf_writer(path, ARCHITECTURE) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(f"EAGLE-3 head for {info.target_name}")
        writer.add_string("heads.target.name", info.target_name)
        writer.add_string("heads.target.fingerprint", info.fingerprint)
        writer.add_context_length(1 << 20)  # positions are relative: nothing depends on it
        writer.add_embedding_length(shape.n_embd)
        writer.add_block_count(1)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(shape.n_head)
        writer.add_head_count_kv(shape.n_head_kv)
        writer.add_layer_norm_rms_eps(shape.norm_eps)
        writer.add_rope_dimension_count(shape.n_embd // shape.n_head)
        writer.add_rope_freq_base(shape.rope_base)
        writer.add_vocab_size(info.n_vocab)
        writer.add_file_type(
            {
                "f32": gguf.LlamaFileType.ALL_F32,
                "f16": gguf.LlamaFileType.MOSTLY_F16,
                "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
            }[kind]
        )
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_array(f"{ARCHITECTURE}.target_layers", list(layers))
        writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", info.n_embd)
        for norm in (
            "norm_before_residual",
            "norm_before_fc",
        ):  # variants that are not trained here
            writer.add_bool(f"{ARCHITECTURE}.{norm}", False)
        _copy_tokenizer(target, writer)
        for name, values in (
            tensors if output is None else {**tensors, "output.weight": output}
        ).items():
            if values.ndim < 2 or kind == "f32":
                writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
            elif kind == "q8_0" and values.shape[-1] % 32 == 0:
                q8_0 = gguf.GGMLQuantizationType.Q8_0
                quantized = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), q8_0)
                writer.add_tensor(name, quantized, raw_dtype=q8_0)
            else:
                writer.add_tensor(name, values.astype(np.float16))
        if tokens is not None:
            ids = tokens.astype(np.int64)
            writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)


def _copy_tokenizer(target: Path, writer) -> None:  # type: ignore[no-untyped-def]
    """The vocabulary and what belongs to it, but for the chat template."""
    import gguf

    for name, field in gguf.GGUFReader(target).fields.items():
        if name.startswith("tokenizer.") and not name.startswith("tokenizer.chat_template"):
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            of = field.types[-1] if is_list else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
