"""Training EAGLE's heads: their networks are llama.cpp's, and their data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.errors import InvalidParameter
from batching.gguf.reader import GGUFFile
from batching.llama.weights import Weights
from batching.tree import Floats
from speculation.heads.eagle import EagleShape
from speculation.train import TrainError
from speculation.train.params import EagleTraining
from speculation.train.sequences import Sequences, batches, draft_vocab
from speculation.train.states import States
from speculation.train.texts import Sample
from tests.speculation.methods.test_eagle import reference
from tests.support.reference import layer, rms_norm
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_heads import SHAPE, eagle3_tensors, eagle_tensors
from tests.support.train_data import collected, lines, train

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.train


def module(tensors: dict[str, Floats]):  # type: ignore[no-untyped-def]
    from speculation.train.layer import EagleModule

    built = EagleModule(SHAPE, 1.0)
    for name, parameter in built.named_parameters():
        parameter.data = torch.from_numpy(tensors[name])
    assert set(built.tensors()) == set(SHAPE.tensors)
    return built


def test_the_trained_layer_matches_the_one_that_llama_cpp_runs() -> None:
    w = eagle_tensors()
    embeddings, before = np.random.default_rng(0).standard_normal((2, 7, 32)).astype(np.float32)
    x = np.concatenate([embeddings, before], axis=1) @ w["fc.weight"].T + w["fc.bias"]
    with torch.inference_mode():
        (ours,) = module(w)(torch.from_numpy(embeddings)[None], torch.from_numpy(before)[None], 1)
    np.testing.assert_allclose(ours[0], reference(w, x), atol=1e-5)


def test_in_each_training_pass_one_more_state_is_the_heads_own() -> None:
    """Pass 2 at position t equals a sequence drafted from position t - 2 on."""
    w = eagle_tensors()
    embeddings, before = np.random.default_rng(0).standard_normal((2, 7, 32)).astype(np.float32)
    with torch.inference_mode():
        passes = module(w)(torch.from_numpy(embeddings)[None], torch.from_numpy(before)[None], 3)

    def x(tokens: Floats, states: Floats) -> Floats:
        return np.concatenate([tokens, states], axis=1) @ w["fc.weight"].T + w["fc.bias"]

    for t in (2, 4, 6):
        fed = before[: t - 1]  # the states before positions 0 to t - 2 are the target's
        for place in (t - 1, t):
            guess = reference(w, x(embeddings[:place], fed))[-1]
            fed = np.concatenate([fed, guess[None]])
        expected = reference(w, x(embeddings[: t + 1], fed))[-1]
        np.testing.assert_allclose(passes[2][0, t], expected, atol=1e-5)


def test_the_eagle_3_module_matches_llama_cpps_graph() -> None:
    from speculation.train.layer import Eagle3Module

    w = eagle3_tensors()
    built = Eagle3Module(SHAPE, torch.ones(32))
    for name, parameter in built.named_parameters():
        parameter.data = torch.from_numpy(w[name])
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((7, 32)).astype(np.float32)
    features = rng.standard_normal((7, 96)).astype(np.float32)
    with torch.inference_mode():
        passes = built(torch.from_numpy(embeddings)[None], torch.from_numpy(features)[None], 2)

    def states(tokens: Floats, g: Floats) -> Floats:
        known = rms_norm(tokens, w["blk.0.attn_norm.weight"])
        inner = np.concatenate([known, rms_norm(g, w["blk.0.attn_norm_2.weight"])], axis=1)
        return layer(w, inner, g)

    g = features @ w["fc.weight"].T
    np.testing.assert_allclose(passes[0][0], states(embeddings, g), atol=1e-4)
    guess = states(embeddings[:5], g[:5])[-1]
    drafted = states(embeddings[:6], np.concatenate([g[:5], guess[None]]))[-1]
    np.testing.assert_allclose(passes[1][0, 5], drafted, atol=1e-4)


def test_feature_scales_are_folded_into_the_matrix_in_the_file() -> None:
    from speculation.train.layer import Eagle3Module

    rng = np.random.default_rng(0)
    sizes = torch.from_numpy(rng.uniform(0.1, 50, 96).astype(np.float32))
    built = Eagle3Module(SHAPE, torch.ones(32), sizes)
    features = sizes * torch.from_numpy(rng.standard_normal((1, 7, 96)).astype(np.float32))
    embeddings = torch.from_numpy(rng.standard_normal((1, 7, 32)).astype(np.float32))
    plain = Eagle3Module(SHAPE, torch.ones(32))
    plain.load_state_dict({**built.state_dict(), "sizes": torch.ones(96)})
    plain.fc.weight.data = torch.from_numpy(built.tensors()["fc.weight"])
    with torch.inference_mode():
        ours, theirs = built(embeddings, features, 2), plain(embeddings, features, 2)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


def two_samples(folder: Path) -> States:
    """Two samples of 6 and 3 tokens; of the first the target wrote tokens 3 to 5."""
    samples = [Sample(list(range(6)), [(3, 6)]), Sample([6, 7, 8])]
    return collected(folder, samples, np.arange(18).reshape(9, 2), range(1, 10))


def test_each_position_pairs_a_token_with_the_states_before_and_after_it(tmp_path: Path) -> None:
    found = two_samples(tmp_path)
    embeddings = np.arange(18, dtype=np.float32).reshape(9, 2) + 100
    data = Sequences(found, "cpu", embeddings, found.hidden)
    batch = data.batch([0, 1])
    assert batch.embeddings[0, :, 0].tolist() == [102, 104, 106, 108, 110]
    assert batch.before[0, :, 0].tolist() == [0, 2, 4, 6, 8]
    assert batch.after[0, :, 0].tolist() == [2, 4, 6, 8, 10]
    assert batch.choices[0].tolist() == [2, 3, 4, 5, 6]
    # Token 2 is the last of the prompt: what follows it is the target's own.
    assert batch.mask[0].tolist() == [False, True, True, True, False]
    assert batch.before[1, :, 0].tolist() == [12, 14, 0, 0, 0]
    assert batch.mask[1].tolist() == [True, False, False, False, False]
    tokens = draft_vocab(found, 3, 12)
    assert tokens is not None
    assert len(tokens) == 3


def test_a_loss_computed_in_parts_equals_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculation.train import training

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, 4, generator=generator)
    matrix = torch.randn(9, 4, generator=generator)
    made: list[int] = []  # rows of each matrix of logits
    softmax = torch.Tensor.softmax

    def counted(logits: Any, dim: int) -> Any:
        made.append(len(logits))
        return softmax(logits, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", counted)
    found = []
    for most in (2**26, 2 * 9):
        monkeypatch.setattr(training, "MAX_LOGITS", most)
        ours = (states + 0.5).requires_grad_()
        value = training.distribution_loss(ours, states, matrix)
        value.backward()
        found.append((value, ours.grad))
    assert made[0] == 7
    assert max(made[1:]) == 2
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts)


def test_batches_group_similar_lengths_and_leave_nothing_out() -> None:
    lengths = [10 * (i % 7) for i in range(100)]
    seen = list(islice(batches(range(100), 8, 0, lengths.__getitem__), 26))
    assert sorted(i for some in seen[:13] for i in some) == list(range(100))
    assert sorted(i for some in seen[13:] for i in some) == list(range(100))
    assert seen[:13] != seen[13:]
    assert sum(max(lengths[i] for i in some) * len(some) for some in seen[:13]) < 1.2 * sum(lengths)


def test_a_layer_has_the_shape_of_the_targets_layers(tmp_path: Path) -> None:
    from speculation.train.eagle import shape_for

    path = write_tiny_gguf(tmp_path / "m.gguf", n_embd=64, n_head=8)
    assert shape_for(Weights(path), 64) == EagleShape(64, 8, 8, 128)
    assert shape_for(Weights(path), 64, 96).n_ff == 96


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"passes": 9}, "passes is 9; give 1 to 8"),
        ({"kind": "q4_0"}, "kind is 'q4_0'; give one of f32, f16, q8_0"),
    ],
)
def test_parameters_that_cannot_train_are_refused(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        EagleTraining(**params)


def test_data_without_a_token_to_train_on_are_refused(tmp_path: Path) -> None:
    found = two_samples(tmp_path)
    found.span_end[:] = 0
    with pytest.raises(TrainError, match="the data has no token to train on"):
        Sequences(found, "cpu", np.zeros((9, 2), np.float32), found.hidden).split(0.05)


@pytest.mark.parametrize(
    ("architecture", "flags", "reason"),
    [
        ("llama", ["--layers", "0", "1", "1"], "--layers is for EAGLE-3 only; add --eagle3"),
        ("llama", ["--eagle3", "--layers", "0", "1", "2"], "--layers has 2, but the model has 2"),
        ("llama", ["--eagle3", "--layers", "-1", "0", "1"], "--layers has -1, but the model has 2"),
        ("qwen2", ["--eagle3"], "has architecture qwen2, whose layer inputs llama.cpp does not"),
    ],
)
def test_layers_that_cannot_be_read_are_refused_before_replies_are_generated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    flags: list[str],
    reason: str,
) -> None:
    target = write_tiny_gguf(tmp_path / "target.gguf", architecture=architecture)
    data = lines(tmp_path / "prompts.jsonl", {"prompt": "the cat"})
    assert train("eagle", target, data, tmp_path / "head.gguf", "--generate", 8, *flags) == 2
    assert reason in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [data, target]


def test_sequences_too_short_to_draft_from_are_skipped(tmp_path: Path) -> None:
    samples = [Sample([5]), Sample([5, 6]), Sample([5, 6, 7])]
    found = collected(tmp_path, samples)
    data = Sequences(found, "cpu", np.zeros((9, 4), np.float32), found.hidden)
    assert [data.loss_mask(sample).tolist() for sample in range(3)] == [[], [False], [True, False]]


def test_texts_shorter_than_the_passes_do_not_spoil_the_head(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f" {a} {b}" for a in ("the", "a") for b in ("the", "a", "cat", "dog", "saw")]
    data = lines(tmp_path / "texts.jsonl", *({"text": text} for text in texts))  # 3 tokens each
    flags = ("--passes", 3, "--epochs", 2, "--batch", 1, "--kind", "f32")
    out = tmp_path / "head.gguf"
    assert train("eagle", tiny_model, data, out, *flags) == 0
    assert "nan" not in capsys.readouterr().err
    assert np.isfinite(GGUFFile(out).tensor("fc.weight")).all()
