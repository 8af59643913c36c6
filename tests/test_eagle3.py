"""EAGLE-3: heads in llama.cpp's own form, over the inputs of three layers, with trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batching import internals
from batching.context import Context, ContextParams
from batching.errors import HeadsError, TruncatedGGUF, UnsupportedModel, VocabularyMismatch
from batching.gguf_file import GGUFFile, fingerprint
from batching.levels import LevelDecoder
from batching.model import Model
from batching.rows import Rows
from batching.tree import Floats
from speculation.engine import Engine
from speculation.heads.eagle3 import Eagle3Head
from speculation.heads.load import load_heads
from speculation.sampling import SamplingParams
from tests import tiny_gguf
from tests.reference import layer, rms_norm
from tests.tiny_eagle3 import N_TINY, eagle3_tensors, write_tiny_eagle3
from tests.tiny_gguf import write_recurrent_gguf, write_tiny_gguf

EXACT = ContextParams(kv_type="f32", flash_attn="off", n_threads=1)
PROMPT = "the cat saw a dog and the cat saw a dog and the"
DRAFTED = tuple(range(2, N_TINY, 3))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, of which heads read the inputs of the last three."""
    return write_tiny_gguf(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


# What goes into layers


def inputs_of_layers(path: Path, tokens: Sequence[int]) -> list[Floats]:
    """What goes into each layer, (time, 32), in plain NumPy."""
    file = GGUFFile(path)
    w = {name: file.tensor(name) for name in file.tensors}
    x = w["token_embd.weight"][list(tokens)]
    found = []
    for i in range(4):
        found.append(x)
        x = layer(w, rms_norm(x, w[f"blk.{i}.attn_norm.weight"]), x, i)
    return found


def test_the_inputs_of_layers_are_those_of_the_reference_for_every_row(target: Path) -> None:
    tokens = [5, 270, 271, 272, 280, 281]
    expected = inputs_of_layers(target, tokens)
    with Model(target) as model, Context(model, EXACT) as context:

        def decode(first: int, n: int) -> object:
            some, places = tokens[first : first + n], range(first, first + n)
            return context.decode(Rows(some, places, [range(1)] * n, [False] * (n - 1) + [True]))

        context.want_layers((1, 3))
        output = decode(0, 4)
        for row in range(4):  # without output, too
            wanted = np.concatenate([expected[1][row], expected[3][row]])
            np.testing.assert_allclose(output.layer_inputs(row), wanted, atol=1e-4)
        context.want_layers((2,))
        output = decode(4, 1)
        np.testing.assert_allclose(output.layer_inputs(0), expected[2][4], atol=1e-4)
        context.want_layers(())
        output = decode(5, 1)
        with pytest.raises(RuntimeError, match="inputs of layers were not asked for"):
            output.layer_inputs(0)


def test_layers_that_a_model_does_not_have_or_give_out_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model(target) as model, Context(model, EXACT) as context:
        with pytest.raises(UnsupportedModel, match="the input of layer 4 is wanted, .* 4 layers"):
            context.want_layers((1, 4))
        monkeypatch.setattr(internals, "TAPPED", ("qwen3",))
        with pytest.raises(UnsupportedModel, match="architecture llama, .* it does for qwen3"):
            context.want_layers((1,))
    other = write_recurrent_gguf(tmp_path / "other.gguf")
    with Model(other) as model, pytest.raises(UnsupportedModel, match="architecture mamba"):
        internals.check_taps(model, (0,))


def test_a_build_that_lacks_a_function_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llama_get_embeddings_nextn"
    monkeypatch.setitem(internals._FUNCTIONS, name, ([], None, "_Z4none", "?none"))
    with pytest.raises(UnsupportedModel, match="does not export llama_get_embeddings_nextn"):
        internals.internal.__wrapped__(name)


# The head


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Iterator[Eagle3Head]:
    path = write_tiny_eagle3(tmp_path / "head.gguf", tokens=DRAFTED)
    with Model(target) as model:
        head = load_heads([path], model)["eagle-3"]
        head.start(replace(EXACT, n_ctx=256, n_seq_max=8))
        yield head
        head.close()


def test_the_native_graph_is_the_reference_on_every_path_of_a_tree(
    head: Eagle3Head, target: Path
) -> None:
    w = eagle3_tensors(n_drafted=len(DRAFTED))
    embeddings = GGUFFile(target).tensor("token_embd.weight")
    text = [5, 270, 271, 272, 280]
    features = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)

    def after(tokens: Sequence[int], g: Floats) -> Floats:
        known = rms_norm(embeddings[list(tokens)], w["blk.0.attn_norm.weight"])
        inner = np.concatenate([known, rms_norm(g, w["blk.0.attn_norm_2.weight"])], axis=1)
        return layer(w, inner, g)[-1]

    states = head.encode(features)
    np.testing.assert_allclose(states, features @ w["fc.weight"].T, atol=1e-5)
    levels = LevelDecoder(head.context)
    levels.keep(0, 3)
    output = levels.extend(text, head.inputs(text, states))
    expected = after(text, states)
    root = output.hidden(levels.root_row).copy()
    np.testing.assert_allclose(root, expected, atol=1e-4)
    logits = output.logits(levels.root_row)
    drafted = w["output.weight"] @ rms_norm(expected, w["output_norm.weight"])
    np.testing.assert_allclose(logits[list(DRAFTED)], drafted, atol=1e-4)
    assert np.isneginf(np.delete(logits, DRAFTED)).all()

    output = levels.level([0, 0], [7, 8], np.stack([root, root]))
    first = np.stack([output.hidden(row).copy() for row in range(2)])
    # The encoder runs between two levels without harm: states come while a tree is known.
    head.encode(features[:2])
    output = levels.level([1, 0, 1], [9, 10, 11], first[[1, 0, 1]])
    for row, path in enumerate([(8, 9), (7, 10), (8, 11)]):
        above = first[0 if path[0] == 7 else 1]
        expected = after([*text, *path], np.stack([*states, root, above]))
        np.testing.assert_allclose(output.hidden(row), expected, atol=1e-4)


# Files


def test_heads_that_are_not_the_models_are_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "head.gguf"
    with Model(target) as model:
        write_tiny_eagle3(path, n_target=48)
        with pytest.raises(HeadsError, match=r"head\.gguf is for states 48 wide, .* are 32"):
            load_heads([path], model)
        write_tiny_eagle3(path, n_embd=64)
        with pytest.raises(HeadsError, match=r"has no token_embd\.weight and is 64 wide"):
            load_heads([path], model)
        write_tiny_eagle3(path, layers=(1, 2, 4))
        with pytest.raises(UnsupportedModel, match="the input of layer 4"):
            load_heads([path], model)
        write_tiny_eagle3(path, layers=(1, 2))
        with pytest.raises(HeadsError, match=r"names \[1, 2\] as the layers it reads, not three"):
            load_heads([path], model)
        write_tiny_eagle3(path, fingerprint="0123456789abcdef")
        with pytest.raises(HeadsError, match=r"trained on 'somebody' .*0123456789abcdef"):
            load_heads([path], model)
        write_tiny_eagle3(path, fingerprint=fingerprint(target))
        load_heads([path], model)["eagle-3"].close()
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(TruncatedGGUF, match=r"head\.gguf is incomplete"):
            load_heads([path], model)
        words = list(tiny_gguf.WORDS)
        words[3] = "zebra"
        monkeypatch.setattr(tiny_gguf, "WORDS", type(tiny_gguf.WORDS)(words))
        write_tiny_eagle3(path)
        with pytest.raises(VocabularyMismatch, match=r"head\.gguf cannot draft"):
            load_heads([path], model)


def test_a_target_without_taps_is_refused_before_anything_runs(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf")
    monkeypatch.setattr(internals, "TAPPED", ("qwen3",))
    with pytest.raises(UnsupportedModel, match="does not give out the inputs of layers"):
        Engine.load(target, EXACT, heads=path)


# Real decoding

SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.9, seed=7, repeat_penalty=1.1),
    "grammar": SamplingParams(grammar='root ::= ("the " | "cat " | "dog ")+'),
}
METHODS = (
    "eagle-3",
    "eagle-3:top_k=1,depth=4,nodes=4",
    "eagle-3:depth=3,top_k=2,nodes=5,window=0",
    "auto:sources=eagle-3",
)


@pytest.mark.parametrize("tokens", [None, DRAFTED])
def test_any_head_gives_the_text_of_plain_decoding(
    tmp_path: Path, target: Path, tokens: Sequence[int] | None
) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf", tokens=tokens)
    with Engine.load(target, EXACT, heads=path) as engine:
        for name, sampling in SAMPLINGS.items():
            plain = engine.generate(PROMPT, method="ar", sampling=sampling, max_tokens=40).run()
            for method in METHODS:
                ours = engine.generate(
                    PROMPT, method=method, sampling=sampling, max_tokens=40
                ).run()
                assert ours.token_ids == plain.token_ids, (name, method)
                if method == "eagle-3":
                    assert ours.stats.n_drafted == 24 * ours.stats.n_steps
        # The engine's context is made anew for wide trees; the head has one of its own.
        wide = engine.generate(PROMPT, method="eagle-3:nodes=100,top_k=12", max_tokens=20).run()
        plain = engine.generate(PROMPT, method="ar", max_tokens=20).run()
        assert wide.token_ids == plain.token_ids
