"""EAGLE-3: heads in llama.cpp's own form, over the inputs of three layers, with trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES

from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.llama import private_api
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import text_rows
from batching.target import Output
from batching.together import run
from batching.tree import Floats
from speculation.engine import Engine
from speculation.heads.eagle import EagleShape
from speculation.heads.eagle3 import write_eagle3
from speculation.heads.file import HeadsInfo
from tests.support.exact import EXACT, PROMPT, same_texts
from tests.support.head_checks import TEXT, check_a_tree, check_texts, matrix, started
from tests.support.mtp_gguf import write_mtp_gguf
from tests.support.reference import layer, rms_norm
from tests.support.tiny_eagle3 import N_FF, N_HEAD, N_HEAD_KV, eagle3_tensors, write_tiny_eagle3
from tests.support.tiny_gguf import N_TINY, write_hybrid_gguf, write_recurrent_gguf

DRAFTED = tuple(range(2, N_TINY, 3))


# Auxiliary hidden states


def inputs_of_layers(path: Path, tokens: Sequence[int]) -> list[Floats]:
    """The input of each layer, (time, 32), in plain NumPy."""
    file = GGUFFile(path)
    w = {name: file.tensor(name) for name in file.tensors}
    x = w["token_embd.weight"][list(tokens)]
    found = []
    for i in range(4):
        found.append(x)
        x = layer(w, rms_norm(x, w[f"blk.{i}.attn_norm.weight"]), x, i)
    return found


def test_auxiliary_hidden_states_match_the_reference_for_every_row(target: Path) -> None:
    tokens = [5, 270, 271, 272, 280, 281]
    expected = inputs_of_layers(target, tokens)
    with Model(target) as model, Context(model, EXACT) as context:

        def decode(first: int, n: int) -> Output:
            outputs = [False] * (n - 1) + [True]
            return context.decode(text_rows(tokens[first : first + n], first, outputs))

        context.want_layers((1, 3))
        output = decode(0, 4)
        for row in range(4):  # also rows without output
            wanted = np.concatenate([expected[1][row], expected[3][row]])
            np.testing.assert_allclose(output.aux_hidden_states(row, (1, 3)), wanted, atol=1e-4)
        context.want_layers((2,))
        output = decode(4, 1)
        np.testing.assert_allclose(output.aux_hidden_states(0, (2,)), expected[2][4], atol=1e-4)
        context.want_layers(())
        output = decode(5, 1)
        with pytest.raises(RuntimeError, match="inputs of layer 2 were not requested"):
            output.aux_hidden_states(0, (2,))


@pytest.fixture(params=["lfm2", "qwen35"])
def hybrid(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write = write_hybrid_gguf if request.param == "lfm2" else write_mtp_gguf
    return write(tmp_path / "hybrid.gguf")


def test_auxiliary_hidden_states_of_a_hybrid_model_do_not_depend_on_the_batches(
    hybrid: Path,
) -> None:
    tokens = [5, 270, 271, 272, 280, 281]

    def inputs(layers: tuple[int, ...], *chunks: int) -> Floats:
        """(time, len(layers) * 32)"""
        found, first = [], 0
        with Context(model, EXACT) as context:
            context.want_layers(layers)
            for n in chunks:
                outputs = [False] * (n - 1) + [True]
                output = context.decode(text_rows(tokens[first : first + n], first, outputs))
                found += [output.aux_hidden_states(row, layers).copy() for row in range(n)]
                first += n
        return np.stack(found)

    with Model(hybrid) as model:
        together = inputs((0, 1, 2), 6)
        embeddings = GGUFFile(hybrid).tensor("token_embd.weight")[tokens]
        np.testing.assert_array_equal(together[:, :32], embeddings)
        np.testing.assert_array_equal(inputs((2,), 6), together[:, 64:])
        for chunks in ((1,) * 6, (3, 1, 2)):
            np.testing.assert_allclose(inputs((0, 1, 2), *chunks), together, atol=1e-4)
    assert abs(together[:, 32:64] - together[:, 64:]).max() > 0.01


def test_layers_that_a_model_lacks_or_does_not_expose_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(target) as model, Context(model, EXACT) as context:
        with pytest.raises(UnsupportedModel, match="need the input of layer 4, .* layers 0 to 3"):
            context.want_layers((1, 4))
        monkeypatch.setattr(private_api, "EXPOSES_LAYER_INPUTS", ("qwen3",))
        with pytest.raises(UnsupportedModel, match="architecture llama, .* exposes those of qwen3"):
            context.want_layers((1,))
    other = write_recurrent_gguf(tmp_path / "other.gguf")
    with Model(other) as model, pytest.raises(UnsupportedModel, match="architecture mamba"):
        model.check_layer_inputs((0,))


# The head

# Variants of published heads, as llama.cpp's converter writes them.
VARIANTS: dict[str, dict[str, Any]] = {
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


class Reference:
    """A head in plain NumPy, from its own and its target's file."""

    def __init__(self, path: Path, target: Path) -> None:
        head, of_target = GGUFFile(path), GGUFFile(target)
        self.w = w = {name: head.tensor(name) for name in head.tensors if name != "d2t"}
        w.setdefault("token_embd.weight", of_target.tensor("token_embd.weight"))
        w.setdefault("output.weight", of_target.output_matrix())
        factor = head.metadata.get("eagle3.rope.scaling.factor")
        if factor is not None:
            w["rope_freqs.weight"] = np.full(4, factor, np.float32)
        self.norm_before_residual = head.metadata.get("eagle3.norm_before_residual", False)

    def encode(self, features: Floats) -> Floats:
        norm = self.w.get("enc.output_norm.weight")
        return (features if norm is None else rms_norm(features, norm)) @ self.w["fc.weight"].T

    def after(self, tokens: Sequence[int], g: Floats) -> Floats:
        known = self.w["token_embd.weight"][list(tokens)]
        known = rms_norm(known, self.w["blk.0.attn_norm.weight"])
        normed = rms_norm(g, self.w["blk.0.attn_norm_2.weight"])
        inner = np.concatenate([known, normed], axis=1)
        return layer(self.w, inner, normed if self.norm_before_residual else g)[-1]

    def logits(self, state: Floats) -> Floats:
        return self.w["output.weight"] @ rms_norm(state, self.w["output_norm.weight"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_native_graph_matches_the_reference_on_every_path_of_a_tree(
    tmp_path: Path, target: Path, variant: str
) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf", **VARIANTS[variant])
    expected = Reference(path, target)
    features = np.random.default_rng(1).standard_normal((len(TEXT), 96)).astype(np.float32)
    with started(path, target, "eagle-3") as head:
        np.testing.assert_allclose(run(head.encode(features)), expected.encode(features), atol=1e-5)
        root, logits = check_a_tree(head, features, expected.after)
    tokens = list(VARIANTS[variant].get("tokens", range(N_TINY)))
    np.testing.assert_allclose(logits[tokens], expected.logits(root), atol=1e-4)
    assert np.isneginf(np.delete(logits, tokens)).all()


# Files


# Written by llama.cpp's converter for a head of the Llama family.
KEYS = {
    *("general.architecture", "general.type", "general.name", "general.file_type"),
    *("general.quantization_version", "eagle3.context_length", "eagle3.embedding_length"),
    *("eagle3.block_count", "eagle3.feed_forward_length", "eagle3.vocab_size"),
    *("eagle3.attention.head_count", "eagle3.attention.head_count_kv"),
    *("eagle3.attention.layer_norm_rms_epsilon", "eagle3.rope.dimension_count"),
    *("eagle3.rope.freq_base", "eagle3.target_layers", "eagle3.target_hidden_size"),
    *("eagle3.norm_before_residual", "eagle3.norm_before_fc"),
}


def test_training_writes_the_same_file_layout_as_llama_cpps_converter(
    tmp_path: Path, target: Path
) -> None:
    path = tmp_path / "head.gguf"
    with Model(target) as model:
        info = HeadsInfo.of_target("eagle", model)
    shape = EagleShape(32, N_HEAD, N_HEAD_KV, N_FF)
    tensors, tokens = eagle3_tensors(), np.array(DRAFTED, np.int32)
    tensors["output.weight"] = matrix(len(DRAFTED), 32)
    write_eagle3(path, info, shape, tensors, (1, 2, 3), GGUFFile(target), tokens, kind="f32")
    file, converted = GGUFFile(path), GGUFFile(write_tiny_eagle3(tmp_path / "c", tokens=DRAFTED))
    ours = {key for key in file.metadata if not key.startswith(("tokenizer.", "heads."))}
    assert ours == KEYS
    for key in ("eagle3.target_layers", "eagle3.target_hidden_size", "eagle3.vocab_size"):
        assert file.metadata.get(key) == converted.metadata[key]
    assert {name: tensor[:2] for name, tensor in file.tensors.items()} == {
        name: tensor[:2] for name, tensor in converted.tensors.items()
    }
    assert file.raw("d2t").view(np.int64)[0].tolist() == list(DRAFTED)
    with started(path, target, "eagle-3") as head:
        features = np.random.default_rng(1).standard_normal((len(TEXT), 96)).astype(np.float32)
        check_a_tree(head, features, Reference(path, target).after)


def test_hunyuan_models_are_listed_under_the_names_in_their_files() -> None:
    assert {"hunyuan-dense", "hunyuan_vl"} <= set(private_api.EXPOSES_LAYER_INPUTS) & set(
        MODEL_ARCH_NAMES.values()
    )


# Real decoding

METHODS = (
    "eagle-3",
    "eagle-3:top_k=1,depth=4,nodes=4",
    "eagle-3:depth=3,top_k=2,nodes=5,window=0",
    "auto:sources=eagle-3",
)


YARN = {
    "eagle3.rope.scaling.type": "yarn",
    "eagle3.rope.scaling.factor": 4.0,
    "eagle3.rope.scaling.original_context_length": 16,
}


@pytest.mark.parametrize(
    "head",
    [{}, VARIANTS["speculators"], VARIANTS["narrower than the target"], {"metadata": YARN}],
    ids=["the target's matrices", "speculators", "narrower", "yarn"],
)
def test_any_head_gives_the_text_of_plain_decoding(
    tmp_path: Path, target: Path, head: dict[str, Any]
) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf", **head)
    with Engine.load(target, EXACT, heads=path) as engine:
        stats = check_texts(engine, METHODS)["eagle-3"]
        # All steps but the last two draft 24; there one token is left below the root, and none.
        assert stats.rows_histogram[25] >= stats.n_steps - 2
        assert set(stats.rows_histogram) <= {25, 9, 1}
        # The engine's context is recreated for wide trees; the head has its own.
        same_texts(engine, PROMPT, "eagle-3:nodes=100,top_k=12", max_tokens=20)


def test_a_hybrid_target_gets_chains_only(tmp_path: Path, hybrid: Path) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf", layers=(0, 1, 2))
    with (
        Engine.load(hybrid, EXACT, heads=path, mtp=False) as engine,
        Engine.load(hybrid, EXACT, mtp=False) as plain,
    ):
        found = check_texts(engine, METHODS)
        assert max(found["eagle-3"].rows_histogram) <= 1 + engine.context.n_rewind
        assert found["eagle-3"].n_drafted > 30
        text = engine.model.tokenize(PROMPT)
        for n, method in enumerate(METHODS):  # each continues the text of the one before
            reply = engine.generate(text, method=method, max_tokens=20).run()
            alone = plain.generate(text, method="ar", max_tokens=20).run()
            assert reply.token_ids == alone.token_ids
            text = [*text, *reply.token_ids, 270 + n]
