"""Models of other programs on this machine, and which of them can draft for another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from speculation.registry import ModelNotFound, found, resolve
from speculation.registry.vocabulary import vocabulary_of
from tests.support.tiny_gguf import write_tiny_gguf

DIGEST = "a" * 64


def test_a_search_takes_models_alone_and_follows_no_link_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_models_of_ollama_have_their_names_and_no_manifest_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
