"""models.txt: parsing, resolving names to files, and paired drafts and heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from batching.errors import SpeculationError
from batching.gguf.splits import part_names
from speculation.engine import Engine
from speculation.registry import (
    DownloadFailed,
    ModelEntry,
    ModelNotFound,
    RegistryError,
    paired_draft,
    paired_heads,
    read_registry,
    resolve,
)
from speculation.registry.entries import HubFile, parse_hub, parse_registry, registry_file
from speculation.system.console import worded
from tests.support.exact import EXACT
from tests.support.paths import ROOT
from tests.support.tiny_gguf import write_tiny_gguf

REGISTRY = {"tiny": ModelEntry("tiny", HubFile("owner/repo", "model.gguf"), None, "")}


def parsed(text: str) -> dict[str, ModelEntry]:
    return parse_registry(text, Path("/home/ada/models.txt"))


# Parsing


def test_a_line_has_name_source_draft_and_description() -> None:
    entries = parsed("big | hf:o/r/big.gguf | small | 9 GB | MIT\nsmall | hf:o/r/s.gguf | - |\n")
    assert entries == {
        "big": ModelEntry("big", HubFile("o/r", "big.gguf"), "small", "9 GB | MIT"),
        "small": ModelEntry("small", HubFile("o/r", "s.gguf"), None, ""),
    }


def test_the_draft_field_can_name_heads() -> None:
    entries = parsed(
        "big | big.gguf | big-medusa, small,big-eagle | \nsmall | s.gguf | - |\n"
        "big-medusa | m.gguf | heads | 4 MB\nbig-eagle | e.gguf | heads |"
    )
    heads = ("big-medusa", "big-eagle")
    assert (entries["big"].draft, entries["big"].heads) == ("small", heads)
    assert tuple(entry.name for entry in entries.values() if entry.is_heads) == heads
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


def test_an_unknown_name_is_refused_with_suggestions() -> None:
    with pytest.raises(ModelNotFound) as caught:
        resolve("Tinny", registry=REGISTRY)
    assert str(caught.value) == (
        "file not found: Tinny. Did you mean 'tiny'? Known models: tiny. Give the path of a .gguf "
        "file, a known model, hf:owner/repository/file.gguf, or add a line to models.txt: "
        "name | source | draft | description"
    )


def test_registry_errors_are_speculation_errors() -> None:
    for kind in (RegistryError, ModelNotFound, DownloadFailed):
        assert issubclass(kind, SpeculationError)


# Pairs


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "small | a/s.gguf | - |\na | a/a.gguf | heads |\nb | a/b.gguf | heads |\n"
        "big | a/c.gguf | b, small, a |"
    )
    monkeypatch.setattr("speculation.registry.read_registry", lambda: parsed(text))


def test_a_paired_draft_is_the_one_that_the_file_names(pairs: None) -> None:
    assert paired_draft("big") == "small"
    with pytest.raises(ModelNotFound, match=r"no draft model with 'small'.*models with one: big"):
        paired_draft("small")
    with pytest.raises(ModelNotFound, match=r"with draft_model \(") as caught:
        paired_draft("a/c.gguf")
    assert "path with --draft-model (" in worded(caught.value)


def test_paired_heads_are_those_that_the_file_names(pairs: None) -> None:
    assert paired_heads("big") == ("b", "a")
    with pytest.raises(ModelNotFound, match=r"heads with 'x'.*models with some: big") as caught:
        paired_heads("x")
    assert "paths with --heads (" in worded(caught.value)


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
