"""The upscaling tool: larger sizes, the same logits, and metadata that describe the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batching.gguf.reader import GGUFFile
from batching.gguf.writer import TensorType, write_gguf
from batching.llama.context import Context
from batching.llama.model import Model
from batching.llama.weights import encoded_tensor
from batching.rows import text_rows
from speculation.engine import Engine
from speculation.registry import resolve
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_recurrent_gguf
from tools.upscale import (
    Kind,
    Shape,
    Source,
    UpscaleError,
    kind_of,
    main,
    plans,
    upscaled_tensor,
    write_upscaled,
)

PROMPT = "the cat saw a dog, a cat and the dog in an inn."
GROUPED = Shape(width=64, layers=2, hidden=160, heads=8, kv_heads=2, head_dim=8, norm_eps=1e-5)


@pytest.fixture(scope="module")
def doubled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model at twice its width with two more layers, in F32."""
    out = tmp_path_factory.mktemp("upscaled") / "doubled.gguf"
    source = Source(tiny_model)
    write_upscaled(source, out, source.shape.upscaled(width=64, layers=4), "f32")
    return out


def logits(path: Path, n_tokens: int) -> Any:
    """Logits after each of the prompt's first tokens, decoded at once, ``(n_tokens, n_vocab)``."""
    with Model(path) as model, Context(model, EXACT) as context:
        tokens = model.tokenize(PROMPT)[:n_tokens]
        assert len(tokens) == n_tokens
        output = context.decode(text_rows(tokens, 0, [True] * n_tokens))
        return np.stack([output.logits(i).copy() for i in range(n_tokens)])


def test_an_upscaled_model_has_the_same_logits_and_text(tiny_model: Path, doubled: Path) -> None:
    before, after = logits(tiny_model, 20), logits(doubled, 20)
    assert before.std() > 0.1
    assert np.abs(after - before).max() < 2e-5  # with the norm's eps unchanged it would be 9e-5
    texts = []
    for path in (tiny_model, doubled):
        with Engine.load(path, EXACT) as engine:
            texts.append(engine.generate(PROMPT, method="ar", max_tokens=32).run().token_ids)
    assert len(texts[0]) == 32
    assert texts[0] == texts[1]


def test_grouped_heads_keep_their_shared_keys(tmp_path: Path, tiny_model: Path) -> None:
    """Two heads share one key and value head; adding heads must not shift the groups."""
    model, grouped, out = GGUFFile(tiny_model), tmp_path / "grouped.gguf", tmp_path / "out.gguf"
    tensors = {}
    for name in model.tensors:
        values = model.tensor(name)
        if ".attn_k." in name or ".attn_v." in name:
            values = values[: len(values) // 2]
        tensors[name] = encoded_tensor(values, TensorType.F32)
    key = "llama.attention.head_count_kv"
    write_gguf(grouped, {**model.encoded_metadata(), key: 2}, tensors)
    source = Source(grouped)
    assert (source.shape.heads, source.shape.kv_heads) == (4, 2)
    write_upscaled(source, out, source.shape.upscaled(width=96), "f32")
    assert Source(out).shape.kv_heads == 6
    assert np.abs(logits(out, 20) - logits(grouped, 20)).max() < 1e-4


def test_the_file_says_that_it_is_upscaled(tiny_model: Path, doubled: Path) -> None:
    with Model(doubled) as model, Model(tiny_model) as source:
        description = model.metadata("general.description") or ""
        assert description.startswith(
            "Function-preserving upscaling of tiny: the same logits at the cost of"
        )
        size = "It is no better model. Width 32 -> 64, layers 2 -> 4, hidden 64 -> 128."
        assert size in description
        for key, value in (
            ("general.name", "function-preserving upscaling of tiny"),
            ("llama.embedding_length", "64"),
            ("llama.attention.head_count", "8"),
            ("llama.rope.dimension_count", "8"),
        ):
            assert model.metadata(key) == value
        eps = model.metadata("llama.attention.layer_norm_rms_epsilon")
        assert float(eps or 0) == pytest.approx(5e-6)
        assert model.n_layer == 4
        assert model.chat_template == source.chat_template
        assert model.tokenize(PROMPT) == source.tokenize(PROMPT)


def test_new_weights_are_random_where_the_logits_do_not_depend_on_them(doubled: Path) -> None:
    source = Source(doubled)
    gate = source.gguf.tensor("blk.0.ffn_gate.weight")
    assert gate.shape == (128, 64)
    assert (gate != 0).mean() > 0.99
    down = source.gguf.tensor("blk.0.ffn_down.weight")
    assert not down[32:].any()
    assert not down[:, 64:].any()
    assert down[:32, :64].any()
    assert not source.gguf.tensor("blk.3.attn_output.weight").any()
    assert (source.gguf.tensor("blk.3.attn_q.weight") != 0).mean() > 0.99


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_matrices_are_written_in_the_requested_type_and_vectors_in_f32(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out.gguf"
    assert (
        main(["--model", str(tiny_model), "--width", "64", "--type", kind, "--out", str(out)]) == 0
    )
    types = {name: TensorType(of.type).name for name, of in GGUFFile(out).tensors.items()}
    assert types["blk.1.attn_norm.weight"] == "F32"
    assert {types["token_embd.weight"], types["blk.0.ffn_down.weight"]} == {kind.upper()}
    with Engine.load(out, EXACT) as engine:
        assert len(engine.generate(PROMPT, method="ar", max_tokens=4).run().token_ids) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_requantising_keeps_the_bundled_models_weights(tmp_path: Path) -> None:
    source = Source(resolve("bundled"))
    out = tmp_path / "out.gguf"
    write_upscaled(source, out, source.shape.upscaled(width=320), "q8_0")
    before, after = (one.gguf.tensor("blk.7.attn_q.weight") for one in (source, Source(out)))
    assert np.array_equal(after[:256, :256], before)


# Sizes


def test_the_feed_forward_width_and_the_heads_grow_with_the_width() -> None:
    assert GROUPED.upscaled(width=128, layers=5) == Shape(
        width=128, layers=5, hidden=320, heads=16, kv_heads=4, head_dim=8, norm_eps=5e-6
    )
    assert GROUPED.upscaled() == GROUPED


def test_sizes_that_cannot_hold_the_model_or_whole_blocks_are_refused() -> None:
    for size, n, reason in (
        ("width", 32, "--width is 32, but the model has 64; give at least that"),
        ("layers", 1, "--layers is 1, but the model has 2; give at least that"),
        ("layers", 513, "--layers is 513, but llama.cpp supports at most 512; give fewer"),
        (
            "width",
            100,
            "--width 100 is not 64 or more in steps of 32 (head size 8 x 4 query heads per key "
            "head); give 96 or 128",
        ),
    ):
        with pytest.raises(UpscaleError) as caught:
            GROUPED.upscaled(**{size: n})
        assert str(caught.value) == reason


def test_a_type_whose_blocks_do_not_fit_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    source, out = Source(tiny_model), tmp_path / "out.gguf"
    with pytest.raises(UpscaleError, match="q8_0 does not fit this model: rows of 40 values"):
        write_upscaled(source, out, source.shape.upscaled(width=40), "q8_0")
    assert not out.exists()


# Tensors


def test_the_old_weights_fill_the_top_left_corner() -> None:
    rng = np.random.default_rng(0)
    old = np.array([[1, 2], [3, 4]], np.float32)
    assert upscaled_tensor(old, Kind(("width", "hidden"), "zero"), (3, 3), 1.5, rng).tolist() == [
        [1, 2, 0],
        [3, 4, 0],
        [0, 0, 0],
    ]
    filled = upscaled_tensor(old, Kind(("hidden", "width"), "random"), (3, 4), 2.0, rng)
    assert filled[:2, :2].tolist() == [[1, 2], [3, 4]]
    assert filled[2].any()
    assert np.abs(filled[:, 2:]).max() <= 0.02


def test_norms_are_divided_by_the_square_root_of_the_widening() -> None:
    rng, old = np.random.default_rng(0), np.array([2, 4], np.float32)
    norm = upscaled_tensor(old, Kind(("width",), "one"), (8,), 4.0, rng)
    assert norm.tolist() == [1, 2, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    # The shape of a matrix lists rows first.
    assert Kind(("vocab", "width"), "zero").shape(GROUPED, 300) == (300, 64)
    assert Kind(("kv_heads", "width"), "zero").shape(GROUPED, 300) == (16, 64)


def test_new_layers_come_last_and_have_no_biases() -> None:
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight"]
    new = ["blk.1.attn_q.weight", "blk.2.attn_q.weight"]
    assert list(plans(names, 1, 3)) == [
        *((name, name) for name in names),
        *((name, None) for name in new),
    ]


# Errors


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_models_that_cannot_be_upscaled_and_the_model_as_output_are_refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba, out = write_recurrent_gguf(tmp_path / "mamba.gguf"), tmp_path / "out.gguf"
    text = tmp_path / "text.gguf"
    text.write_text("Once upon a time, and so on for some more bytes than a header has")
    before = tiny_model.read_bytes()
    architecture = "has the architecture 'mamba'; only 'llama' models can be upscaled"
    for model, to, reason in (
        (mamba, out, architecture),
        (text, out, "text.gguf is not a model in the GGUF format"),
        (tiny_model, tiny_model, "is the model itself"),
    ):
        assert reason in failing(["--model", str(model), "--out", str(to)], capsys)
    assert not out.exists()
    assert tiny_model.read_bytes() == before
    with pytest.raises(UpscaleError, match=r"a tensor blk\.0\.ffn_gate_exps\.weight"):
        kind_of("blk.0.ffn_gate_exps.weight")


def test_options_that_cannot_work_or_fill_the_disk_are_refused_before_the_model_is_read(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = ["--model", str(tmp_path / "none.gguf"), "--width", "64"]
    for out, reason in (
        (folder, "it is a folder; give a file in a folder that exists and is writable"),
        (folder / "none" / "x.gguf", "no such folder; give a file in a folder that exists"),
    ):
        shown = failing([*command, "--out", str(out)], capsys)
        assert shown.startswith(f"error: cannot write {out}: {reason}")
    sizes = ["--width", "8388608", "--layers", "100"]
    large = str(tmp_path / "out.gguf")
    shown = failing(["--model", str(tiny_model), *sizes, "--out", large], capsys)
    assert "GiB free; choose smaller sizes, a smaller --type or another disk" in shown
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []
