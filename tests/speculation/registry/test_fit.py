"""Which models there are, what a header tells of them, and whether they fit into memory."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from batching.errors import ModelError
from speculation.registry import ModelNotFound, found, resolve
from speculation.registry.describe import Shape, describe
from speculation.registry.fit import (
    Memory,
    Smaller,
    Wanted,
    context_in_words,
    fit,
    need,
    own_context,
)
from speculation.registry.vocabulary import vocabulary_of
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
Q8, CONTEXT, SMALLER = "Use a q8_0 KV cache", "Use a context of", "Take a smaller quantisation:"


def memory(main: float, gpu: int | None = None) -> Memory:
    """So many GiB, and on a GPU."""
    return Memory(int(main * GIB), () if gpu is None else (("CUDA0", gpu * GIB),))


def test_headers_tell_of_models_and_the_estimate_is_near(tmp_path: Path) -> None:
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
    needed = need(found, Wanted(2048))
    assert needed.cache == 2048 * 8192 * 2
    assert 0.9 < needed.total / (156 * MIB) < 1.1  # as was measured, see fit.py


@pytest.mark.parametrize(
    ("wanted", "memory", "fits", "changes"),
    [
        (Wanted(), memory(8), True, []),
        (Wanted(), Memory(None), None, []),
        # 4.6 GiB of weights, 1 of cache, 0.4 to compute with
        (Wanted(8192), memory(5.6), False, [Q8, f"{CONTEXT} 4,096 tokens"]),
        # 16 GiB of cache: q8_0 alone is not enough
        (Wanted(131072), memory(8), False, [f"{CONTEXT} 16,384 tokens"]),
        (Wanted(1024), memory(4), False, [f"{SMALLER} hf:o/r/big-Q2_K.gguf, 3.2 GB"]),
        (Wanted(), memory(1), False, []),
        # a GPU takes what it holds, and main memory the rest
        (Wanted(), memory(4, 4), True, []),
        (Wanted(), memory(1, 80), True, []),
        (Wanted(n_gpu_layers=33), memory(16, 4), False, ["Put 20 layers on the GPU"]),
    ],
)
def test_a_model_fits_or_the_changes_are_named_after_which_it_does(
    wanted: Wanted, memory: Memory, fits: bool | None, changes: list[str]
) -> None:
    smaller = [SMALL] if wanted.n_ctx == 1024 else []
    found = fit(BIG, wanted, memory, smaller)
    assert (found.fits, [change.text for change in found.changes]) == (fits, changes)
    for change in found.changes:
        names = [name for name in ("n_ctx", "kv_type", "n_gpu_layers") if getattr(change, name)]
        shape = BIG if change.model is None else replace(BIG, n_bytes=SMALL.n_bytes)
        assert fit(
            shape, wanted._replace(**{name: getattr(change, name) for name in names}), memory
        ).fits


@pytest.mark.parametrize(
    ("wanted", "memory", "n_ctx"),
    [
        # 16 GiB of cache, 32 with those that stay free, 5 for the rest
        (Wanted(), memory(38), 131072),
        (Wanted(), memory(24), 76800),
        (Wanted(0, "q8_0"), memory(24), 131072),
        (Wanted(), memory(5.6), 2048),
        (Wanted(), memory(1), 1024),
        (Wanted(), Memory(None), 8192),
        # all layers are on the GPU, and the cache beside them
        (Wanted(), memory(2, 80), 131072),
        (Wanted(), memory(2, 12), 52224),
        # the GPU has only some of the layers for 8,192 tokens, and keeps them
        (Wanted(), memory(64, 4), 9216),
        (Wanted(), memory(64, 0), 8192),
    ],
)
def test_a_context_is_the_models_own_or_fits(wanted: Wanted, memory: Memory, n_ctx: int) -> None:
    assert own_context(BIG, wanted, memory) == n_ctx
    assert own_context(replace(BIG, n_ctx_train=512), wanted, memory) == 512
    assert memory.main is None or n_ctx == 1024 or fit(BIG, wanted, memory).fits


ALLOWED = "Context 9,216 of the model's 32,768 tokens, as memory allows"


@pytest.mark.parametrize(
    ("n_ctx", "wanted", "told"),
    [
        (32768, Wanted(), "Context 32,768 tokens (the model's own)"),
        (4096, Wanted(4096), "Context 4,096 of the model's 32,768 tokens (--ctx)"),
        (9216, Wanted(), f"{ALLOWED}; --kv-type q8_0 allows about 17,347, --ctx asks for more"),
        (9216, Wanted(0, "q8_0"), f"{ALLOWED}; --ctx asks for more"),
    ],
)
def test_a_line_tells_the_context_and_more(n_ctx: int, wanted: Wanted, told: str) -> None:
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
def test_experts_beside_the_gpu_are_in_main_memory(wanted: Wanted, free: int, on_gpu: str) -> None:
    found = fit(EXPERTS, wanted, memory(64, free))
    assert f" and {on_gpu} on the GPU" in found.sentence
    # The context grows as long as that moves no expert off the GPU.
    assert own_context(EXPERTS, Wanted(), memory(64, 13)) == 10240


def test_the_sentence_tells_what_is_needed_and_free() -> None:
    found = fit(BIG, Wanted(8192), memory(8))
    assert found.sentence == (
        "Needs 6.5 GB (4.9 GB weights, 1.1 GB KV cache, 449 MB to compute with); 8.6 GB are free."
    )
    short = fit(BIG, Wanted(400_000), memory(8))
    assert short.sentence.endswith("The model was trained for 131,072 tokens.")
    unread = fit(Shape(5 * GIB), Wanted(), memory(2))
    assert unread.is_least
    assert unread.sentence == "Needs at least 5.5 GB; 2.1 GB are free."


DIGEST = "a" * 64


def test_a_search_takes_models_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath("store", "owner", "repo")
    deep.mkdir(parents=True)
    names = "a.gguf mmproj-a.gguf b-00001-of-00002.gguf b-00002-of-00002.gguf c.txt".split()
    for name in (*names, "new\nline.gguf", "half\udc80.gguf"):
        (deep / name).touch()
    (deep / "folder.gguf").mkdir()
    (deep / "back").symlink_to(tmp_path)
    (deep / "gone.gguf").symlink_to(tmp_path / "nothing")
    (deep / "loop.gguf").symlink_to(deep / "loop.gguf")
    (deep / "link.gguf").symlink_to(deep / "a.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(deep / "pipe.gguf")
    expected = ["a.gguf", "b-00001-of-00002.gguf", "link.gguf"]
    missing = tmp_path / "missing"
    assert sorted(path.name for path in found.search([missing, tmp_path])) == expected
    assert sorted(path.name for path in found.search([], [deep])) == expected
    assert not list(found.search([], [tmp_path]))
    monkeypatch.setattr(found, "_MOST_ENTRIES", 2)
    assert not list(found.search([tmp_path]))
    monkeypatch.setattr(found, "_MOST_ENTRIES", 100)
    monkeypatch.setattr(found, "_SECONDS", -1.0)
    assert not list(found.search([tmp_path]))


def manifest(folder: Path, name: str, content: object) -> None:
    file = folder.joinpath("manifests", *name.split("/"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def layers(digest: str) -> object:
    return {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]}


def test_models_of_ollama_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for name in (
        "registry.ollama.ai/library/qwen/1b",
        "registry.ollama.ai/me/qwen/1b",
        "hf.co/a/b/c",
    ):
        manifest(tmp_path, name, layers(f"sha256:{DIGEST}"))
    names = ["ollama:qwen:1b", "ollama:me/qwen:1b", "ollama:hf.co/a/b:c"]
    assert sorted(found.ollama_models()) == sorted(names)
    for name in names:
        assert resolve(name) == tmp_path / "blobs" / f"sha256-{DIGEST}"
    for n, content in enumerate((layers("../../x"), "[" * 5000, "{}", {"layers": [3]}, "\0")):
        manifest(tmp_path, f"registry.ollama.ai/library/odd/{n}", content)
        with pytest.raises(ModelNotFound, match="Ollama has no model"):
            resolve(f"ollama:odd:{n}")
    for name in (
        "ollama:",
        "ollama:none:1b",
        "ollama:../../x:y",
        "ollama:a/b/c/d:e",
        "ollama:\0:a",
    ):
        with pytest.raises(ModelNotFound, match="Ollama has no model"):
            resolve(name)


def test_models_with_the_same_tokens_have_the_same_vocabulary(tmp_path: Path) -> None:
    target = vocabulary_of(write_tiny_gguf(tmp_path / "target.gguf", n_embd=64))
    same = vocabulary_of(write_tiny_gguf(tmp_path / "same.gguf", seed=1))
    assert target.n > 256 and target.is_same(same) and same.is_same(target)
    shorter = target._replace(n=target.n - 3, digests=target.digests[3:])
    assert target.is_same(shorter) and shorter.is_same(target)
    others = [
        target._replace(kind=("gpt2", None, None)),
        target._replace(n=target.n - 3, digests=same.digests[2:]),
        target._replace(n=target.n - 200),
        target._replace(n=0, digests=()),
    ]
    assert not any(target.is_same(one) or one.is_same(target) for one in others)
