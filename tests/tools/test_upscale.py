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
from tools.upscale import Shape, Source, UpscaleError, kind_of, main, plans, write_upscaled

PROMPT = "the cat saw a dog, a cat and the dog in an inn."
GROUPED = Shape(width=64, layers=2, hidden=160, heads=8, kv_heads=2, head_dim=8, norm_eps=1e-5)


@pytest.fixture(scope="module")
def doubled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model at twice its width with two more layers, in F32."""
    out = tmp_path_factory.mktemp("upscaled") / "doubled.gguf"
    source = Source(tiny_model)
    write_upscaled(source, out, source.shape.upscaled(width=64, layers=4), "f32")
    return out


def logits(path: Path) -> Any:
    """Logits after each of the prompt's first 20 tokens, decoded at once, ``(20, n_vocab)``."""
    with Model(path) as model, Context(model, EXACT) as context:
        output = context.decode(text_rows(model.tokenize(PROMPT)[:20], 0, [True] * 20))
        return np.stack([output.logits(i).copy() for i in range(20)])


def test_an_upscaled_model_has_the_same_logits_and_text(tiny_model: Path, doubled: Path) -> None:
    before, after = logits(tiny_model), logits(doubled)
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
    assert np.abs(logits(out) - logits(grouped)).max() < 1e-4


def test_the_file_says_so_and_new_weights_are_random(tiny_model: Path, doubled: Path) -> None:
    with Model(doubled) as model, Model(tiny_model) as source:
        description = model.metadata("general.description") or ""
        assert description.startswith("Function-preserving upscaling of tiny: the same logits at")
        assert "no better model. Width 32 -> 64, layers 2 -> 4, hidden 64 -> 128." in description
        for key, value in (
            ("general.name", "function-preserving upscaling of tiny"),
            ("llama.embedding_length", "64"),
            ("llama.attention.head_count", "8"),
            ("llama.rope.dimension_count", "8"),
        ):
            assert model.metadata(key) == value
        assert (model.n_layer, model.chat_template) == (4, source.chat_template)
        assert model.tokenize(PROMPT) == source.tokenize(PROMPT)
    weight = GGUFFile(doubled).tensor
    gate, down = weight("blk.0.ffn_gate.weight"), weight("blk.0.ffn_down.weight")
    assert (gate.shape, (gate != 0).mean() > 0.99) == ((128, 64), True)
    assert np.abs(gate[64:]).max() <= 0.02
    assert down[:32, :64].any() and not down[32:].any() and not down[:, 64:].any()
    assert not weight("blk.3.attn_output.weight").any()  # a new layer adds nothing
    assert (weight("blk.3.attn_q.weight") != 0).mean() > 0.99


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_matrices_alone_get_the_requested_type(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.gguf"
    flags = ["--model", str(tiny_model), "--width", "64", "--type", kind, "--out", str(out)]
    assert main(flags) == 0
    types = {name: TensorType(of.type).name for name, of in GGUFFile(out).tensors.items()}
    assert types["blk.1.attn_norm.weight"] == "F32"
    assert {types["token_embd.weight"], types["blk.0.ffn_down.weight"]} == {kind.upper()}
    with Engine.load(out, EXACT) as engine:
        assert len(engine.generate(PROMPT, method="ar", max_tokens=4).run().token_ids) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_requantising_keeps_the_bundled_models_weights(tmp_path: Path) -> None:
    source, out = Source(resolve("bundled")), tmp_path / "out.gguf"
    write_upscaled(source, out, source.shape.upscaled(width=320), "q8_0")
    before, after = (one.gguf.tensor("blk.7.attn_q.weight") for one in (source, Source(out)))
    assert np.array_equal(after[:256, :256], before)


def test_sizes_grow_with_the_width_and_those_that_cannot_hold_the_model_are_refused() -> None:
    assert GROUPED.upscaled() == GROUPED
    assert GROUPED.upscaled(width=128, layers=5) == Shape(
        width=128, layers=5, hidden=320, heads=16, kv_heads=4, head_dim=8, norm_eps=5e-6
    )
    for size, n, reason in (
        ("width", 32, "--width is 32, but the model has 64"),
        ("layers", 1, "--layers is 1, but the model has 2"),
        ("layers", 513, "--layers is 513, but llama.cpp supports at most 512"),
        ("width", 100, r"is not 64 or more in steps of 32 \(.* 8 x 4 .*\); give 96 or 128"),
    ):
        with pytest.raises(UpscaleError, match=reason):
            GROUPED.upscaled(**{size: n})


def test_new_layers_come_last_and_have_no_biases() -> None:
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight"]
    new = [("blk.1.attn_q.weight", None), ("blk.2.attn_q.weight", None)]
    assert list(plans(names, 1, 3)) == [*zip(names, names, strict=True), *new]


def test_models_sizes_and_files_that_cannot_work_are_refused_and_nothing_is_written(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba, text = write_recurrent_gguf(tmp_path / "mamba.gguf"), tmp_path / "text.gguf"
    text.write_text("Once upon a time, and so on for some more bytes than a header has")
    folder, before = tmp_path / "folder", tiny_model.read_bytes()
    folder.mkdir()
    to, none = tmp_path / "out.gguf", tmp_path / "none.gguf"
    huge = ["--width", "8388608", "--layers", "100"]
    for model, out, flags, reason in (
        (mamba, to, [], "has the architecture 'mamba'; only 'llama' models can be upscaled"),
        (text, to, [], "text.gguf is not a model in the GGUF format"),
        (tiny_model, tiny_model, [], "is the model itself"),
        (tiny_model, to, huge, "GiB free; choose smaller sizes, a smaller --type or another disk"),
        (tiny_model, to, ["--width", "40", "--type", "q8_0"], "fit this model: rows of 40 values"),
        # Before the model is read.
        (none, folder, [], f"error: cannot write {folder}: it is a folder"),
        (none, folder / "none" / "x.gguf", [], "x.gguf: no such folder"),
    ):
        assert main(["--model", str(model), "--out", str(out), *flags]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == [folder, mamba, text]
    assert (list(folder.iterdir()), tiny_model.read_bytes()) == ([], before)
    with pytest.raises(UpscaleError, match=r"a tensor blk\.0\.ffn_gate_exps\.weight"):
        kind_of("blk.0.ffn_gate_exps.weight")
