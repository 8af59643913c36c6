"""EAGLE: the heads' layers, the trees, their input states, and EAGLE-3's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES

from batching.cache import SequenceCache
from batching.draft_context import DraftContext
from batching.errors import UnsupportedModel
from batching.gguf.reader import GGUFFile
from batching.llama import private_api
from batching.llama.context import Context
from batching.llama.model import Model
from batching.rows import text_rows, tree_rows
from batching.target import Cancelled
from batching.together import run
from batching.tree import NO_LIMIT, Floats, TokenTree
from speculation.drafter import DraftBudget, Step
from speculation.drafting.acceptance import Acceptance
from speculation.drafting.head_context import HeadContext
from speculation.drafting.head_drafter import GrownParams, HeadDrafter
from speculation.drafting.tree_growth import Growth, top_tokens
from speculation.heads.eagle3 import write_eagle3
from speculation.heads.file import HeadsInfo
from speculation.methods.eagle import Eagle1Params, FixedTreeDrafter, parse_choices
from tests.support.exact import EXACT
from tests.support.fake_methods import FakeEagleHead
from tests.support.fake_target import FakeTarget, fake_hidden, fake_logits, listed, prefill
from tests.support.head_checks import TEXT, check_a_tree, started
from tests.support.reference import layer, rms_norm
from tests.support.tiny_gguf import N_TINY, write_hybrid_gguf, write_recurrent_gguf
from tests.support.tiny_heads import (
    DRAFTED,
    EAGLE_3,
    SHAPE,
    eagle3_tensors,
    eagle_tensors,
    matrix,
    write_eagle_head,
    write_mtp_gguf,
    write_tiny_eagle3,
)

# The layer


def reference(w: dict[str, Floats], x: Floats) -> Floats:
    """The head's states for one sequence of inputs x, (time, 32), in plain NumPy."""
    y = layer(w, rms_norm(x, w["blk.0.attn_norm.weight"]), x)
    return rms_norm(y, w["output_norm.weight"])


def test_the_layer_in_llama_cpp_matches_the_reference_on_every_path_of_a_tree(
    tmp_path: Path, tiny_model: Path
) -> None:
    w, target = eagle_tensors(), GGUFFile(tiny_model)
    embeddings, output_matrix = target.tensor("token_embd.weight"), target.output_matrix()
    states = np.random.default_rng(1).standard_normal((len(TEXT), 32)).astype(np.float32)

    def after(tokens: Sequence[int], states: Floats) -> Floats:
        known = embeddings[list(tokens)]
        x = np.concatenate([known, states], axis=1) @ w["fc.weight"].T + w["fc.bias"]
        return reference(w, x)[-1]

    path = write_eagle_head(tmp_path / "head.gguf", tiny_model)
    with started(path, tiny_model, "eagle") as head:
        file = head.context.model.path
        assert file.exists()
        root, logits = check_a_tree(head, states, after, atol=1e-5)
    np.testing.assert_allclose(logits, output_matrix @ root, atol=1e-4)
    assert not file.parent.exists()  # a temporary one


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


@pytest.mark.parametrize("variant", EAGLE_3)
def test_eagle_3_in_llama_cpp_matches_the_reference_on_every_path_of_a_tree(
    tmp_path: Path, target: Path, variant: str
) -> None:
    path = write_tiny_eagle3(tmp_path / "head.gguf", **EAGLE_3[variant])
    expected = Reference(path, target)
    features = np.random.default_rng(1).standard_normal((len(TEXT), 96)).astype(np.float32)
    with started(path, target, "eagle-3") as head:
        np.testing.assert_allclose(run(head.encode(features)), expected.encode(features), atol=1e-5)
        root, logits = check_a_tree(head, features, expected.after)
    tokens = list(EAGLE_3[variant].get("tokens", range(N_TINY)))
    np.testing.assert_allclose(logits[tokens], expected.logits(root), atol=1e-4)
    assert np.isneginf(np.delete(logits, tokens)).all()


# Trees


def dynamic(prefix: tuple[int, ...], depth: int, width: int) -> Growth:
    """EAGLE-2's candidates when the draft is the fake target itself."""
    levels = DraftContext(FakeTarget())
    levels.begin(prefix, width)
    growth = Growth(prefix[-1], Acceptance())
    output = run(levels.root(prefix))
    run(
        growth.levels(
            lambda node, logits: growth.add_likely(node, top_tokens(logits, width)),
            levels.level,
            output,
            levels.root_row,
            depth=depth,
            width=width,
        )
    )
    return growth


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_the_dynamic_tree_is_as_good_as_exhaustive_search() -> None:
    for seed in range(8):
        prefix = (seed, seed + 1, 3)
        # All candidates: three drafts below each node, two levels deep.
        values: dict[tuple[int, ...], float] = {}
        for token, p in top_tokens(fake_logits(prefix), 3):
            values[(token,)] = p
            for below, q in top_tokens(fake_logits((*prefix, token)), 3):
                values[(token, below)] = p * q
        for most in (1, 4, 6):
            best = max(
                sum(values[path] for path in some)
                for some in combinations(values, most)
                if all(path[:-1] in ((), *some) for path in some)
            )
            growth = dynamic(prefix, 2, 3)
            chosen = growth.likeliest(most)
            assert len(chosen) == most
            assert all(growth.tree.parents[node] in (0, *chosen) for node in chosen)
            assert sum(growth.path_probs[node] for node in chosen) == pytest.approx(best)


def test_only_the_likeliest_paths_of_a_level_are_expanded() -> None:
    growth = dynamic((1, 2, 3), 3, 2)
    tree, reached = growth.tree, growth.path_probs
    assert len(tree) == 1 + 2 + 2 * 2 + 2 * 2
    second = sorted(sorted(range(3, 7), key=lambda node: -reached[node])[:2])
    assert sorted({*tree.parents[7:]}) == second
    for node in (1, 2):
        below = softmax(fake_logits((1, 2, 3, tree.tokens[node])))
        expected = np.argsort(-below)[:2].tolist()
        assert [tree.tokens[n] for n in range(3, 7) if tree.parents[n] == node] == expected


def test_a_static_tree_has_the_given_ranks_and_becomes_these_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = DraftContext(FakeTarget())
    text = (1, 2, 3)
    levels.begin(text, 2)
    output = run(levels.root(text))
    context = HeadContext(FakeEagleHead(fake_logits))
    monkeypatch.setattr(context, "level", levels.level)
    drafter = FixedTreeDrafter(Eagle1Params(choices="0.0.1/1.0"), context)
    growth = Growth(3, Acceptance())
    chosen = run(drafter._grow_below(output, levels.root_row, growth, DraftBudget()))
    assert chosen == range(1, 6)
    ranked = np.argsort(-fake_logits(text))
    a, b = int(ranked[0]), int(ranked[1])
    aa, ba = (int(np.argmax(fake_logits((*text, t)))) for t in (a, b))
    aab = int(np.argsort(-fake_logits((*text, a, aa)))[1])
    tree = growth.tree
    assert tree.tokens[1:] == [a, b, aa, ba, aab]
    assert tree.parents[1:] == [0, 0, 1, 2, 3]
    rows = listed(tree_rows(tree, 2, 3))
    assert [row.position for row in rows] == [2, 3, 3, 4, 4, 5]
    assert [row.seq_ids for row in rows] == [(0, 1, 2), (1,), (2,), (1,), (2,), (1,)]


# The states


class Recorder(FakeEagleHead):
    """Records the token and the state of each row."""

    def __init__(self) -> None:
        super().__init__(fake_logits)
        self.rows: list[tuple[int, list[float]]] = []

    def inputs(self, tokens: Sequence[int], states: Floats) -> Floats:
        self.rows += list(zip(tokens, np.array(states).tolist(), strict=True))
        return super().inputs(tokens, states)


def state(*prefix: int) -> list[float]:
    return fake_hidden(prefix).tolist()


def test_every_row_gets_its_token_and_the_state_before_it() -> None:
    target, head = FakeTarget(), Recorder()
    eagle = HeadDrafter(GrownParams(depth=2, top_k=1, nodes=2, window=3), HeadContext(head))
    cache = SequenceCache(target)
    prompt = [1, 2, 3, 4, 5, 6]
    prefill(cache, prompt[:-1], reader=eagle.requires.prompt_reader)
    eagle.begin(prompt)
    tree = TokenTree(6)
    run(eagle.draft(prompt, tree, DraftBudget()))
    one = int(fake_logits((1, 2, 3, 4, 5, 6)).argmax())
    # Three states of the prompt were read, those of 3, 4 and 5; the head itself then saw 4, 5, 6.
    assert head.rows == [
        (4, state(1, 2, 3)),
        (5, state(1, 2, 3, 4)),
        (6, state(1, 2, 3, 4, 5)),
        (one, fake_hidden((4, 5, 6)).tolist()),  # the state given by the head's own context
    ]
    head.rows.clear()
    target.want_hidden(True)
    rows = tree_rows(tree, cache.n_past, 1)
    output = target.decode(rows)
    cache.commit(rows, [0, 1])
    eagle.observe(Step(tree, output, [0, 1], 9))
    target.want_hidden(False)
    run(eagle.draft([*prompt, one, 9], TokenTree(9), DraftBudget()))
    assert head.rows[:2] == [(one, state(*prompt)), (9, state(*prompt, one))]


def test_another_prompt_reuses_the_rows_of_the_common_prefix() -> None:
    target, head = FakeTarget(), Recorder()
    eagle = FixedTreeDrafter(Eagle1Params(choices="0"), HeadContext(head))
    cache = SequenceCache(target)
    for prompt, reused, expected in (
        ([1, 2, 3, 4], 0, [(2, state(1)), (3, state(1, 2)), (4, state(1, 2, 3))]),
        # Tokens up to 3 are cached, but the state after 3 is gone: it is decoded again.
        ([1, 2, 3, 7, 8], 2, [(7, state(1, 2, 3)), (8, state(1, 2, 3, 7))]),
        ([5, 6], 0, [(6, state(5))]),
    ):
        head.rows.clear()
        assert prefill(cache, prompt[:-1], reader=eagle.requires.prompt_reader) == reused
        eagle.begin(prompt)
        run(eagle.draft(prompt, TokenTree(prompt[-1]), DraftBudget()))
        assert head.rows == expected
        assert isinstance(head.context, FakeTarget)
        assert len(head.context.tokens_of(0)) == len(prompt) - 1


def test_a_cancelled_prompt_is_read_from_where_it_stopped() -> None:
    head = Recorder()
    eagle = FixedTreeDrafter(Eagle1Params(choices="0"), HeadContext(head))
    reader = eagle.requires.prompt_reader
    cache, prompt = SequenceCache(target := FakeTarget(n_batch=2)), [1, 2, 3, 4, 5, 6]
    target.n_until_cancelled = 1
    with pytest.raises(Cancelled):
        prefill(cache, prompt[:-1], reader=reader)
    target.n_until_cancelled = 9
    assert prefill(cache, prompt[:-1], reader=reader) == 2  # the states of these were read
    eagle.begin(prompt)
    run(eagle.draft(prompt, TokenTree(6), DraftBudget()))
    assert [token for token, _ in head.rows] == [2, 3, 4, 5, 6]


def test_only_a_bounded_part_of_the_prompt_is_decoded_again_for_states() -> None:
    cached = list(range(100))
    for n_rewind, n_reused in ((NO_LIMIT, 36), (8, 100)):
        levels = HeadContext(Recorder())
        levels.window, levels.depth = 1024, 5
        cache = SequenceCache(FakeTarget(n_rewind=n_rewind))
        prefill(cache, cached)
        assert prefill(cache, [*cached, 7, 8], reader=levels) == n_reused


# Parameters


def test_paths_of_ranks_include_the_nodes_on_their_way() -> None:
    nodes = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
    assert parse_choices("0.0.0.0/0.1.0/1.0/1.1") == nodes
    assert Eagle1Params(choices="0.0.0.0/0.1.0/1.0/1.1").n_branches == 4
    assert len(Eagle1Params().shape) == 25


# Auxiliary hidden states

TOKENS = [5, 270, 271, 272, 280, 281]


def decoded(
    context: Context, layers: tuple[int, ...], *chunks: int, first: int = 0
) -> Iterator[Floats]:
    """The inputs of the layers for TOKENS, row by row, also of rows without output."""
    context.want_layers(layers)
    for n in chunks:
        rows = text_rows(TOKENS[first : first + n], first, [False] * (n - 1) + [True])
        output = context.decode(rows)
        yield from (output.aux_hidden_states(row, layers).copy() for row in range(n))
        first += n


def test_auxiliary_hidden_states_match_the_reference_for_every_row(target: Path) -> None:
    file = GGUFFile(target)
    w = {name: file.tensor(name) for name in file.tensors}
    inputs = [w["token_embd.weight"][TOKENS]]  # of each layer, (time, 32), in plain NumPy
    for i in range(3):
        x = inputs[-1]
        inputs.append(layer(w, rms_norm(x, w[f"blk.{i}.attn_norm.weight"]), x, i))
    with Model(target) as model, Context(model, EXACT) as context:
        for row, found in enumerate(decoded(context, (1, 3), 4)):
            expected = np.concatenate([inputs[1][row], inputs[3][row]])
            np.testing.assert_allclose(found, expected, atol=1e-4)
        (found,) = decoded(context, (2,), 1, first=4)
        np.testing.assert_allclose(found, inputs[2][4], atol=1e-4)
        context.want_layers(())
        output = context.decode(text_rows([281], 5, [True]))
        with pytest.raises(RuntimeError, match="inputs of layer 2 were not requested"):
            output.aux_hidden_states(0, (2,))


@pytest.mark.parametrize("write", [write_hybrid_gguf, write_mtp_gguf])
def test_auxiliary_hidden_states_of_a_hybrid_model_do_not_depend_on_the_batches(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "hybrid.gguf")

    def inputs(layers: tuple[int, ...], *chunks: int) -> Floats:
        """(time, len(layers) * 32)"""
        with Context(model, EXACT) as context:
            return np.stack(list(decoded(context, layers, *chunks)))

    with Model(path) as model:
        together = inputs((0, 1, 2), 6)
        embeddings = GGUFFile(path).tensor("token_embd.weight")[TOKENS]
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


# EAGLE-3's files

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
    shape = SHAPE
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
