"""Random heads of every kind, and models with a layer that predicts; some draft well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType

from batching.gguf.reader import GGUFFile
from batching.llama.model import Model
from batching.tree import Floats
from speculation.heads import medusa, redrafter
from speculation.heads.eagle import EagleShape, write_eagle
from speculation.heads.file import HeadsInfo, HeadsWeights
from tests.support.tiny_gguf import (
    CHAT_TEMPLATE,
    N_TINY,
    Array,
    Tensor,
    Tensors,
    counts,
    ffn,
    layers,
    normal,
    norms,
    shapes,
    vocabulary,
    write_hybrid_gguf,
    write_model,
    write_tiny_gguf,
)

SHAPE = EagleShape(n_embd=32, n_head=4, n_head_kv=2, n_ff=64)


def matrix(*shape: int) -> Floats:
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def random_weights(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Floats]:
    """Matrices that preserve the norm of their input, and vectors near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.standard_normal(shape) / np.sqrt(shape[-1])
            if len(shape) == 2
            else 1 + 0.1 * rng.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def some(tokens: Sequence[int] | None) -> Any:
    return None if tokens is None else np.array(tokens, np.int32)


# Heads in this project's own files


def heads_weights(
    shapes: Mapping[str, Sequence[int]],
    n_embd: int,
    tokens: Sequence[int] | None = None,
    scale: float = 1.0,
) -> HeadsWeights:
    """Normal weights of deviation ``scale`` / √``n_embd``."""
    rng, n = np.random.default_rng(0), N_TINY if tokens is None else len(tokens)
    drawn = {
        name: (scale * rng.standard_normal(shape) / np.sqrt(n_embd)).astype(np.float32)
        for name, shape in {**shapes, "": (n, 32)}.items()
    }
    return HeadsWeights(drawn, drawn.pop(""), some(tokens))


def medusa_weights(
    *,
    n_blocks: int = 1,
    n_embd: int = 32,
    tokens: Sequence[int] | None = None,
    scale: float = 1.0,
) -> HeadsWeights:
    return heads_weights(medusa.shapes(3, n_blocks, n_embd), n_embd, tokens, scale)


def redrafter_weights(
    *, n_embd: int = 32, n_blocks: int = 1, tokens: Sequence[int] | None = None
) -> HeadsWeights:
    return heads_weights(redrafter.shapes(n_embd, n_blocks), n_embd, tokens, scale=2)


def info(kind: str, target: Path) -> HeadsInfo:
    with Model(target) as model:
        return HeadsInfo.of_target(kind, model)


def write_medusa_heads(path: Path, target: Path, **settings: Any) -> Path:
    medusa.write_medusa(path, info("medusa", target), medusa_weights(**settings))
    return path


def write_redrafter_head(path: Path, target: Path, **settings: Any) -> Path:
    redrafter.write_redrafter(path, info("redrafter", target), redrafter_weights(**settings))
    return path


def eagle_tensors(shape: EagleShape = SHAPE) -> dict[str, Floats]:
    return random_weights(shape.tensors)


def write_eagle_head(
    path: Path, target: Path, *, tokens: Sequence[int] | None = None, kind: str = "f32"
) -> Path:
    write_eagle(path, info("eagle", target), SHAPE, eagle_tensors(), tokens=some(tokens), kind=kind)
    return path


# Heads in the layout of llama.cpp's converter, for any target of that width. ``tensors`` and
# ``metadata``, by their names in the file, are added or replace existing ones; None leaves one out.

Own = Mapping[str, Array | None] | None
Keys = Mapping[str, object] | None


Shapes = dict[str, tuple[int, ...]]


def _layer(n: int, n_in: int, width: int, *norms: str) -> Shapes:
    """A layer with ``width`` for its heads, and half as many of them for keys."""
    return shapes(
        f"attn_norm {n}, {norms[0]} attn_q {width} {n_in}, attn_k {width // 2} {n_in}, "
        f"attn_v {width // 2} {n_in}, attn_output {n} {width}, {norms[1]} ffn_norm {n}, "
        f"ffn_gate 64 {n}, ffn_up 64 {n}, ffn_down {n} 64"
    )


def eagle3_tensors(n_embd: int = 32, n_target: int = 32, n_drafted: int = 0) -> dict[str, Floats]:
    layer = _layer(n_embd, 2 * n_embd, n_embd, f"attn_norm_2 {n_embd},", "")
    outer = shapes(f"fc {n_embd} {3 * n_target}") | layers(layer) | shapes(f"output_norm {n_embd}")
    return random_weights(outer | ({"output.weight": (n_drafted, n_embd)} if n_drafted else {}))


def write_tiny_eagle3(
    path: Path,
    target: Path | None = None,
    *,
    layers: Sequence[int] = (1, 2, 3),
    n_embd: int = 32,
    n_target: int = 32,
    tokens: Sequence[int] = (),
    tensors: Own = None,
    metadata: Keys = None,
) -> Path:
    """Write the head; ``tokens`` are those that it drafts, with its own output matrix."""
    keys = {
        ".rope.dimension_count": n_embd // 4,
        "eagle3.target_layers": list(layers),
        "eagle3.target_hidden_size": n_target,
        **(metadata or {}),
    }
    d2t = {"d2t": np.array(tokens, np.int64) if tokens else None, **(tensors or {})}
    table = eagle3_tensors(n_embd, n_target, len(tokens))
    return write_model(path, "eagle3", (n_embd, 1, 64, 4, 2), keys, table, own=d2t, bos=None)


# Variants of published heads.
DRAFTED = tuple(range(2, N_TINY, 3))
EAGLE_3: dict[str, dict[str, Any]] = {
    "some tokens": {"tokens": DRAFTED},
    "all tokens, by the target's matrix": {},
    "all tokens, by its own matrix": {"tensors": {"output.weight": matrix(N_TINY, 32)}},
    "speculators": {
        "tokens": DRAFTED,
        "tensors": {"token_embd.weight": matrix(N_TINY, 32)},
        "metadata": {"eagle3.norm_before_residual": True, "eagle3.norm_before_fc": False},
    },
    "norm before fc": {
        "tokens": DRAFTED,
        "tensors": {"enc.output_norm.weight": 1 + matrix(96)},
        "metadata": {"eagle3.norm_before_fc": True},
    },
    "narrower than the target": {
        "n_embd": 16,
        "tokens": DRAFTED,
        "tensors": {"token_embd.weight": matrix(N_TINY + 5, 16)},
    },
    "llama3 positions": {
        "tokens": DRAFTED,
        "tensors": {"rope_freqs.weight": np.array([1, 1.5, 4, 8], np.float32)},
    },
    "linear positions": {
        "tokens": DRAFTED,
        "metadata": {"eagle3.rope.scaling.type": "linear", "eagle3.rope.scaling.factor": 2.0},
    },
}


# Keys with the width of an attention head.
OF_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
N_HEAD, N_HEAD_KV, HEAD = 4, 2, 8  # of dflash
MASK = 0  # the unknown token, which occurs in no text
ROPE_BASE = 10.0  # of the counting head: large enough to tell neighbouring positions apart


def dflash_tensors(n_embd: int = 32, n_layers: int = 3, n_blocks: int = 2) -> dict[str, Floats]:
    """The tensors of a head without its own embeddings and output matrix."""
    of_heads = f"attn_q_norm {HEAD}, attn_k_norm {HEAD},"
    block = _layer(n_embd, n_embd, N_HEAD * HEAD, "", of_heads)
    fc = f"fc {n_embd} {n_layers * n_embd}"
    outer = shapes(f"{fc}, enc.output_norm.weight {n_embd}, output_norm {n_embd}")
    return random_weights(outer | layers(*[block] * n_blocks))


def write_tiny_dflash(
    path: Path,
    target: Path | None = None,
    *,
    layers: Sequence[int] = (1, 2, 3),
    n_embd: int = 32,
    n_blocks: int = 2,
    block_size: int = 8,
    tensors: Own = None,
    metadata: Keys = None,
) -> Path:
    keys: dict[str, object] = {
        **{f"dflash.{name}": HEAD for name in OF_HEADS},
        "dflash.target_layers": list(layers),
        "dflash.block_size": block_size,
        "tokenizer.ggml.mask_token_id": MASK,
        **(metadata or {}),
    }
    table, sizes = dflash_tensors(n_embd, len(layers), n_blocks), (n_embd, n_blocks, 64, 4, 2)
    return write_model(path, "dflash", sizes, keys, table, own=tensors, bos=None)


# A target that counts, each token followed by the next on a circle, and a head that predicts it.

_TURNS = (1, 7, 29, 101)  # over the whole circle, in each of the planes that a token lies in
_CONSTANT = 8  # a component that every token has, besides the eight of these planes
_OWN = slice(16, 24)  # where the head keeps the features of a token of the text
N_COUNTED = 4  # tokens that a block predicts


def counted() -> list[int]:
    """The tokens in counting order, without the special ones."""
    types = vocabulary()[2]
    return [token for token in range(3, N_TINY) if types[token] != TokenType.CONTROL]


def _on_circle() -> Floats:
    """The position of each token on the circle, (N_TINY, 8)."""
    places = np.zeros((N_TINY, 8), np.float32)
    order = counted()
    angles = 2 * np.pi * np.outer(np.arange(len(order)), _TURNS) / len(order)
    places[order, 0::2], places[order, 1::2] = np.cos(angles), np.sin(angles)
    return places


def _turn(n: int) -> Floats:
    """The rotation that maps a token to the one ``n`` positions later, (8, 8)."""
    turn = np.zeros((8, 8), np.float32)
    for plane, turns in enumerate(_TURNS):
        angle = 2 * np.pi * n * turns / len(counted())
        i = 2 * plane
        turn[i, i] = turn[i + 1, i + 1] = np.cos(angle)
        turn[i + 1, i], turn[i, i + 1] = np.sin(angle), -np.sin(angle)
    return turn


def write_counting_gguf(path: Path, *, influence: float = 0.0, hybrid: bool = False) -> Path:
    """Write a model of four layers that counts, with more errors the larger the ``influence`` of
    its random layers; ``hybrid`` writes one that can rewind only a few tokens."""
    embeddings, output = np.zeros((2, N_TINY, 32), np.float32)
    embeddings[:, :8], embeddings[:, _CONSTANT] = _on_circle(), 1
    output[:, :8] = 2 * _on_circle() @ _turn(-1).T
    write = write_hybrid_gguf if hybrid else write_tiny_gguf
    own = {"token_embd.weight": embeddings, "output.weight": output}
    return write(path, n_layer=4, influence=influence, tensors=own)


def counting_tensors() -> dict[str, Floats]:
    """The tensors of a head of one layer whose masks look back at the second-last token: the first
    mask from two positions later, the second from three, each with its own attention head.
    """
    weights = {name: 0 * values for name, values in dflash_tensors(n_blocks=1).items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] += 6 if "_q_" in name or "_k_" in name else 1
    for i in range(8):  # each component from the input of a different layer
        weights["fc.weight"][_OWN.start + i, 32 * (i // 3) + i] = 1
    weights["fc.weight"][_CONSTANT, _CONSTANT] = 1
    weights["blk.0.attn_k.weight"][:, _CONSTANT] = 1
    for kv_head in range(N_HEAD_KV):
        weights["blk.0.attn_v.weight"][HEAD * kv_head : HEAD * (kv_head + 1), _OWN] = np.eye(8)
    speeds = ROPE_BASE ** (-2 * np.arange(HEAD // 2) / HEAD)
    for head in range(N_HEAD):
        rows = slice(HEAD * head, HEAD * (head + 1))
        angles = -(head + 2) * speeds  # keys are (1, 1) in each plane, and so is what they meet
        query = [np.cos(angles) - np.sin(angles), np.sin(angles) + np.cos(angles)]
        weights["blk.0.attn_q.weight"][rows, _CONSTANT] = np.concatenate(query)
        # Heads that look further back than the second-last token add little.
        weights["blk.0.attn_output.weight"][:8, rows] = 9 * 0.2**head * _turn(head + 1)
    return weights


def write_counting_head(path: Path) -> Path:
    """Write the head for layers 0, 2 and 3 of the counting model."""
    return write_tiny_dflash(
        path,
        layers=(0, 2, 3),
        n_blocks=1,
        block_size=1 + N_COUNTED,
        metadata={"dflash.rope.freq_base": ROPE_BASE},
        tensors=counting_tensors(),
    )


# Models with a layer that predicts (MTP). It adds only ``of_state`` of a random function of the
# state to its token, so it drafts what mostly follows the token. The less it adds, and the smaller
# the ``influence`` of the other layers, the more drafts are accepted.

N_MAIN, WIDTH, MTP_HEAD = 3, 32, 16  # layers; two heads of 16 values
OUTER: dict[str, Tensor] = {
    "token_embd.weight": normal(np.sqrt(32), N_TINY, 32),
    "output_norm.weight": (32,),
    "output.weight": normal(12.0, N_TINY, 32),
}


def _attention(*, gate: bool = False, adds: bool = True, post: float = 1.0) -> dict[str, Tensor]:
    """Attention in a model whose heads have a width of their own; ``post`` scales its result."""
    return {
        "attn_norm.weight": (32,),
        "post_attention_norm.weight": np.full(32, post),
        "attn_q.weight": (2 * WIDTH if gate else WIDTH, 32),
        "attn_k.weight": (WIDTH, 32),
        "attn_v.weight": (WIDTH, 32),
        "attn_output.weight": (32, WIDTH) if adds else normal(0.0, 32, WIDTH),
        **norms(MTP_HEAD, "attn_q_norm", "attn_k_norm"),
    }


def _mtp(of_state: float) -> Tensors:
    return {
        "nextn.eh_proj.weight": lambda rng: np.hstack([np.eye(32), normal(of_state, 32, 32)(rng)]),
        **norms(32, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    }


def _write_mtp(
    path: Path, architecture: str, keys: Mapping[str, object], table: Tensors, **more: Any
) -> Path:
    n_mtp = more.pop("n_mtp", 1)
    keys = {**{f".{name}": MTP_HEAD for name in OF_HEADS}, ".nextn_predict_layers": n_mtp, **keys}
    more["chat_template"] = CHAT_TEMPLATE
    return write_model(path, architecture, (32, N_MAIN + n_mtp, 64, 2, 2), keys, table, **more)


def write_mtp_gguf(
    path: Path,
    *,
    influence: float = 0.02,
    of_state: float = 0.0,
    alone: bool = False,
    n_mtp: int = 1,
    tensors_per_file: int = 0,
) -> Path:
    """Write a Qwen 3.5 model, recurrent but for its third layer, and a fourth layer that predicts.
    ``alone`` leaves out all other layers; ``n_mtp`` layers predict."""
    keys = {
        ".rope.dimension_sections": [2, 2, 2, 2],
        **counts("ssm.conv_kernel 4, ssm.inner_size 32, ssm.state_size 8, ssm.time_step_rank 4"),
        **counts("ssm.group_count 2, full_attention_interval 3"),
    }
    recurrent: Tensors = {
        **ffn(32),
        **norms(32, "attn_norm", "post_attention_norm"),
        **shapes("attn_qkv 64 32, attn_gate 32 32, ssm_conv1d 64 4"),
        "ssm_dt.bias": normal(1.6, 4),
        "ssm_a": -np.arange(1, 5),
        **shapes("ssm_beta 4 32, ssm_alpha 4 32, ssm_norm 8, ssm_out 32 32"),
    }
    main = () if alone else (recurrent, recurrent, {**ffn(32), **_attention(gate=True)})
    predicting = {**ffn(32, down=0.0), **_attention(gate=True, adds=False), **_mtp(of_state)}
    table = {**OUTER, **layers(*main), **layers(*[predicting] * n_mtp, first=N_MAIN)}
    more = {"n_mtp": n_mtp, "influence": influence, "tensors_per_file": tensors_per_file}
    return _write_mtp(path, "qwen35", keys, table, **more)


def write_mtp_gguf_with_kv(path: Path, *, without: bool = False) -> Path:
    """The same as a GLM 4.5 model, which has only a KV cache. ``without`` leaves out the layer that
    predicts but keeps its metadata."""
    keys = (
        "leading_dense_block_count 3, expert_count 2, expert_used_count 1, "
        "expert_shared_count 1, expert_feed_forward_length 64"
    )
    predicting: Tensors = {
        **_attention(adds=False),
        "ffn_gate_inp.weight": (2, 32),
        "exp_probs_b.bias": normal(1.6, 2),
        **ffn(32, "_exps", (2,), down=0.0),
        **ffn(32, "_shexp", down=0.0),
        **_mtp(0.0),
    }
    main = [{**_attention(), **ffn(32)}] * N_MAIN
    table = {**OUTER, **layers(*main, *(() if without else (predicting,)))}
    return _write_mtp(path, "glm4moe", counts(keys), table, influence=0.02)


def write_mtp_header(path: Path, architecture: str) -> Path:
    """Write only the header of a model with an MTP layer."""
    table = {"blk.0.attn_norm.weight": (32,), **layers(_mtp(0.0), first=N_MAIN)}
    return _write_mtp(path, architecture, {}, table)


def _gemma_keys(windows: list[bool], window: int = 8) -> dict[str, object]:
    return {
        **{f".{name}{kind}": MTP_HEAD for name in OF_HEADS for kind in ("", "_swa")},
        ".attention.sliding_window": window,
        ".attention.sliding_window_pattern": windows,
        ".attention.shared_kv_layers": 0,
    }


def write_gemma_gguf(path: Path, *, influence: float = 0.05, window: int = 8) -> Path:
    """Write a Gemma 4 model with a sliding window in all layers but the last. Its drafts come from
    a separate model, ``write_assistant_gguf``."""
    keys = {**_gemma_keys([True, True, False], window), ".embedding_length_per_layer_input": 0}
    layer = {
        **_attention(post=influence),
        "ffn_norm.weight": (32,),
        "post_ffw_norm.weight": np.full(32, 0.05),
        **ffn(32),
    }
    table = {**OUTER, **layers(*[layer] * N_MAIN), **norms(MTP_HEAD // 2, "rope_freqs")}
    sizes = (32, N_MAIN, 64, 2, 2)
    return write_model(path, "gemma4", sizes, keys, table, chat_template=CHAT_TEMPLATE)


def write_assistant_gguf(path: Path, target: Path, *, of_state: float = 0.0) -> Path:
    """Write the assistant of ``target``, twice as wide: it embeds the token with the target's own
    matrices, so it predicts what mostly follows."""
    output, width = GGUFFile(target).output_matrix(), 64
    state = of_state * np.random.default_rng(1).standard_normal((width, 32))
    keys = _gemma_keys([True, False]) | counts("embedding_length_out 32, nextn_predict_layers 2")
    small = np.full(width, 0.02)
    layer: Tensors = {
        **shapes("attn_norm 64, attn_q 32 64, attn_output 64 32, attn_q_norm 16"),
        "post_attention_norm.weight": small,
        **shapes("layer_output_scale 1, ffn_norm 64"),
        "post_ffw_norm.weight": small,
        **shapes("ffn_gate 32 64, ffn_up 32 64, ffn_down 64 32"),
    }
    table: Tensors = {
        "token_embd.weight": np.hstack([output, np.zeros((len(output), width - 32))]),
        "nextn.pre_projection.weight": np.hstack([np.eye(width, 32), state]),
        **shapes("nextn.post_projection.weight 32 64, output_norm 64"),
        **layers(layer, layer),
        "rope_freqs.weight": (MTP_HEAD // 2,),
    }
    sizes = (width, 2, 32, 2, 2)
    return write_model(path, "gemma4-assistant", sizes, keys, table, chat_template=CHAT_TEMPLATE)


# A model with its heads, and methods that use them


Made = tuple[Path, list[Path], list[str]]
# By kind: path, target and settings.
HEADS: dict[str, Callable[..., Path]] = {
    "medusa": write_medusa_heads,
    "redrafter": write_redrafter_head,
    "eagle": write_eagle_head,
    "eagle-3": write_tiny_eagle3,
    "dflash": write_tiny_dflash,
}


def write_heads(folder: Path, target: Path, heads: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Heads of these kinds, with their settings."""
    return [HEADS[kind](folder / f"{kind}.gguf", target, **of) for kind, of in heads.items()]


def states(folder: Path) -> Made:
    target = write_tiny_gguf(folder / "target.gguf", n_layer=4)
    heads = write_heads(folder, target, {kind: {} for kind in HEADS if kind != "dflash"})
    methods = ["eagle-1", "eagle-2", "eagle-3", "medusa", "redrafter", "draft:p_min=0.02", "auto"]
    return target, heads, methods


def blocks(folder: Path) -> Made:
    target = write_counting_gguf(folder / "target.gguf", influence=0.08)
    return target, [write_counting_head(folder / "head.gguf")], ["dflash", "dflash:top_k=4", "auto"]


def mtp(folder: Path) -> Made:
    return write_mtp_gguf_with_kv(folder / "mtp.gguf"), [], ["mtp", "mtp:top_k=3,p_min=0", "auto"]


def hybrid(folder: Path) -> Made:
    return write_mtp_gguf(folder / "mtp.gguf"), [], ["mtp:p_min=0", "mtp:depth=2,p_min=0", "auto"]


def attached(folder: Path) -> Made:
    target = write_gemma_gguf(folder / "gemma.gguf")
    return target, [write_assistant_gguf(folder / "a.gguf", target)], ["mtp:p_min=0", "auto"]
