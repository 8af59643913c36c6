"""What a GGUF's header tells of a model, and whether the model fits into memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from batching.errors import NotGGUF
from speculation.registry import resolve
from speculation.registry.describe import Shape, describe
from speculation.registry.fit import Change, Memory, Smaller, Wanted, fit, need
from tests.support.tiny_gguf import N_TINY, write_tiny_gguf

MIB, GIB = 2**20, 2**30
# As Llama 3.1 8B in Q4_K_M: 128 KiB of cache a token, 120 in f16.
BIG = Shape(
    int(4.6 * GIB), "llama", "Q4_K_M", "8B", 131072, 32, 8, 4096, 14336, 128256, 65536, True
)
SMALL = Smaller("hf:o/r/big-Q2_K.gguf", 3 * GIB)


def test_a_header_tells_size_quantisation_context_layers_heads_and_template(tmp_path: Path) -> None:
    found = describe(resolve("bundled"))
    assert (found.architecture, found.file_type, found.n_bytes) == ("llama", "Q8_0", 14895552)
    assert (found.n_ctx_train, found.n_layer, found.n_head_kv) == (2048, 16, 4)
    assert (found.n_embd, found.n_ff, found.n_vocab, found.kv_values) == (256, 704, 4096, 8192)
    assert found.has_template
    parts = write_tiny_gguf(tmp_path / "m.gguf", chat_template=None, tensors_per_file=8)
    first, *others = sorted(parts.parent.glob("m-*.gguf"))
    split = describe(first)
    assert split.n_bytes == sum(file.stat().st_size for file in (first, *others))
    assert (split.n_layer, split.n_vocab, split.has_template) == (2, N_TINY, False)
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(NotGGUF):
        describe(tmp_path / "text.gguf")


def test_the_estimate_is_near_the_memory_that_the_bundled_model_had() -> None:
    """156 MiB were measured with all of its 2,048 tokens, see fit.py."""
    found = need(describe(resolve("bundled")), Wanted())
    assert found.cache == 2048 * 8192 * 2
    assert 0.9 < found.total / (156 * MIB) < 1.1


@pytest.mark.parametrize(
    ("wanted", "memory", "fits", "changes"),
    [
        (Wanted(), Memory(8 * GIB), True, []),
        (Wanted(), Memory(None), None, []),
        # 4.6 GiB of weights, 1 of cache, 0.4 to compute with
        (
            Wanted(),
            Memory(int(5.6 * GIB)),
            False,
            ["Use a q8_0 KV cache", "Use a context of 4,096 tokens"],
        ),
        # 16 GiB of cache: q8_0 alone is not enough
        (Wanted(131072), Memory(8 * GIB), False, ["Use a context of 16,384 tokens"]),
        (
            Wanted(1024),
            Memory(4 * GIB),
            False,
            ["Take a smaller quantisation: hf:o/r/big-Q2_K.gguf, 3.0 GiB"],
        ),
        (Wanted(), Memory(1 * GIB), False, []),
        # a GPU takes what it holds, and main memory the rest
        (Wanted(), Memory(4 * GIB, (("CUDA0", 4 * GIB),)), True, []),
        (Wanted(), Memory(1 * GIB, (("CUDA0", 80 * GIB),)), True, []),
        (
            Wanted(n_gpu_layers=33),
            Memory(16 * GIB, (("CUDA0", 4 * GIB),)),
            False,
            ["Put 20 layers on the GPU"],
        ),
    ],
)
def test_a_model_fits_or_the_changes_are_named_after_which_it_does(
    wanted: Wanted, memory: Memory, fits: bool | None, changes: list[str]
) -> None:
    smaller = [SMALL] if wanted.n_ctx == 1024 else []
    found = fit(BIG, wanted, memory, smaller)
    assert (found.fits, [change.text for change in found.changes]) == (fits, changes)
    for change in found.changes:
        assert fit(*changed(change, wanted), memory).fits


def changed(change: Change, wanted: Wanted) -> tuple[Shape, Wanted]:
    """The model and how to load it, after a change."""
    fields = {
        name: value
        for name in ("n_ctx", "kv_type", "n_gpu_layers")
        if (value := getattr(change, name)) is not None
    }
    shape = BIG if change.model is None else Shape(**{**vars(BIG), "n_bytes": SMALL.n_bytes})
    return shape, wanted._replace(**fields)


def test_the_sentence_tells_what_is_needed_and_free() -> None:
    found = fit(BIG, Wanted(), Memory(8 * GIB))
    assert found.sentence == (
        "Needs 6.0 GiB (4.6 GiB weights, 1.0 GiB KV cache, 428 MiB to compute with); "
        "8.0 GiB are free."
    )
    short = fit(BIG, Wanted(400_000), Memory(8 * GIB))
    assert short.sentence.endswith("The model was trained for 131,072 tokens.")
    unread = fit(Shape(5 * GIB), Wanted(), Memory(2 * GIB))
    assert unread.is_least
    assert unread.sentence == "Needs at least 5.1 GiB; 2.0 GiB are free."
