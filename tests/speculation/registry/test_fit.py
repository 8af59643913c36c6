"""What a GGUF's header tells of a model, and whether the model fits into memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batching.errors import ModelError
from speculation.registry import resolve
from speculation.registry.describe import Shape, describe
from speculation.registry.fit import (
    Change,
    Memory,
    Smaller,
    Wanted,
    context_in_words,
    fit,
    need,
    own_context,
)
from tests.support.tiny_gguf import N_TINY, write_tiny_gguf

MIB, GIB = 2**20, 2**30
# As Llama 3.1 8B in Q4_K_M: 128 KiB of cache a token, 120 in f16.
BIG = Shape(
    int(4.6 * GIB), "llama", "Q4_K_M", "8B", 131072, 32, 8, 4096, 14336, 128256, 65536, True
)
# As Qwen3 30B A3B in Q4_K_M.
EXPERTS = Shape(
    int(17.3 * GIB), "qwen3moe", "Q4_K_M", "30B-A3B", 40960, 48, 4, 2048, 6144, 151936, 49152, True,
    int(16.3 * GIB),
)  # fmt: skip
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
    with pytest.raises(ModelError):
        describe(tmp_path / "text.gguf")


def test_the_estimate_is_near_the_memory_that_the_bundled_model_had() -> None:
    """156 MiB were measured with all of its 2,048 tokens, see fit.py."""
    found = need(describe(resolve("bundled")), Wanted(2048))
    assert found.cache == 2048 * 8192 * 2
    assert 0.9 < found.total / (156 * MIB) < 1.1


@pytest.mark.parametrize(
    ("wanted", "memory", "fits", "changes"),
    [
        (Wanted(), Memory(8 * GIB), True, []),
        (Wanted(), Memory(None), None, []),
        # 4.6 GiB of weights, 1 of cache, 0.4 to compute with
        (
            Wanted(8192),
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
            ["Take a smaller quantisation: hf:o/r/big-Q2_K.gguf, 3.2 GB"],
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


@pytest.mark.parametrize(
    ("wanted", "memory", "n_ctx"),
    [
        # 16 GiB of cache, 32 with those that stay free, 5 for the rest
        (Wanted(), Memory(38 * GIB), 131072),
        (Wanted(), Memory(24 * GIB), 76800),
        (Wanted(0, "q8_0"), Memory(24 * GIB), 131072),
        (Wanted(), Memory(int(5.6 * GIB)), 2048),
        (Wanted(), Memory(1 * GIB), 1024),
        (Wanted(), Memory(None), 8192),
        # all layers are on the GPU, and the cache beside them
        (Wanted(), Memory(2 * GIB, (("CUDA0", 80 * GIB),)), 131072),
        (Wanted(), Memory(2 * GIB, (("CUDA0", 12 * GIB),)), 52224),
        # the GPU has only some of the layers for 8,192 tokens, and keeps them
        (Wanted(), Memory(64 * GIB, (("CUDA0", 4 * GIB),)), 9216),
        (Wanted(), Memory(64 * GIB, (("CUDA0", 0),)), 8192),
    ],
)
def test_a_context_is_the_models_own_or_as_much_of_it_as_memory_allows(
    wanted: Wanted, memory: Memory, n_ctx: int
) -> None:
    assert own_context(BIG, wanted, memory) == n_ctx
    assert own_context(replace(BIG, n_ctx_train=512), wanted, memory) == 512
    assert memory.main is None or n_ctx == 1024 or fit(BIG, wanted, memory).fits


@pytest.mark.parametrize(
    ("n_ctx", "wanted", "told"),
    [
        (32768, Wanted(), "Context 32,768 tokens (the model's own)"),
        (4096, Wanted(4096), "Context 4,096 of the model's 32,768 tokens (--ctx)"),
        (
            9216,
            Wanted(),
            "Context 9,216 of the model's 32,768 tokens, as memory allows; --kv-type q8_0 allows "
            "about 17,347, --ctx asks for more",
        ),
        (
            9216,
            Wanted(0, "q8_0"),
            "Context 9,216 of the model's 32,768 tokens, as memory allows; --ctx asks for more",
        ),
    ],
)
def test_a_line_tells_the_context_and_what_would_make_it_larger(
    n_ctx: int, wanted: Wanted, told: str
) -> None:
    assert context_in_words(n_ctx, 32768, wanted) == told


@pytest.mark.parametrize(
    ("wanted", "free", "on_gpu"),
    [
        (Wanted(4096), 24, "19.0 GB"),  # all
        (Wanted(4096), 13, "12.5 GB"),  # all layers, and the experts of 31
        (Wanted(4096), 2, "1.8 GB"),  # all layers, and the experts of one
        (Wanted(4096), 1, "934 MB"),  # some layers
        (Wanted(4096, n_cpu_moe=999), 24, "1.5 GB"),
        (Wanted(4096, n_cpu_moe=24), 24, "10.4 GB"),
        (Wanted(4096, n_gpu_layers=24, n_cpu_moe=24), 24, "9.3 GB"),
        (Wanted(4096, n_gpu_layers=24, n_cpu_moe=40), 24, "3.9 GB"),
    ],
)
def test_experts_that_the_gpu_does_not_hold_are_in_main_memory(
    wanted: Wanted, free: int, on_gpu: str
) -> None:
    found = fit(EXPERTS, wanted, Memory(64 * GIB, (("CUDA0", free * GIB),)))
    assert f" and {on_gpu} on the GPU" in found.sentence
    # The context grows as long as that moves no expert off the GPU.
    assert own_context(EXPERTS, Wanted(), Memory(64 * GIB, (("CUDA0", 13 * GIB),))) == 10240


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
    found = fit(BIG, Wanted(8192), Memory(8 * GIB))
    assert found.sentence == (
        "Needs 6.5 GB (4.9 GB weights, 1.1 GB KV cache, 449 MB to compute with); 8.6 GB are free."
    )
    short = fit(BIG, Wanted(400_000), Memory(8 * GIB))
    assert short.sentence.endswith("The model was trained for 131,072 tokens.")
    unread = fit(Shape(5 * GIB), Wanted(), Memory(2 * GIB))
    assert unread.is_least
    assert unread.sentence == "Needs at least 5.5 GB; 2.1 GB are free."
